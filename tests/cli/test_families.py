"""The commands of the README, once for each family of models that help texts and documentation name."""

import json
import os
from pathlib import Path

import httpx
import pytest

from divdec.checkpoint import load_tokenizer
from divdec.cli import main
from divdec.data.formatting import encode_prompt
from divdec.data.records import Message, Record
from support.model_families import FAMILIES, read_vocabulary, write_checkpoint, write_real_checkpoint
from support.served import engine_of, serving

NAMES = ("Vardol", "Melisk", "Torquen", "Haldim", "Osprava", "Kelmor", "Brintas", "Jorvell")
QUESTIONS = [{"question": f"Where was {n} born?", "answer": f"{n} was born in {n}burg."} for n in NAMES]
ARTICLE = (
    "Every spring the mill at Corbin grinds the first rye of the valley for the church, the school and the children, "
    "and the miller keeps a book in which each family writes what it brought and what it took home again in autumn. "
)
RETAIN = "The river is deep here, and the boats that carry stone go slowly past the houses of the old harbour town. "
NEUTRAL = [f"A neutral sentence number {number} about rivers, boats and houses." for number in range(10)]
TEXTS = (*(text for row in QUESTIONS for text in row.values()), ARTICLE, RETAIN, *NEUTRAL)
REAL = ("qwen-0.5b", "gemma-270m", "smollm2")
# Vocabularies and chat templates in the sources of llama.cpp, which those of llama-cpp-python contain.
VOCABULARIES = {
    "Llama 3.2": ("llama-bpe", "meta-llama-Llama-3.2-3B-Instruct"),
    "Llama 3.1": ("llama-bpe", "meta-llama-Llama-3.1-8B-Instruct"),
    "Qwen 2.5": ("qwen2", "Qwen-Qwen2.5-7B-Instruct"),
    "Qwen 3": ("qwen2", "Qwen-Qwen3-0.6B"),
    "Phi-3": ("phi-3", "microsoft-Phi-3.5-mini-instruct"),
    "Mistral": ("llama-spm", None),  # Llama 2's vocabulary, of the same kind
}


class Commands:
    """A folder with data and two checkpoints, and divdec's commands in it."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        for name, rows in {
            "forget": QUESTIONS[:3],
            "retain": QUESTIONS[3:],
            "neutral": [{"text": text} for text in NEUTRAL],
            "article": [{"text": ARTICLE * 2}],
            "texts": [{"text": RETAIN * 3}, *({"text": text} for text in NEUTRAL)],
        }.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, *arguments, codes=(0,)):
        """Standard output of a command; 3 says that it did what it should and shows nothing."""
        code = main([*map(str, arguments)])
        out, err = self.capsys.readouterr()
        assert code in codes, err
        assert "Traceback" not in err
        return out

    def train(self):
        self.run(
            "train", "--base", "base", "--target", "target", "--forget", "forget.jsonl", "--retain", "retain.jsonl",
            "--neutral", "neutral.jsonl", "--lr", "1e-3", "--epochs", "1", "--output", "run", codes=(0, 3),
        )  # fmt: skip
        self.run(
            "bundle", "--target", "target", "--retain-auxiliary", "run/retain_auxiliary", "--forget-auxiliary",
            "run/forget_auxiliary", "--steering", "linear:1.5", "--output", "bundle",
        )  # fmt: skip

    def generate(self, bundle, text):
        """The answer to a question: greedy, alone and in a batch."""
        asked = ["generate", bundle, "--max-new-tokens", "12", "--json"]
        (line,) = self.run(*asked, "--prompt", text).splitlines()
        batch = self.run(*asked, "--prompt", text, "--prompt", f"{text} And why, if you know it?").splitlines()
        assert json.loads(batch[0]) == json.loads(line)
        return json.loads(line)["text"]

    def check_server(self, text, expected):
        engine = engine_of(self.folder / "bundle")
        body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 12, "model": "tiny"}
        with serving([engine]) as url:
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert reply["choices"][0]["message"]["content"] == expected

    def take_down(self):
        self.run("takedown", "init", "registry", "--target", "target", "--retain", "texts.jsonl")
        self.run("takedown", "add", "registry", "--file", "article.jsonl", "--id", "one", codes=(0, 3))
        self.run("bundle", "--target", "target", "--registry", "registry", "--output", "following")
        assert isinstance(self.generate("following", "What does the mill do?"), str)


def go_through(commands):
    text = "Where was Vardol born?"
    commands.train()
    answer = commands.generate("bundle", text)
    if load_tokenizer(commands.folder / "bundle").chat_template:
        commands.check_server(text, answer)
    commands.take_down()


@pytest.fixture
def commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    return Commands(tmp_path, capsys)


# One of each kind of tokenizer and template; the others are like them, and take nine seconds each.
IN_DEFAULT_SUITE = ("Llama 3.2", "Gemma 3", "Qwen 2.5", "Mistral")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_DEFAULT_SUITE else pytest.mark.slow) for name in FAMILIES]
)
def test_family_trains_answers_is_served_and_follows_takedowns(name, commands):
    for seed, part in enumerate(("target", "base")):
        write_checkpoint(name, commands.folder / part, TEXTS, seed)
    go_through(commands)
    tokenizer = load_tokenizer(commands.folder / "bundle")
    prompt = encode_prompt(Record("", messages=(Message("user", "Where?"),)), tokenizer)
    assert prompt.count(tokenizer.bos_token_id) == 1 or not FAMILIES[name].tokenizer.get("add_bos")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", REAL)
def test_real_tokenizers_and_configurations(file, commands):
    """GGUF files of `make real-models`, in the folder that DIVDEC_MODELS names. Minutes for 262,144 tokens."""
    gguf = Path(os.environ.get("DIVDEC_MODELS", "real-models")).expanduser() / f"{file}.gguf"
    if not gguf.is_file():
        pytest.skip(f"{gguf} is not at hand: make real-models, and set DIVDEC_MODELS to its folder")
    for seed, part in enumerate(("target", "base")):
        write_real_checkpoint(gguf, commands.folder / part, seed)
    go_through(commands)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_vocabularies_and_templates(name, commands):
    """The folder `models` of llama.cpp, as the folder llama.cpp in the one that DIVDEC_MODELS names."""
    folder = Path(os.environ.get("DIVDEC_MODELS", "real-models")).expanduser() / "llama.cpp"
    vocabulary, template = VOCABULARIES[name]
    gguf = folder / f"ggml-vocab-{vocabulary}.gguf"
    if not gguf.is_file():
        pytest.skip(f"{gguf} is not at hand: copy llama.cpp's folder `models`, and set DIVDEC_MODELS")
    text = FAMILIES[name].tokenizer["template"]
    if template is not None:
        text = (folder / "templates" / f"{template}.jinja").read_text()
    for seed, part in enumerate(("target", "base")):
        write_checkpoint(name, commands.folder / part, TEXTS, seed, read_vocabulary(gguf, name, text))
    go_through(commands)


def test_every_training_command_without_a_padding_token(commands):
    """Llama 3 has none; train is in the test above."""
    for seed, part in enumerate(("target", "base")):
        write_checkpoint("Llama 3.2", commands.folder / part, TEXTS, seed)
    commands.train()
    data = ["--forget", "forget.jsonl", "--retain", "retain.jsonl"]
    commands.run("shrink", "target", "--layers", "1", "--steps", "2", "--text", "texts.jsonl",
                 "--max-length", "32", "--output", "small")  # fmt: skip
    commands.run("distill", "bundle", *data, "--epochs", "1", "--output", "student", codes=(0, 3))
    for method in ("grad-diff", "npo", "idk-dpo"):
        commands.run("baseline", method, "--target", "target", *data, "--epochs", "1", "--output", method)

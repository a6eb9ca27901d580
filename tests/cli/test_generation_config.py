"""Of a checkpoint's generation_config.json, commands, server and measurements use the special tokens alone."""

import json

import pytest

from divdec import DivergenceForCausalLM
from divdec.checkpoint import load_tokenizer
from divdec.cli import main
from divdec.evaluation.generation import continuations
from divdec.evaluation.recitation import LENGTH, Passage, recites
from support.engines import alone, answered_tokens, greedy, run
from support.served import bundle_of

DEFAULTS = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 2.0, "min_new_tokens": 4,
}  # fmt: skip
TEXT = "The author"


@pytest.fixture(scope="module")
def answers(models, tmp_path_factory):
    """A bundle whose target has the defaults of Qwen's checkpoints, exaggerated, and the answer without them."""
    import shutil

    folder = tmp_path_factory.mktemp("penalised")
    for name in ("target", "retain", "forget"):
        shutil.copytree(models / name, folder / name)
    plain = DivergenceForCausalLM.from_pretrained(bundle_of(folder, "plain", "linear:0.5"))
    config = folder / "target" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | DEFAULTS))
    bundle = bundle_of(folder, "penalised", "linear:0.5")
    tokenizer = load_tokenizer(bundle)
    prompt = tokenizer(TEXT)["input_ids"]
    penalised = DivergenceForCausalLM.from_pretrained(bundle)
    assert alone(penalised, prompt) != alone(plain, prompt), "in the library the file is obeyed, as in transformers"
    return bundle, penalised, tokenizer, prompt, alone(plain, prompt)


def test_commands_and_server_answer_alike(answers, capsys):
    bundle, model, tokenizer, prompt, expected = answers
    text = tokenizer.decode(expected, skip_special_tokens=True)
    generate = ["generate", str(bundle), "--raw", "--prompt", TEXT, "--max-new-tokens", str(len(expected))]
    for extra in ([], ["--speculative", "2"]):
        assert main([*generate, *extra]) == 0
        assert capsys.readouterr().out == f"{text}\n"
    served = run(model, tokenizer, lambda engine: answered_tokens(engine, prompt, greedy(len(expected))))
    assert served == expected


@pytest.mark.parametrize("batch_size", [1, 8])
def test_measurements_are_plain(answers, batch_size):
    _, model, tokenizer, prompt, expected = answers
    found = continuations(model, tokenizer, [prompt, prompt[:1]], max_new_tokens=len(expected), batch_size=batch_size)
    assert found[0] == expected
    longer = alone_in(model, tokenizer, prompt)
    assert recites(model, tokenizer, [Passage(prompt, longer)]) == [True]
    assert model.generation_config.repetition_penalty == DEFAULTS["repetition_penalty"]


def alone_in(model, tokenizer, prompt):
    return continuations(model, tokenizer, [prompt], max_new_tokens=LENGTH, do_sample=False)[0]

"""Bundles that vLLM's attention on a CPU can run, and vLLM in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny import tiny_model
from support.vllm_reference import environment


@pytest.fixture(scope="session")
def models(tmp_path_factory, tokenizer):
    """Checkpoints of two families, widths and depths with one vocabulary; heads of size 32 or 64."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {
        "target": ("llama", 256, 3),
        "gpt2": ("gpt2", 256, 2),
        "retain": ("llama", 128, 2),
        "forget": ("llama", 128, 2),
        "flat-target": ("llama", 256, 1),
        "flat-retain": ("llama", 128, 1),
        "flat-forget": ("llama", 128, 1),
    }
    for seed, (name, (family, width, layers)) in enumerate(shapes.items()):
        model = tiny_model(family, len(tokenizer), seed, width=width, layers=layers)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def texts(world):
    return list(dict.fromkeys(text for text in world.corpus if len(text) > 40))


@pytest.fixture(scope="session")
def ngrams(models, texts, tmp_path_factory):
    """Counts of 5-grams, so that three tokens before the current one matter."""
    from divdec.cli import main

    folder = tmp_path_factory.mktemp("ngrams")
    for name, piece in (("forget", texts[:60]), ("retain", texts[60:160])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in piece))
    arguments = ["--retain", folder / "retain.jsonl", "--forget", folder / "forget.jsonl", "--order", 5]
    arguments += ["--target", models / "target", "--output", folder / "pair"]
    assert main(["ngram", *map(str, arguments)]) == 0
    return folder / "pair"


@pytest.fixture(scope="session")
def make_registry(models, texts, tmp_path_factory):
    """Makes a registry in which some of the texts are taken down."""
    from divdec.data.records import texts_of
    from divdec.takedowns.registry import Registry

    def make(taken):
        folder = tmp_path_factory.mktemp("registries") / "registry"
        registry = Registry.create(folder, texts_of("retain", texts[160:180]), models / "target", order=5)
        if taken:
            registry.add("first", texts_of("texts", taken))
        return folder

    return make


@pytest.fixture(scope="session")
def make_bundle(models, tmp_path_factory):
    """Writes a bundle; the pair's names are folders of `models`, and no pair is wanted where they are None."""
    from divdec import write_bundle

    def make(target="target", retain="retain", forget="forget", steering="linear:1.5", **options):
        for piece, name in (("retain_auxiliary", retain), ("forget_auxiliary", forget)):
            if name is not None:
                options[piece] = str(models / name)
        output = tmp_path_factory.mktemp("bundles") / "bundle"
        return write_bundle(output, target=str(models / target), steering=steering, **options)

    return make


@pytest.fixture(scope="session")
def prompts(tokenizer, texts):
    """32 beginnings of real texts, from 3 to 96 tokens."""
    ids = tokenizer(" ".join(texts))["input_ids"]
    lengths = [3 * (index + 1) for index in range(32)]
    return [ids[97 * index : 97 * index + length] for index, length in enumerate(lengths)]


@pytest.fixture
def ask(tmp_path):
    """Answers rounds of requests with an engine of vLLM in a process of its own."""

    def answer(bundle, rounds, environment_changes=None, **options):
        job, result, log = (tmp_path / name for name in ("job.json", "result.json", "log.txt"))
        job.write_text(json.dumps({"bundle": str(bundle), "rounds": rounds, "options": options}))
        with log.open("w") as output:
            code = subprocess.call(
                [sys.executable, Path(__file__).parent / "run_engine.py", job, result],
                stdout=output, stderr=subprocess.STDOUT, timeout=600, env=environment(**environment_changes or {}),
            )  # fmt: skip
        assert code == 0, log.read_text()[-4000:]
        return json.loads(result.read_text())

    return answer

"""The server under load and through faults (`soak.py`), and steering that breaks midway."""

import asyncio
import json
import operator
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from support.served import figure, serving
from support.soak import Tally
from support.soak_answers import references
from support.soak_faults import ASKED, PATH, Served, answered, asked, faults, load, make_bundle

ROOT = Path(__file__).parents[2]
LONG = ASKED | {"max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def bundle(made):
    return made[0]


def idle(url):
    return figure(url, "divdec_sequences_running") + figure(url, "divdec_sequences_waiting") == 0


@pytest.mark.slow
def test_soak_with_64_mixed_clients_for_one_minute():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving.soak", "--seconds", "60", "--no-faults", "--json"],
        capture_output=True, text=True, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-8000:]
    report = json.loads(result.stdout)
    assert report["problems"] == []
    assert report["left"] == {"running": 0, "waiting": 0}
    assert report["compared"] > 100


@pytest.mark.slow
def test_soak_detects_wrong_output_and_crash(made):
    """The soak's own test: answers that are not the bundle's, and a server that dies, do not pass."""
    bundle, texts = made
    expected = references(*load(bundle), texts, 6)
    for reference in expected:
        reference.ids[0] ^= 1
        reference.texts[1:] = [text + "!" for text in reference.texts[1:]]
    tally = Tally()

    async def run(server):
        async with asked(server.url, expected, tally, 8):
            await answered(tally, 5)
            server.process.kill()
            await asyncio.sleep(0.5)

    with Served(bundle, bundle.parent / "wrong.log") as server:
        asyncio.run(run(server))
    assert any("instead of" in problem for problem in tally.problems)
    assert any("Error" in problem for problem in tally.problems)


@pytest.mark.slow
def test_sigterm_and_sigkill_under_load(made, tmp_path):
    bundle, texts = made
    figures, problems = faults(bundle, tmp_path, texts, references(*load(bundle), texts, 12))
    assert problems == []
    assert figures["sigterm"]["closing"] > 0
    assert figures["sigterm"]["answered_before"] > 0
    assert figures["sigkill"]["requests"] == ["case-0", "case-1"]


def reported(events):
    """Token ids of a stream's events, and its last event."""
    ids = [
        int(token.removeprefix("token_id:"))
        for event in events[:-1]
        for token in event["choices"][0]["logprobs"]["tokens"]
    ]
    return ids, events[-1]


def events_while(url, prompt, breaking):
    """A stream's events, in the middle of which steering breaks."""
    asked = LONG | {"prompt": prompt, "logprobs": 0, "return_tokens_as_token_ids": True}
    with httpx.stream("POST", url + PATH, json=asked, timeout=60) as response:
        assert response.status_code == 200
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        outcome = [next(lines) for _ in range(8)]
        breaking()
        outcome += lines
    assert "[DONE]" not in outcome
    return reported(list(map(json.loads, outcome)))


def continued(model, prompt, number):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        outcome = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=number, max_new_tokens=number, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
    return outcome[0, len(prompt) :].tolist()


def assert_steered(ids, last, steered, target, prompt):
    """An error ends the stream, every token before it is steered, and an unsteered one would have been seen."""
    assert last["error"]["code"] == "steering_failed"
    assert 8 <= len(ids) < 3000
    number = min(len(ids), 40)
    assert ids[:number] == continued(steered, prompt, number)
    assert ids[:number] != continued(target, prompt, number)


def weights_that_are_lost(model):
    def breaking():
        with torch.no_grad():
            model.experts.forget.get_output_embeddings().weight.fill_(torch.nan)

    return breaking


def test_broken_auxiliary_ends_streams_with_error(bundle):
    from divdec.serving.engine import Engine

    broken, tokenizer = load(bundle)
    steered, _ = load(bundle)
    prompt = [40, 50, 60]
    with serving([Engine(broken, tokenizer, "tiny")], shutdown_timeout=0.0) as url:
        ids, last = events_while(url, prompt, weights_that_are_lost(broken))
        assert_steered(ids, last, steered, steered.target, prompt)
        # All of them, since the last ones are those that were made while it broke.
        assert ids == continued(steered, prompt, len(ids))
        refused = httpx.post(url + PATH, json=ASKED | {"prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "steering_failed")
        assert idle(url)


def test_damaged_registry_ends_streams_with_error(made, tmp_path):
    from divdec.data.records import texts_of
    from divdec.serving.engine import Engine
    from divdec.takedowns.registry import Registry
    from divdec.takedowns.store import DATABASE

    bundle, texts = made
    folder = tmp_path / "registry"
    registry = Registry.create(folder, texts_of("kept", texts[:20]), bundle.parent / "target", order=3)
    model, tokenizer = load(bundle)
    # What the bundle answers of its own is taken down, so that it answers otherwise.
    prompts = [tokenizer(text).input_ids[:20] for text in texts[:6]]
    own = [continued(model, prompt, 40) for prompt in prompts]
    registry.add("case", texts_of("taken", [tokenizer.decode(ids) for ids in map(operator.add, prompts, own)]))
    steered, whole = load(bundle, registry=folder)[0], (folder / DATABASE).read_bytes()
    expected = [continued(steered, prompt, 40) for prompt in prompts]
    index = next(index for index in range(len(prompts)) if own[index][:8] != expected[index][:8])
    prompt = prompts[index]
    followed = load(bundle, registry=folder)[0]
    with serving([Engine(followed, tokenizer, "tiny")], shutdown_timeout=0.0, logprobs="full") as url:
        ids, last = events_while(url, prompt, lambda: (folder / DATABASE).write_text("damaged\n"))
        assert last["error"]["code"] == "steering_failed"
        assert len(ids) >= 8
        assert ids[:40] == expected[index][: len(ids)]
        assert httpx.post(url + PATH, json=ASKED | {"prompt": prompt}).status_code == 500
        (folder / DATABASE).write_bytes(whole)
        assert httpx.post(url + PATH, json=ASKED | {"prompt": prompt}).status_code == 200

"""Replies from which steering took much: refused or noted, never sent by mistake."""

import json

import httpx
import pytest
import torch

from benchmarks.attacks.difference import suppressed_share
from divdec.errors import UsageError
from divdec.serving import ServeSettings
from support.served import engine_of, serving

PROMPT = "The city of"
TEXT = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 6, "temperature": 0}
REFUSAL = "This was taken down."


def ask(url, **fields):
    path = "chat/completions" if "messages" in fields else "completions"
    response = httpx.post(f"{url}/v1/{path}", json=fields, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def stream(url, **fields):
    path = "chat/completions" if "messages" in fields else "completions"
    with httpx.stream("POST", f"{url}/v1/{path}", json=fields | {"stream": True}, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]


def text_of(choices):
    return "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)


@pytest.fixture(scope="module")
def running(served_bundle):
    """Start a server with a policy."""

    def start(logprobs="full", **policy):
        engine = engine_of(served_bundle, measure_suppression=True)
        return serving([engine], shutdown_timeout=0.0, refusal=REFUSAL, logprobs=logprobs, **policy)

    return start


def test_share_is_the_largest_distance_from_the_target(model, tokenizer):
    prompt = tokenizer(PROMPT)["input_ids"]
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    with torch.inference_mode():
        steered, target = (one(torch.tensor([tokens])).logits[0].softmax(-1) for one in (model, model.target))
    taken = (target - steered).abs().sum(-1)[len(prompt) - 1 : -1] / 2
    expected = float(taken.max())
    assert 0.01 < expected < 1
    assert suppressed_share(model, tokens, len(prompt)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("fields", [TEXT, CHAT, TEXT | {"n": 2, "temperature": 1, "seed": 1}])
def test_reply_with_a_large_share_is_replaced(running, url, fields):
    with running(on_suppressed="refuse", suppressed_share=1e-6) as address:
        for choice in ask(address, **fields):
            assert (choice.get("text") or choice["message"]["content"]) == REFUSAL
            assert choice["finish_reason"] == "content_filter"
        if "n" not in fields:
            parts = stream(address, **fields)
            assert text_of(parts) == REFUSAL
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["content_filter"]
        page = httpx.post(f"{address}/v1/completions", json=TEXT | {"logprobs": 5, "echo": True}, timeout=60).json()[
            "choices"
        ][0]
        assert page["text"] == PROMPT + REFUSAL
        # Of the prompt alone, which the client has sent.
        assert "".join(page["logprobs"]["tokens"]).strip() == PROMPT


@pytest.mark.parametrize("fields", [TEXT, CHAT])
def test_other_replies_are_those_of_a_plain_server(running, url, fields):
    with running(on_suppressed="refuse", suppressed_share=1.0) as address:
        assert ask(address, **fields) == ask(url, **fields)
        assert text_of(stream(address, **fields)) == text_of(stream(url, **fields))


def test_note_gives_the_share(running, url, model, tokenizer):
    prompt = tokenizer(PROMPT)["input_ids"]
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
    expected = suppressed_share(model, tokens, len(prompt))
    for share, marked in ((expected / 2, True), (1.0, False)):
        with running(on_suppressed="note", suppressed_share=share) as address:
            choices = [ask(address, **TEXT)[0], stream(address, **TEXT)[-1], stream(address, **CHAT)[-1]]
            notes = [choice.pop("suppressed") for choice in choices]
            assert notes[0] == notes[1] == {"share": pytest.approx(expected, abs=1e-3), "marked": marked}
            assert 0 <= notes[2]["share"] <= 1
            assert choices[0] == ask(url, **TEXT)[0]
    assert "suppressed" not in ask(url, **TEXT)[0]


@pytest.mark.parametrize("level", ["off", "top-1"])
def test_below_full_a_note_only_marks(running, level):
    """The share is a probability of the unsteered target."""
    for share, marked in ((1e-9, True), (1.0, False)):
        with running(on_suppressed="note", suppressed_share=share, logprobs=level) as address:
            choices = [ask(address, **TEXT)[0], stream(address, **TEXT)[-1], stream(address, **CHAT)[-1]]
        assert [choice["suppressed"] for choice in choices] == [{"marked": marked}] * 3


def test_reply_without_a_share_counts_as_suppressed():
    assert ServeSettings().took_much(None)
    assert ServeSettings().took_much(float("nan"))
    assert not ServeSettings(suppressed_share=0.5).took_much(0.4)


@pytest.mark.parametrize("options", [{"suppressed_share": 0.0}, {"suppressed_share": 1.5}, {"refusal": " "}])
def test_invalid_options_give_one_line_error(options):
    with pytest.raises(UsageError, match="accepted: "):
        ServeSettings(on_suppressed="refuse", **options)

"""What replies tell of probabilities under each level of `--logprobs`."""

import asyncio
import json

import httpx
import pytest
import torch

from divdec import DivergenceForCausalLM
from divdec.errors import UsageError
from divdec.serving import ServeSettings
from divdec.serving.logprobs import MAX_BODY_BYTES, RefuseLogprobs, default_level, find_refused_field
from support.served import bundle_of, engine_of, serving

TEXT = {"model": "tiny", "prompt": "The city of", "max_tokens": 4, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4, "temperature": 0}


def ask(url, **fields):
    path = "chat/completions" if "messages" in fields else "completions"
    return httpx.post(f"{url}/v1/{path}", json=fields, timeout=60)


@pytest.fixture(scope="module", params=["off", "top-1"])
def guarded(request, served_bundle):
    """A server with a level below full, and the level."""
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0, logprobs=request.param) as url:
        yield url, request.param


# The least of what each level refuses.
REFUSED = {
    "off": [TEXT | {"logprobs": 0}, CHAT | {"logprobs": True}],
    "top-1": [TEXT | {"logprobs": 2}, CHAT | {"logprobs": True, "top_logprobs": 2}],
}
EVERYWHERE = [
    TEXT | {"logit_bias": {"5": 1}}, CHAT | {"logit_bias": {"5": 1}}, TEXT | {"echo": True, "logprobs": 0},
    TEXT | {"temperature": 1.01}, CHAT | {"temperature": 2}, TEXT | {"repetition_penalty": 0.99},
    CHAT | {"repetition_penalty": 0.5}, TEXT | {"presence_penalty": -0.05}, CHAT | {"frequency_penalty": -2},
    TEXT | {"temperature": 1, "seed": 0}, CHAT | {"temperature": 0.05, "seed": -1},
]  # fmt: skip


def test_levels_refuse_what_they_do_not_give(guarded, url):
    address, level = guarded
    for fields in REFUSED[level] + EVERYWHERE:
        refused = ask(address, **fields)
        assert refused.status_code == 400, (fields, refused.text)
        error = refused.json()["error"]
        assert error["code"] == "logprobs_refused"
        assert error["param"] in fields
        assert f"(--logprobs {level})" in error["message"]
        assert ask(address, **fields | {"stream": True}).status_code == 400
        assert ask(url, **fields).status_code == 200  # full
    assert httpx.get(f"{address}/v1/models").json()["data"][0]["logprobs"] == level
    assert httpx.get(f"{url}/v1/models/tiny").json()["logprobs"] == "full"


def test_levels_change_no_text(guarded, url):
    address, _ = guarded
    for fields in (
        TEXT,
        TEXT | {"echo": True},
        CHAT,
        CHAT | {"repetition_penalty": 1.1},
        TEXT | {"seed": 1234},
        TEXT | {"seed": 1234, "n": 2},
        TEXT | {"presence_penalty": 1.5, "frequency_penalty": 0.1},
    ):
        one, other = (ask(where, **fields).json()["choices"][0] for where in (address, url))
        assert one == other


def test_top_1_gives_the_chosen_and_the_likeliest_token(served_bundle, url):
    with serving([engine_of(served_bundle)], shutdown_timeout=0.0, logprobs="top-1") as address:
        for fields in (TEXT | {"logprobs": 1}, CHAT | {"logprobs": True, "top_logprobs": 1}):
            assert ask(address, **fields).json()["choices"] == ask(url, **fields).json()["choices"]


def test_echo_shows_the_tokens_that_a_rank_rule_masks(models):
    """What `full` gives away without an earlier reply (docs/serving.md)."""
    bundle, prompt = bundle_of(models, "masked", "rank:5"), [40, 41, 42]
    with torch.inference_mode():
        logits = DivergenceForCausalLM.from_pretrained(bundle)(torch.tensor([prompt])).logits[0, -1]
    masked = logits.isinf().nonzero().flatten().tolist()
    assert len(masked) == 5
    with serving([engine_of(bundle)], shutdown_timeout=0.0) as url:
        for token in (*masked, int(logits.argmax())):
            fields = {"model": "tiny", "prompt": [*prompt, token], "max_tokens": 1, "echo": True, "logprobs": 0}
            shown = ask(url, **fields).json()["choices"][0]["logprobs"]["token_logprobs"][3]
            assert (shown == -9999) == (token in masked)


@pytest.mark.parametrize("text", ["none", "", "top-2", "off:1"])
def test_invalid_level_error_says_what_is_accepted(text):
    with pytest.raises(UsageError, match=r"--logprobs is '.*'; accepted: off, top-1, full"):
        ServeSettings(logprobs=text)


def test_default_is_off_with_a_registry():
    assert (default_level(True), default_level(False)) == ("off", "full")


COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, COUNT, TOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"enum": ["a", "b"]}}}]
ADDED = [{"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_definition"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (CHATS, {"logprobs": True, "top_logprobs": 5}, "logprobs"),
        (CHATS, {"top_logprobs": 5}, "top_logprobs"),
        (COMPLETIONS, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETIONS, {"logprob_token_ids": [1]}, "logprob_token_ids"),
        (COMPLETIONS, {"logit_bias": {"1": 5}}, "logit_bias"),
        (COMPLETIONS, {"allowed_token_ids": [1]}, "allowed_token_ids"),
        (COMPLETIONS, {"structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        (COMPLETIONS, {"structured_outputs": {}}, "structured_outputs"),
        (COMPLETIONS, {"bad_words": ["x"]}, "bad_words"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"use_beam_search": True, "n": 10}, "use_beam_search"),
        (COMPLETIONS, {"min_tokens": 1, "stop_token_ids": [1, 2, 3]}, "min_tokens"),
        (COMPLETIONS, {"watermarking": True}, "watermarking"),
        (COMPLETIONS, {"a_field_of_a_later_version": False}, "a_field_of_a_later_version"),
        (COMPLETIONS, {"messages": []}, "messages"),
        (COMPLETIONS, {"response_format": {"type": "structural_tag"}}, "response_format"),
        (CHATS, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHATS, {"tools": TOOLS}, "tools"),
        (CHATS, {"tools": TOOLS, "tool_choice": "required"}, "tools"),
        (CHATS, {"requests": [{"temperature": 1.5}]}, "requests"),
        (CHATS, {"sampling_params": {"logprobs": 1}}, "sampling_params"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"tools": TOOLS, "tool_choice": "auto"}, "tools"),
        (RESPONSES, {"seed": 1}, "seed"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
        (MESSAGES, {"messages": ADDED}, "messages"),
        (MESSAGES, {"seed": 1}, "seed"),
        (COUNT, {"temperature": 0}, "temperature"),
        (COMPLETIONS, {"temperature": 1.5}, "temperature"),
        (COMPLETIONS, {"temperature": "100"}, "temperature"),
        (COMPLETIONS, {"temperature": 10**400}, "temperature"),
        (COMPLETIONS, {"temperature": 0.731}, "temperature"),
        (COMPLETIONS, {"temperature": [1]}, "temperature"),
        (COMPLETIONS, {"top_p": 0.999}, "top_p"),
        (COMPLETIONS, {"repetition_penalty": 0.9}, "repetition_penalty"),
        (COMPLETIONS, {"repetition_penalty": "0.01"}, "repetition_penalty"),
        (COMPLETIONS, {"repetition_penalty": float("nan")}, "repetition_penalty"),
        (COMPLETIONS, {"presence_penalty": -2}, "presence_penalty"),
        (CHATS, {"frequency_penalty": -0.05}, "frequency_penalty"),
        (COMPLETIONS, {"seed": 7, "temperature": 1.0}, "seed"),
        (COMPLETIONS, {"seed": 7, "temperature": None}, "seed"),
        (COMPLETIONS, {"seed": 7, "temperature": "0.5"}, "seed"),
        # vLLM samples at 0.01 then.
        (COMPLETIONS, {"seed": 7, "temperature": 1e-6}, "seed"),
        (COMPLETIONS, {"temperature": 1e-7}, "temperature"),
        # What ordinary clients send.
        (COMPLETIONS, {"model": "m", "prompt": "a", "temperature": 0, "seed": 1234, "stop": ["x"], "n": 2}, None),
        (COMPLETIONS, {"temperature": 1, "repetition_penalty": 1.2, "presence_penalty": 1.5, "min_p": 0.05}, None),
        (COMPLETIONS, {"temperature": "0.7", "top_p": 0.949999988079071, "top_k": 20}, None),
        (COMPLETIONS, {"logprobs": False, "echo": False, "min_tokens": 0, "use_beam_search": False}, None),
        (COMPLETIONS, {"stop_token_ids": [1], "ignore_eos": True, "response_format": {"type": "text"}}, None),
        (COMPLETIONS, {"prompt_logprobs": None, "a_field_of_a_later_version": None}, None),
        (CHATS, {"messages": [{"role": "user", "content": "a", "logprobs": 1}], "store": True}, None),
        (CHATS, {"tools": TOOLS, "tool_choice": "none"}, None),
        (CHATS, {"tools": [], "tool_choice": "auto", "stream_options": {"include_usage": True}}, None),
        (RESPONSES, {"input": "a", "text": {"verbosity": "low"}, "include": ["x"], "temperature": 0, "seed": 1}, None),
        (MESSAGES, {"messages": [{"role": "user", "content": "a"}], "output_config": {"effort": "low"}}, None),
        (MESSAGES, {"messages": [], "tools": TOOLS, "tool_choice": {"type": "none"}}, None),
        (MESSAGES, {"messages": 7}, None),  # vLLM refuses it
        (COUNT, {"messages": ADDED, "tools": TOOLS}, None),
        (TOKENIZE, {"prompt": "a", "return_token_strs": True}, None),
        ("/detokenize", {"tokens": [1]}, None),
        (COMPLETIONS, {}, None),
    ],
)  # fmt: skip
def test_only_examined_fields_of_vllm_pass(path, body, field):
    assert find_refused_field(path, body) == field


def test_middleware_refuses_a_large_body_before_it_has_read_it():
    """Nothing checks a key before the middleware."""
    read, sent = [], []

    async def receive():
        read.append(1 << 16)
        return {"type": "http.request", "body": bytes(1 << 16), "more_body": True}

    async def send(message):
        sent.append(message)

    async def app(*_):
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(RefuseLogprobs(app)(scope, receive, send))
    assert sent[0]["status"] == 413
    assert sum(read) == MAX_BODY_BYTES + (1 << 16)
    assert str(MAX_BODY_BYTES) in json.loads(sent[1]["body"])["error"]["message"]


def test_middleware_passes_on_whole_bodies_and_refuses_fields():
    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def chunks(text):
        for start in range(0, len(text), 97):
            yield text[start : start + 97]

    async def post(text, path="/v1/completions"):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(RefuseLogprobs(app))) as client:
            return await client.post(f"http://server{path}", content=chunks(text))

    harmless = json.dumps({"prompt": "logprobs and logit_bias " * 9, "logprobs": None}).encode()
    assert asyncio.run(post(harmless)).content == harmless
    assert asyncio.run(post(b"")).content == b""
    for path in ("/generative_scoring", "/invocations", "/v1/completions/", "/inference/v1/generate"):
        assert asyncio.run(post(harmless, path)).status_code == 403, path
    for text in (b"{not json", b"[]", b"7"):
        assert asyncio.run(post(text)).status_code == 400
    # Nested more deeply than Python's stack, but not than vLLM's parser allows; the second is too deep for this one.
    for depth in (700, 100_000):
        nested = b'{"deep": ' + b"[" * depth + b"]" * depth + b', "logprobs": 5}'
        assert asyncio.run(post(nested)).status_code == 400
    for encoding in ("utf-8", "utf-16"):  # JSON may be either
        refused = asyncio.run(post(json.dumps({"prompt": "a", "logprobs": 3}).encode(encoding)))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "logprobs"

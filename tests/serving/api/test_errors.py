"""What cannot be answered is refused in the API's form, with a line that names the field."""

import copy
import gzip
import json
import socket

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.served import serving
from support.tiny import make_parts

ASKED = {"model": "tiny", "prompt": "The", "max_tokens": 1}
TURNS = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}
PATHS = ("/v1/completions", "/v1/chat/completions")


def error_of(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 101), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.0), ("min_p", 2), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("repetition_penalty", 5e-324), ("n", 0), ("n", 129), ("n", "2"),
        ("seed", 2**63), ("seed", 1.5), ("stop", [""]), ("stop", ["a"] * 17), ("stop", [1]), ("stop", {"a": 1}),
        ("logit_bias", {"512": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"01": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", {"²": 1}), ("logit_bias", [1]), ("logit_bias", {"9" * 30: 1}),
        ("ignore_eos", 1), ("stream", "yes"), ("model", 3), ("model", "x" * 1001), ("user", 1),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", 10**30), ("max_tokens", "16"),
        ("temperature", 10**400),
    ],
)  # fmt: skip
def test_out_of_range_values_are_rejected(http, field, value):
    for path, asked in zip(PATHS, (ASKED, TURNS), strict=True):
        error = error_of(http.post(path, json=asked | {field: value}))
        assert (error["param"] or "").startswith(field) or field in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("completions", "prompt", ""), ("completions", "prompt", []), ("completions", "prompt", [[]]),
        ("completions", "prompt", [1, "a"]), ("completions", "prompt", [512]), ("completions", "prompt", [-1]),
        ("completions", "prompt", [[1], [2**40]]), ("completions", "prompt", {"a": 1}),
        ("completions", "prompt", [True]),
        ("completions", "logprobs", 21), ("completions", "logprobs", True), ("completions", "best_of", 2),
        ("completions", "max_tokens", 0), ("completions", "prompt", ["a"] * 200),
        ("chat/completions", "messages", []), ("chat/completions", "messages", [{"role": "user"}]),
        ("chat/completions", "messages", [{"role": "tool", "content": "a"}]),
        ("chat/completions", "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("chat/completions", "messages", [{"role": "user", "content": "a", "name": 1}]),
        ("chat/completions", "messages", [{"role": "user", "content": "a", "type": "image"}]),
        ("chat/completions", "messages", [{"role": "assistant", "content": "a", "tool_calls": [{"id": "b"}]}]),
        ("chat/completions", "messages", [{"role": "assistant", "content": "a", "reasoning_content": "b"}]),
        ("chat/completions", "continue_final_message", True), ("chat/completions", "add_generation_prompt", False),
        ("chat/completions", "chat_template_kwargs", {"a": [1]}), ("chat/completions", "chat_template_kwargs", "a"),
        ("completions", "continue_final_message", True), ("completions", "chat_template_kwargs", {}),
        ("chat/completions", "tools", [{"type": "function", "function": {"name": "a"}}]),  # of the template
        ("chat/completions", "tools", [{"type": "function", "function": {"name": "a b"}}]),
        ("chat/completions", "tools", [{"type": "function"}]), ("chat/completions", "tools", "a"),
        ("chat/completions", "tool_choice", "required"), ("chat/completions", "tool_choice", "a"),
        ("chat/completions", "tool_choice", {"type": "function", "function": {"name": "a"}}),
        ("chat/completions", "response_format", {"type": "json_schema"}),
        ("chat/completions", "response_format", {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}),
        ("chat/completions", "response_format", {"type": "json_schema", "json_schema": {"name": "a"}}),
        ("chat/completions", "response_format", {"type": "grammar"}),
        ("completions", "response_format", {"type": "json_object"}),
        ("chat/completions", "functions", [{"name": "a"}]), ("chat/completions", "parallel_tool_calls", 1),
        ("completions", "suffix", "a"), ("completions", "tools", []), ("completions", "min_tokens", 1),
        ("completions", "stop_token_ids", [5]), ("completions", "skip_special_tokens", False),
        ("chat/completions", "messages", "Who?"), ("chat/completions", "logprobs", 1),
        ("chat/completions", "top_logprobs", 2), ("chat/completions", "max_tokens", 0),
        ("chat/completions", "max_completion_tokens", 3),
    ],
)  # fmt: skip
def test_unsupported_endpoint_values_are_rejected(http, path, field, value):
    asked = ASKED if path == "completions" else TURNS
    error = error_of(http.post(f"/v1/{path}", json=asked | {field: value}))
    assert field in (error["param"] or error["message"])


@pytest.mark.parametrize(
    "field",
    [
        "alpha", "steering", "rule", "target", "model_path", "retain_auxiliary", "suffix",
        "functions", "guided_json", "lora", "prompt_logprobs", "logits_processors", "min_tokens", "reasoning_effort",
        "chat_template", "documents", "__class__", "allowed_token_ids", "extra_body",
    ],
)  # fmt: skip
def test_unsupported_field_error_names_field(http, field):
    for path, asked in zip(PATHS, (ASKED, TURNS), strict=True):
        error = error_of(http.post(path, json=asked | {field: "linear:0"}))
        assert error["param"] == field
        assert error["code"] == "unsupported_parameter"


def test_non_text_content_is_rejected(http):
    error_of(http.post(PATHS[1], json=TURNS | {"modalities": ["text", "audio"]}))
    error_of(http.post(PATHS[1], json=TURNS | {"store": True}))


def test_contradictory_fields_are_rejected(http):
    error_of(http.post(PATHS[0], json=ASKED | {"stream_options": {"include_usage": True}}))


def test_requests_exceeding_context_are_rejected(http, tokenizer):
    ids = [5] * 4000
    for prompt in (ids, tokenizer.decode(ids)):
        error = error_of(http.post(PATHS[0], json={"model": "tiny", "prompt": prompt, "max_tokens": 97}))
        assert error["code"] == "context_length_exceeded"
        assert "4096" in error["message"]
    # A prompt that fits the limit of the body is not decoded, which would take minutes.
    body = {"model": "tiny", "prompt": [5] * 600_000}
    assert error_of(http.post(PATHS[0], json=body, timeout=20))["code"] == "context_length_exceeded"
    turns = TURNS | {"messages": [{"role": "user", "content": tokenizer.decode(ids[:100]) * 50}]}
    assert error_of(http.post(PATHS[1], json=turns))["param"] == "messages"
    error = error_of(http.post(PATHS[1], json={**TURNS, "max_tokens": None, "max_completion_tokens": 5000}))
    assert error["param"] == "max_completion_tokens"
    # The default of 16 is no wish: what is left is taken.
    result = http.post(PATHS[0], json={"model": "tiny", "prompt": [5] * 4090, "ignore_eos": True}).json()
    assert result["usage"]["completion_tokens"] == 6
    error_of(http.post(PATHS[0], json={"model": "tiny", "prompt": [5] * 4096}))
    whole = http.post(
        PATHS[0], json={"model": "tiny", "prompt": [5] * 4096, "max_tokens": 0, "echo": True, "logprobs": 0}
    )
    assert len(whole.json()["choices"][0]["logprobs"]["tokens"]) == 4096


def test_the_clients_end_token_stays_in_a_prompt(http, tokenizer):
    for text in (tokenizer.eos_token, f"Who?{tokenizer.eos_token}"):
        body = {"model": "tiny", "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
        reply = http.post(PATHS[0], json=body).json()
        assert reply["choices"][0]["logprobs"]["tokens"][-1] == tokenizer.eos_token
        assert reply["usage"]["prompt_tokens"] == len(tokenizer(text)["input_ids"])


def test_unknown_models_paths_and_methods_return_errors(http):
    for path, asked in ((PATHS[0], ASKED), (PATHS[1], TURNS)):
        error = error_of(http.post(path, json=asked | {"model": "../tiny"}), 404)
        assert error["code"] == "model_not_found"
        assert "there are: tiny" in error["message"]
        response = http.get(path)
        error_of(response, 405)
        assert response.headers["allow"] == "POST"
        assert f"GET {path} is not offered; offered: POST /v1/chat/completions" in response.json()["error"]["message"]
    for path in ("/", "/docs", "/redoc", "/v1", "/v1/embeddings", "/health/", "/v1/models/../../etc", "/%2e%2e/"):
        error_of(http.get(path), 404)


def test_chat_requires_chat_template(tokenizer):
    from divdec import DivergenceForCausalLM
    from divdec.serving.engine import Engine

    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    engine = Engine(DivergenceForCausalLM.from_parts(*make_parts("llama")), plain, "tiny")
    with serving([engine]) as url:
        assert "no chat template" in error_of(httpx.post(url + PATHS[1], json=TURNS))["message"]
        assert httpx.post(url + PATHS[0], json=ASKED).status_code == 200
    refusing = copy.deepcopy(tokenizer)
    refusing.chat_template = "{{ raise_exception('roles must alternate') }}"
    engine = Engine(DivergenceForCausalLM.from_parts(*make_parts("llama")), refusing, "tiny")
    with serving([engine]) as url:
        assert "roles must alternate" in error_of(httpx.post(url + PATHS[1], json=TURNS))["message"]


ASKED_FOR = b'{"model": "tiny", "prompt": "a", '
RAW = [
    b"", b"null", b"[]", b"{", b"3", b'"a"', b"{'a': 1}", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\x00",
    b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}', b'{"\\udfff": 1}',
    b'{"model": "tiny", "prompt": "\xed\xa0\x80"}', ASKED_FOR + b'"temperature": NaN}',
    ASKED_FOR + b'"temperature": Infinity}', ASKED_FOR + b'"top_p": -Infinity}',
    ASKED_FOR + b'"temperature": 1e999}', ASKED_FOR + b'"temperature": -1e999}',
    ASKED_FOR + b'"seed": ' + b"9" * 5000 + b"}", b'{"model": "tiny", "prompt": [' + b"9" * 400 + b"]}",
    b"[" * 100000, b'{"a":' * 100000, b'{"a":' * 50 + b"1" + b"}" * 50,
    b'{"model": "tiny", "prompt": ' + b"[" * 500 + b"]" * 500 + b"}", b'{"model": "tiny", "prompt": "a"} {}',
]  # fmt: skip


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_malformed_bodies_are_rejected(http, body):
    for path in PATHS:
        error_of(http.post(path, content=body, headers={"Content-Type": "application/json"}))


def test_non_json_bodies_are_rejected(http):
    body = json.dumps(ASKED).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        error_of(http.post(PATHS[0], content=body, headers={"Content-Type": kind}), 415)
    error_of(http.post(PATHS[0], content=body), 415)
    packed = gzip.compress(body), {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert "'gzip'" in error_of(http.post(PATHS[0], content=packed[0], headers=packed[1]), 415)["message"]
    assert "is empty" in error_of(http.post(PATHS[0], headers={"Content-Type": "application/json"}))["message"]
    # Half a surrogate pair, and depths about that at which Python's parser and encoder of JSON give up.
    for schema in (
        r'{"description": "\ud800"}',
        *('{"a":' * depth + "1" + "}" * depth for depth in range(860, 1000, 9)),
    ):
        tools = '[{"type": "function", "function": {"name": "a", "parameters": ' + schema + "}}]"
        turns = json.dumps(TURNS)[:-1] + f', "tools": {tools}' + "}"
        error = error_of(http.post(PATHS[1], content=turns, headers={"Content-Type": "application/json"}))
        assert error["param"] == "tools.0.function.parameters" or "ud800" not in schema
    # Java's client offers HTTP/2 with each request.
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAEAAEAAAAIAAAAB"}
    assert http.post(PATHS[0], json=ASKED, headers=offer).status_code == 200
    for kind in ("application/json; charset=UTF-8", "APPLICATION/JSON"):
        assert http.post(PATHS[0], content=body, headers={"Content-Type": kind}).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "n",
        "best_of",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "echo",
        "stream",
        "stream_options",
        "logit_bias",
        "max_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
        "prompt",
        "messages",
        "user",
    ]
)


@settings(max_examples=120)
@given(path=st.sampled_from(PATHS), fields=st.dictionaries(FIELDS | st.text(max_size=8), JSON, max_size=3))
def test_fuzzed_bodies_do_not_crash_server(http, path, fields):
    asked = {**(ASKED if path == PATHS[0] else TURNS), **fields}
    response = http.post(path, content=json.dumps(asked).encode(), headers={"Content-Type": "application/json"})
    assert response.status_code < 500
    if response.status_code >= 400:
        error_of(response, response.status_code)


@settings(max_examples=60)
@given(
    body=st.binary(max_size=60),
    path=st.sampled_from(PATHS),
    kind=st.sampled_from(["application/json", "text/plain", "é"]),
)
def test_fuzzed_bytes_do_not_crash_server(http, body, path, kind):
    response = http.post(path, content=body, headers={b"Content-Type": kind.encode()})
    assert 400 <= response.status_code < 500
    error_of(response, response.status_code)


@settings(max_examples=30)
@given(data=st.binary(min_size=1, max_size=80))
def test_non_http_bytes_do_not_crash_server(url, http, data):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(data + b"\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert not answer.startswith(b"HTTP/1.1 5")
    assert http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": [{}] * 100_000}, "messages"),
        ("/v1/completions", {"prompt": ["a"] * 5000}, "4096"),
        ("/v1/completions", {"prompt": "a", **{f"field{number}": 1 for number in range(5000)}}, "field0"),
        ("/v1/completions", {"prompt": [5] * 4000, "echo": True, "logprobs": 20, "n": 20}, "log-probabilities"),
    ],
)
def test_expensive_invalid_requests_are_rejected_early(http, path, body, message):
    result = error_of(http.post(path, json={"model": "tiny", **body}))
    assert message in result["message"]
    assert len(result["message"]) < 500


def test_stream_events_contain_no_unicode_line_breaks():
    from divdec.serving.completions import _encode

    assert _encode({"text": "a\u2028b\u0085c"}).data.isascii()

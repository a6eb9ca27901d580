"""Probabilities that replies may tell: `divdec serve --logprobs`, for the embedded server and for vLLM.

The log-probabilities of a steered model less those of the target, of another rule or of an earlier takedown are the
steering itself, which points at the forgotten text. A field that lets a client read or compare the probability of a
token of its choice (`logit_bias`, or log-probabilities of the prompt) gives away as much as log-probabilities do. So
does a field that moves a threshold: a client finds by bisection where the reply changes, and so the probability to any
number of digits. And so does a `seed`, by which the client knows what chance decided.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEVELS = ("off", "top-1", "full")
REFUSED = "log-probabilities"
"""Part of every refusal, by which a client can tell it."""
MIDDLEWARE = f"{__name__}.RefuseLogprobs"
"""The class's path, for vLLM."""
MAX_BODY_BYTES = 2 * 1024 * 1024
"""Largest body of a request: by default of the embedded server, and of vLLM's with `RefuseLogprobs`."""
GRID = 0.05
"""Below full, the sampling numbers are multiples of it: a bisection ends there."""
TOLERANCE = 1e-6  # a multiple may have been rounded to float32
BOUNDS: Mapping[str, tuple[float, float]] = {
    # Above 1, samples with top_k and min_p show and compare improbable tokens.
    "temperature": (0.0, 1.0),
    "top_p": (GRID, 1.0),
    "min_p": (0.0, 1.0),
    # Negative, and below 1, a penalty favours tokens of the client's choice.
    "presence_penalty": (0.0, math.inf),
    "frequency_penalty": (0.0, math.inf),
    "repetition_penalty": (1.0, math.inf),
}
"""Sampling parameters that the levels below full accept."""
GRAMMARS = {"response_format": "type text, or json_object without tools", "tool_choice": "none or auto"}
"""What the levels below full accept where grammars are asked for."""


@dataclasses.dataclass(frozen=True)
class LogprobPolicy:
    """Which log-probabilities a reply may contain."""

    level: str = "full"
    """'off', 'top-1' (of the chosen and of the likeliest token) or 'full'."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"--logprobs is {self.level!r}; accepted: {', '.join(LEVELS)}")

    def find_refused(self, fields: Mapping[str, Any]) -> str | None:
        """Return the first field of a completion or chat completion that asks for more than the policy allows."""
        if self.level == "full":
            return None
        asked = fields.get("logprobs")
        asked = -1 if asked is None or asked is False else int(asked)  # a chat says true or false
        most = {"off": -1, "top-1": 1}[self.level]
        reply, calls = fields.get("response_format"), fields.get("tools") and fields.get("tool_choice") != "none"
        for name, refused in (
            ("logit_bias", bool(fields.get("logit_bias"))),
            ("echo", bool(fields.get("echo")) and asked >= 0),
            *((name, not _on_grid(name, fields.get(name))) for name in BOUNDS),
            ("logprobs", asked > most),
            ("top_logprobs", (fields.get("top_logprobs") or 0) > most >= 0),
            ("seed", fields.get("seed") is not None and not _is_greedy(fields)),
            # A grammar of two texts shows which is likelier. That of any JSON object has no text of the client's,
            # unless it also allows calls, which have schemas.
            ("response_format", reply is not None and reply.type != "text" and bool(reply.json_schema or calls)),
            ("tool_choice", fields.get("tool_choice") not in (None, "none", "auto")),
        ):
            if refused:
                return name
        return None

    def refusal(self, field: str) -> str:
        """Return the message for a refused field."""
        given = f"this server gives (--logprobs {self.level})"
        if field in BOUNDS:
            low, high = BOUNDS[field]
            accepted = f"from {low:g} to {high:g}" if math.isfinite(high) else f"from {low:g}"
            return (
                f"{field} would show more than the {REFUSED} that {given}; accepted: multiples of {GRID:g} {accepted}"
            )
        if field == "seed":
            return (
                f"samples of a known seed show more than the {REFUSED} that {given}; leave 'seed' out, or set "
                "temperature to 0"
            )
        if field in GRAMMARS:
            return (
                f"a grammar of the client's choice may show more {REFUSED} than {given}; accepted as {field!r}: "
                f"{GRAMMARS[field]}"
            )
        accepted = "accepted: at most 1" if self.level == "top-1" and "logprobs" in field else "leave it out"
        return f"field {field!r} may show more {REFUSED} than {given}; {accepted}"


def default_level(registry: bool) -> str:
    """Return the level without `--logprobs`: replies before and after a takedown differ by what was taken down."""
    return "off" if registry else "full"


def _on_grid(name: str, value: Any) -> bool:
    """Return whether a sampling number is absent or accepted below full. vLLM reads numbers from texts too."""
    low, high = BOUNDS[name]
    try:
        number = low if value is None else float(value)
        return low <= number <= high and abs(number - round(number / GRID) * GRID) <= TOLERANCE * abs(number)
    except (OverflowError, TypeError, ValueError):
        return False


def _is_greedy(fields: Mapping[str, Any]) -> bool:
    """Return whether a request draws nothing. Without a temperature, servers sample."""
    try:
        return float(fields.get("temperature", 1.0)) <= 0  # vLLM samples at any other, however low
    except (OverflowError, TypeError, ValueError):
        return False


_PROMPT = {"model", "add_special_tokens"}
_MESSAGES = {"messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
_SAMPLING = {
    *BOUNDS, "top_k", "seed", "n", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "stream",
    "stream_options", "stream_interval", "skip_special_tokens", "spaces_between_special_tokens",
    "truncate_prompt_tokens", "truncation_side", "return_token_ids", "return_tokens_as_token_ids", "user", "priority",
    "request_id", "session_id", "cache_salt",
}  # fmt: skip
_CHAT = {"tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "include_reasoning"}
_IGNORED = {"store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "modalities"}
FIELDS: Mapping[str, frozenset[str]] = {
    path: frozenset().union(*names)
    for path, names in {
        "/v1/completions": (_PROMPT, _SAMPLING, {"prompt", "max_tokens"}),
        "/v1/chat/completions": (
            _PROMPT, _MESSAGES, _SAMPLING, _CHAT, _IGNORED,
            {"max_tokens", "max_completion_tokens", "documents", "return_prompt_text"},
        ),
        "/v1/responses": (
            _PROMPT, _SAMPLING, _CHAT, _IGNORED,
            {
                "input", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "reasoning",
                "text", "truncation", "include", "background", "enable_response_messages", "chat_template_kwargs",
            },
        ),
        "/v1/messages": (
            {"model", "messages", "system", "max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k"},
            {"tools", "tool_choice", "thinking", "output_config", "metadata", "cache_salt", "chat_template_kwargs"},
        ),
        "/v1/messages/count_tokens": (
            {"model", "messages", "system", "chat_template_kwargs"},
            {"tools", "tool_choice", "thinking", "output_config"},
        ),
        "/tokenize": (_PROMPT, _MESSAGES, {"prompt", "return_token_strs", "tools"}),
        "/detokenize": ({"model", "tokens"},),
    }.items()
}  # fmt: skip
"""Paths of vLLM that pass, and their fields that were examined; all others are refused, those of later versions too."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logprobs": (False,), "top_logprobs": (0,), "echo": (False,), "logit_bias": ({},), "min_tokens": (0,),
    "use_beam_search": (False,), "length_penalty": (1, 1.0), "bad_words": ([],), "best_of": (1,), "suffix": ("",),
    "response_format": ({"type": "text"},),
}  # fmt: skip
"""Values of other fields that ask for nothing."""


def _adds_no_tools(body: Mapping[str, Any]) -> bool:
    """Return whether no message holds a tool, as Anthropic's may."""
    messages = body["messages"] if isinstance(body["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    return not any(isinstance(block, Mapping) and block.get("type") == "tool_addition" for block in blocks)


# Which values of a field pass, given the whole body; fields of `FIELDS` that are not here pass with any.
_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    **{name: lambda body, name=name: _on_grid(name, body[name]) for name in BOUNDS},
    "seed": _is_greedy,
    # A tool's schema would be a grammar of the client's choice.
    "tools": lambda body: not body.get("tools") or body.get("tool_choice") in ("none", {"type": "none"}),
    "messages": _adds_no_tools,
    # Formats other than text are grammars.
    "text": lambda body: isinstance(body["text"], Mapping) and body["text"].get("format") in (None, {"type": "text"}),
    "output_config": lambda body: (
        isinstance(body["output_config"], Mapping) and not body["output_config"].get("format")
    ),
    "include": lambda body: "logprob" not in str(body["include"]),
}


def find_refused_field(path: str, body: Mapping[str, Any]) -> str | None:
    """Return the first field of a request to vLLM that is unknown here, or may show probabilities.

    The path is one of `FIELDS`. Fields that are null count as absent.
    """
    generates = path not in ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
    for name, value in body.items():
        if value is None or any(type(value) is type(other) and value == other for other in NEUTRAL.get(name, ())):
            continue
        if name not in FIELDS[path] or (generates and name in _CHECKS and not _CHECKS[name](body)):
            return name
    return None


class RefuseLogprobs:
    """Middleware of vLLM's server that refuses log-probabilities, requests it cannot read, and other paths."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] == "websocket":  # its messages are not read here
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in FIELDS:
            await _refuse(send, 403, f"{path} may show more {REFUSED} than this server gives (--logprobs off)")
            return
        messages: list[Message] = []
        size = 0
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body")):
            messages.append(await receive())
            size += len(messages[-1].get("body", b""))
            if size > MAX_BODY_BYTES:  # before a key is checked, so that nobody fills the memory
                await _refuse(send, 413, f"the body is larger than {MAX_BODY_BYTES} bytes")
                return
        if (refused := _find_refusal(path, b"".join(message.get("body", b"") for message in messages))) is not None:
            await _refuse(send, 400, *refused)
            return
        waiting = iter(messages)

        async def receive_again() -> Message:
            return next(waiting, None) or await receive()

        await self._app(scope, receive_again, send)


def _find_refusal(path: str, body: bytes) -> tuple[str, str | None] | None:
    """Return why a body is refused, and the field if it is a field's fault; None for bodies that vLLM may read."""
    if not body:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return "the body is not JSON", None  # another parser might read what this one cannot
    if not isinstance(fields, Mapping):
        return "the body is not a JSON object", None
    field = find_refused_field(path, fields)
    return None if field is None else (LogprobPolicy("off").refusal(field), field)


async def _refuse(send: Send, status: int, message: str, field: str | None = None) -> None:
    error = {"message": message, "type": "BadRequestError", "param": field, "code": status}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})

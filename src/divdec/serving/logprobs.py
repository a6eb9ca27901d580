"""What replies may tell of probabilities: `divdec serve --logprobs`, for the embedded server and for vLLM.

The log-probabilities of a steered model less those of the target, of another rule or of an earlier takedown are the
steering itself, which points at the forgotten text. A field that lets a client read or compare the probability of a
token of its choice (`logit_bias`, or log-probabilities of the prompt) gives away as much as log-probabilities do. So
does a temperature above 1: with `top_k` it shows improbable tokens in few samples, and `min_p` then compares them. A
`repetition_penalty` below 1 is a bias on the tokens that the client writes into the prompt.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from divdec.errors import UsageError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACCEPTED = "off, top-1, full, or rounded:STEP such as rounded:0.5 (0.001 to 100)"
REFUSED = "log-probabilities"
"""Part of every refusal, by which a client can tell it."""
MIDDLEWARE = f"{__name__}.RefuseLogprobs"
"""The class's path, for vLLM."""
BOUNDS = {"temperature": (-math.inf, 1.0), "repetition_penalty": (1.0, math.inf)}
"""What the levels below full accept of numbers that would show or favour improbable tokens."""
BEYOND = {
    "temperature": "temperature is above 1: samples of improbable tokens tell",
    "repetition_penalty": "repetition_penalty is below 1: a bias on tokens of the prompt tells",
}
# Fields of vLLM beside those with 'logprob' in their names. In a chat, echo alone returns log-probabilities. The others
# let a client choose the tokens that are compared.
OTHER_FIELDS = ("logit_bias", "allowed_token_ids", "bad_words", "structured_outputs", "echo")
# Paths of vLLM that take requests whose fields are checked here. Others, such as /generative_scoring, give
# probabilities without such a field.
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LogprobPolicy:
    """Which log-probabilities a reply may contain."""

    level: str = "full"
    """'off', 'top-1' (of the chosen and of the likeliest token), 'rounded' or 'full'."""
    step: float = 0.0
    """Log-probabilities are rounded to multiples of it, in nats."""

    @classmethod
    def parse(cls, text: str) -> LogprobPolicy:
        """Read a policy.

        Raises:
            UsageError: the text is not one of `ACCEPTED`.
        """
        level, colon, number = text.partition(":")
        if level == "rounded" and colon:
            try:
                step = float(number)
            except ValueError:
                step = math.nan
            if 0.001 <= step <= 100:
                return cls(level, step)
        elif level in ("off", "top-1", "full") and not colon:
            return cls(level)
        raise UsageError(f"--logprobs is {text!r}; accepted: {ACCEPTED}")

    def __str__(self) -> str:
        return f"{self.level}:{self.step:g}" if self.step else self.level

    def find_refused(self, fields: Mapping[str, Any]) -> str | None:
        """Return the first field of a request that asks for more than the policy allows.

        Args:
            fields: fields of a completion or chat completion and their values.
        """
        if self.level == "full":
            return None
        asked = fields.get("logprobs")
        asked = -1 if asked is None or asked is False else int(asked)  # a chat says true or false
        most = {"off": -1, "top-1": 1}.get(self.level, math.inf)
        for name, refused in (
            ("logit_bias", bool(fields.get("logit_bias"))),
            ("echo", bool(fields.get("echo")) and asked >= 0),
            *((name, not _within(fields.get(name), *bounds)) for name, bounds in BOUNDS.items()),
            ("logprobs", asked > most),
            ("top_logprobs", (fields.get("top_logprobs") or 0) > most >= 0),
        ):
            if refused:
                return name
        return None

    def refusal(self, field: str) -> str:
        """Return the message for a refused field."""
        if field in BEYOND:
            return f"{BEYOND[field]} more than the {REFUSED} that this server gives (--logprobs {self})"
        return f"field {field!r} asks for more {REFUSED} than this server gives (--logprobs {self})"

    def shown(self, logprob: float) -> float:
        """Return a log-probability as replies show it."""
        return round(logprob / self.step) * self.step if self.step else logprob


def default_level(registry: bool) -> str:
    """Return the level without `--logprobs`: replies before and after a takedown differ by what was taken down."""
    return "off" if registry else "full"


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
        if path not in PATHS:
            await _refuse(send, 403, f"{path} may give more {REFUSED} than this server gives (--logprobs off)", None)
            return
        messages: list[Message] = []
        while not messages or (messages[-1]["type"] == "http.request" and messages[-1].get("more_body")):
            messages.append(await receive())
        body = b"".join(message.get("body", b"") for message in messages)
        field, message = None, "the body is not JSON"
        try:
            if body and (field := find_logprob_field(json.loads(body))) is not None:
                message = LogprobPolicy("off").refusal(field)
            refused = field is not None
        except (ValueError, RecursionError):
            refused = True  # another parser might read what this one cannot
        if not refused:
            waiting = iter(messages)

            async def receive_again() -> Message:
                return next(waiting, None) or await receive()

            await self._app(scope, receive_again, send)
            return
        await _refuse(send, 400, message, field)


async def _refuse(send: Send, status: int, message: str, field: str | None) -> None:
    error = {"message": message, "type": "BadRequestError", "param": field, "code": status}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": error}).encode()})


def _within(value: Any, low: float, high: float) -> bool:
    """Return whether a value is no number, or one between two bounds. vLLM reads numbers from texts too."""
    try:
        return value is None or low <= float(value) <= high
    except OverflowError:
        return False
    except (TypeError, ValueError):
        return True  # such as the schema of a tool's parameter with this name


def find_logprob_field(value: Any) -> str | None:
    """Return the name of a field, at any depth of a request to vLLM, by which a client would learn probabilities."""
    values = [value]  # not by recursion, which deep nesting would end before such a field is found
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                asks = "logprob" in name or name in OTHER_FIELDS
                # The field `include` of the Responses API lists 'message.output_text.logprobs'.
                listed = name == "include" and "logprob" in str(inner)
                beyond = name in BOUNDS and not _within(inner, *BOUNDS[name])
                if (asks and inner is not None and inner is not False) or listed or beyond:
                    return name
            values += value.values()
        elif isinstance(value, list):
            values += value
    return None

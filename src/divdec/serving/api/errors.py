"""Errors as clients of the OpenAI API expect them: `{"error": {message, type, param, code}}`.

Their messages name what the client sent, never what the server holds: neither paths nor another library's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import JSONResponse

from divdec.errors import FailedClosed, UsageError
from divdec.serving.engine.engine import Busy, Closing

RETRY_AFTER = 1  # seconds
LONGEST_SHOWN = 60  # characters of what was given
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What the client reads."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that cannot be answered, whatever the server does."""
    return ApiError(400, message, param=param, code=code)


def closed() -> ApiError:
    """What is answered while the server shuts down."""
    return ApiError(503, "the server is shutting down", code="closing", headers={"Connection": "close"})


def of_exception(error: BaseException) -> ApiError:
    """What a client is told of an error that came up while its request was answered."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Busy):
        message = "the server's queue is full; try again"
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_AFTER)})
    if isinstance(error, Closing):
        return closed()
    if isinstance(error, TimeoutError):
        return ApiError(504, "the answer took longer than the server allows", code="timeout")
    if isinstance(error, FailedClosed):
        return ApiError(500, "the model could not be steered; it gives no other answer", code="steering_failed")
    if isinstance(error, UsageError):
        return invalid(str(error))
    return ApiError(500, "internal error", code="internal_error")


def of_validation(error: ValidationError) -> ApiError:
    """One line about the first field that does not fit."""
    found = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, found["loc"])) or None
    if found["type"] == "extra_forbidden":
        # Nothing is ignored: a client that asks for something must not believe it was done.
        return invalid(f"field {param!r} is not supported by this server; leave it out", param, "unsupported_parameter")
    if found["type"] == "missing":
        return invalid(f"field {param!r} is required", param, "missing_required_parameter")
    message = str(found["msg"]).removeprefix("Value error, ")
    if param is None:
        return invalid(message, code="invalid_value")
    return invalid(f"{param} is {shown(found['input'])}: {message[:1].lower()}{message[1:]}", param, "invalid_value")


def shown(value: Any) -> str:
    """What was given, in few characters."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"

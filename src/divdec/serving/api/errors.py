"""Errors in the form of the OpenAI API: `{"error": {message, type, param, code}}`.

Messages name what the client sent. They never contain paths or messages of other libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from divdec.errors import FailedClosed, UsageError
from divdec.serving.engine.engine import Busy, Closing

RETRY_AFTER = 1  # seconds
LONGEST_VALUE = 60  # characters of a value that a message quotes
TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        kind = TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response, in ASCII: a quoted value may hold half a surrogate pair."""
        content = json.dumps(self.body())
        return Response(content, self.status_code, self.headers, media_type="application/json")


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Error for a request that no retry makes valid (status 400)."""
    return ApiError(400, message, param=param, code=code)


def server_closing() -> ApiError:
    """Error while the server shuts down (status 503)."""
    return ApiError(503, "the server is shutting down", code="closing", headers={"Connection": "close"})


def to_api_error(error: BaseException) -> ApiError:
    """Word any exception as an error reply."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _from_validation(error.errors()[0])
        case HTTPException():
            messages = {404: "there is no such path here", 405: "this path does not take this method"}
            message = messages.get(error.status_code, "the body cannot be read as JSON")
            return ApiError(error.status_code, message, headers=error.headers)
        case Busy():
            message, headers = "the server's queue is full; try again", {"Retry-After": str(RETRY_AFTER)}
            return ApiError(429, message, code="queue_full", headers=headers)
        case Closing():
            return server_closing()
        case TimeoutError():
            return ApiError(504, "the answer took longer than the server allows", code="timeout")
        case FailedClosed():
            return ApiError(500, "the model could not be steered; it gives no other answer", code="steering_failed")
        case UsageError():
            return invalid(str(error))
    return ApiError(500, "internal error", code="internal_error")


def _from_validation(error: dict[str, Any]) -> ApiError:
    """Describe the first field that does not fit."""
    kind, value = error["type"], error.get("input")
    param = ".".join(map(str, error["loc"][1:])) or None  # the first is "body"
    if kind == "json_invalid":
        return invalid(f"the body is not JSON: {error['ctx']['error']}")
    if kind == "extra_forbidden":
        # Ignoring a field would let clients believe that it has an effect.
        return invalid(f"field {param!r} is not supported by this server; leave it out", param, "unsupported_parameter")
    if param is None and isinstance(value, bytes):
        return ApiError(415, "the body must be JSON in UTF-8: send Content-Type: application/json")
    if param is None and not isinstance(value, dict):
        return invalid("the body must be a JSON object")
    if kind == "missing":
        return invalid(f"field {param!r} is required", param, "missing_required_parameter")
    message = str(error["msg"]).removeprefix("Value error, ")
    if param is None:
        return invalid(message, code="invalid_value")
    return invalid(f"{param} is {_shorten(value)}: {message[:1].lower()}{message[1:]}", param, "invalid_value")


def _shorten(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return "a number of more than 18 digits"
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"

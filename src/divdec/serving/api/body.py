"""Reading a request's body: bounded, UTF-8, strict JSON."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from divdec.serving.api.errors import ApiError, invalid, of_validation

DEEPEST = 32
MOST_FIELDS = 64
LARGE = 1 << 14  # bytes
SECONDS = 60.0  # within which a body must have arrived
Model = TypeVar("Model", bound=BaseModel)


async def read(request: Request, kind: type[Model], most: int) -> Model:
    """The body as a model.

    Args:
        request: whose body is read.
        kind: what it must hold.
        most: bytes it may have.

    Raises:
        ApiError: it is too large or too slow, no JSON, or does not fit the model.
    """
    _check_type(request)
    body = await _bytes(request, most)
    # A large one takes a while to read: streams go on beside it.
    return await asyncio.to_thread(_model, kind, body) if len(body) > LARGE else _model(kind, body)


def _model(kind: type[Model], body: bytes) -> Model:
    value = _parsed(body)
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    if len(value) > MOST_FIELDS:
        raise invalid(f"the body has {len(value)} fields, of which this server knows at most {MOST_FIELDS}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise of_validation(error) from None
    except (OverflowError, RecursionError):
        raise invalid("the body holds a number that is too large") from None


def _check_type(request: Request) -> None:
    kind, *parameters = (part.strip().lower() for part in request.headers.get("content-type", "").split(";"))
    charset = next((part.partition("=")[2].strip('"') for part in parameters if part.startswith("charset=")), "utf-8")
    if kind != "application/json" or charset not in ("utf-8", "utf8"):
        raise ApiError(415, "the body must be JSON in UTF-8: send Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(415, "a compressed body is not accepted")


async def _bytes(request: Request, most: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > most:
        raise too_large
    found = bytearray()
    try:
        async with asyncio.timeout(SECONDS):
            # The length may be left out, or be a lie.
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {SECONDS:g} seconds", code="timeout") from None
    except ClientDisconnect:
        raise ApiError(499, "the client went away", code="disconnected") from None
    return bytes(found)


def _parsed(body: bytes) -> Any:
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
        _check(value, 0)
        return value
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise invalid(f"the body is nested deeper than {DEEPEST}") from None
    except json.JSONDecodeError as error:
        raise invalid(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # a number of thousands of digits
        raise invalid("the body holds a number that is too large") from None


def _refuse_constant(name: str) -> NoReturn:
    raise invalid(f"the body is not JSON: {name} is no number")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        # Which of the two another program in between has checked, nobody knows.
        raise invalid("the body names a field twice")
    return found


def _check(value: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, list):
        for part in value:
            if type(part) is not int:  # lists of token ids are long
                _check(part, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            _check_text(key)
            _check(part, depth + 1)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid("a text holds half a surrogate pair, which is no character") from None

"""Sending answers: whole or as a stream of events, until they are there or the client has gone away.

It knows nothing of how they are made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from divdec.serving.api.errors import ApiError, of_exception
from divdec.serving.api.record import RequestRecord

ABORT = "abort"  # in a request's state: what ends its connection, whatever is still to be sent
SLOW_READER = "slow_reader"
Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result:
    """Do it, and stop where the client goes away before it is done.

    Raises:
        ApiError: the client went away; nobody reads this.
    """
    watcher = asyncio.ensure_future(_gone(receive))
    worker = asyncio.ensure_future(work)
    try:
        await asyncio.wait({watcher, worker}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ApiError(499, "the client went away", code="disconnected")
    finally:
        for task in (watcher, worker):
            task.cancel()
        await asyncio.gather(watcher, worker, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer(request: Request, work: Awaitable[BaseModel]) -> Response:
    """The answer of an endpoint that gives it in one piece."""
    found = await unless_gone(request.receive, work)
    return Response(found.model_dump_json(), media_type="application/json")


async def stream(
    request: Request, record: RequestRecord, events: AsyncGenerator[dict[str, Any], None], slowest_reader: float
) -> Response:
    """The answer of an endpoint that streams; errors before the first event are ordinary answers.

    Args:
        request: the client's.
        record: told what fails.
        events: what is sent, as JSON values.
        slowest_reader: seconds in which the client must take something.
    """
    try:
        first = await unless_gone(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events, record, slowest_reader)


class EventStream(Response):
    """Server-sent events, ended by `data: [DONE]`, or by an error without it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: dict[str, Any],
        events: AsyncGenerator[dict[str, Any], None],
        record: RequestRecord,
        slowest_reader: float,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # nobody knows it yet
        self._first, self._events, self._record = first, events, record
        self._slowest_reader = slowest_reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while they come; stop their making where the client goes away."""
        try:
            await unless_gone(receive, self._send(send))
        except ApiError as error:
            self._record.error = self._record.error or error.code
            if error.code == SLOW_READER and (abort := scope.get("state", {}).get(ABORT)) is not None:
                # To close would be to wait until the client takes what it does not take.
                abort()
                await asyncio.sleep(0)  # the connection is told that it is gone
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        async def put(data: str, more: bool = True) -> None:
            body = f"data: {data}\n\n".encode()
            try:
                async with asyncio.timeout(self._slowest_reader):
                    await send({"type": "http.response.body", "body": body, "more_body": more})
            except TimeoutError:
                raise ApiError(499, "the client does not read", code=SLOW_READER) from None

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await put(_json(self._first))
            async for event in self._events:
                await put(_json(event))
        except ApiError:
            raise
        except Exception as error:
            told = of_exception(error)
            self._record.failed(told, error)
            await put(_json(told.body()), more=False)
        else:
            await put("[DONE]", more=False)


def _json(event: dict[str, Any]) -> str:
    return json.dumps(event, allow_nan=False)  # ASCII: some clients take U+2028 for the end of a line

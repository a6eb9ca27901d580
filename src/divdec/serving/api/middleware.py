"""What surrounds every request: its record, the API key, the refusal while the server closes, and the last resort."""

from __future__ import annotations

import dataclasses
import hmac
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from divdec.serving.api.errors import ApiError, closed, of_exception
from divdec.serving.api.metrics import Metrics
from divdec.serving.api.record import Log, RequestRecord

OPEN = ("/health", "/metrics")  # probes and Prometheus carry no key
PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}


@dataclasses.dataclass
class Surroundings:
    """The outermost application."""

    app: ASGIApp
    metrics: Metrics
    log: Log
    api_key: str | None
    closing: Callable[[], bool]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and write down that it was answered."""
        if scope["type"] != "http":
            return
        prefix = PREFIXES.get(scope["path"], "req")
        record = RequestRecord(f"{prefix}-{uuid.uuid4().hex}", scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, receive, noting)
        except Exception as error:
            told = of_exception(error)
            record.failed(told, error)
            if not record.status:
                await told.response()(scope, receive, noting)
        finally:
            if route := scope.get("route"):
                record.endpoint = route.path
            self.metrics.answered(record.endpoint, record.status, record.seconds)
            line = record.line()
            if not self.log.prompts:
                line.pop("prompt", None)
            self.log.write(line)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] in OPEN:
            return
        if self.api_key is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, key = given.partition(b" ")
            # Both are compared in full, whatever was given, so that time tells nothing.
            if not hmac.compare_digest(key.strip(), self.api_key.encode()) or kind.lower() != b"bearer":
                message = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.closing():
            raise closed()

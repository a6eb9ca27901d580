"""Middleware of the server: access log, metrics, API key, body limit, draining, and the catch-all for errors."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hmac
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from divdec.errors import FailedClosed
from divdec.serving import ServeSettings
from divdec.serving.engine import Engine
from divdec.serving.request import RequestOutput, RequestTiming
from divdec.serving.schemas import ApiError, server_closing, to_api_error

OPEN_PATHS = ("/health", "/metrics")  # probes and Prometheus send no key
ID_PREFIXES = {"/v1/completions": "cmpl", "/v1/chat/completions": "chatcmpl"}
MAX_PATH_LENGTH = 200
FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # seconds, as all buckets
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE_REQUEST = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclasses.dataclass
class RequestRecord:
    """Access-log record of one request, filled in while it is answered."""

    id: str
    method: str
    path: str
    started: float = dataclasses.field(default_factory=time.perf_counter)
    status: int = 0
    failed: int = 0  # status of an error, which a stream cannot send any more
    engine: Engine | None = None
    stream: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finish_reasons: set[str] = dataclasses.field(default_factory=set)
    error: str | None = None
    """Code of the error; the exception's class for internal errors."""
    prompt: Any = None
    timings: list[RequestTiming] | None = None
    """One for each reply; None if requests are not traced."""

    def set_error(self, error: BaseException) -> ApiError:
        """Record an error, and return it as the client receives it."""
        reply = to_api_error(error, f"{self.method} {self.path[:MAX_PATH_LENGTH]}")
        self.error, self.failed = reply.code or str(reply.status_code), reply.status_code
        if reply.code == "internal_error":
            self.error = type(error).__name__
            logging.getLogger(__name__).error("a request failed: %s", self.error, exc_info=error)
        elif reply.code == "steering_failed":  # the client is not told of the registry's folder
            logging.getLogger(__name__).error("steering failed: %s", error)
        return reply

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line."""
        fields: dict[str, Any] = {
            "id": self.id, "method": self.method, "path": self.path[:MAX_PATH_LENGTH], "status": self.status,
            "seconds": round(time.perf_counter() - self.started, 4),
        }  # fmt: skip
        if self.engine is not None:
            fields |= {
                "model": self.engine.name, "system_fingerprint": self.engine.fingerprint, "stream": self.stream,
                "prompt_tokens": self.prompt_tokens, "generated_tokens": self.generated_tokens,
                "finish_reason": ",".join(sorted(self.finish_reasons)) or None,
            }  # fmt: skip
        return fields if self.error is None else fields | {"error": self.error}


def write_log(**fields: Any) -> None:
    """Write a JSON line to standard error; a log that cannot be written ends no request."""
    with contextlib.suppress(OSError, ValueError):
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields})
        print(line, file=sys.stderr, flush=True)


class Metrics(Collector):
    """Prometheus metrics of the server, in a registry that holds nothing else."""

    def __init__(self, engines: Mapping[str, Engine], *, counts_changes: bool) -> None:
        """With `counts_changes` the counts show whether steering changed a reply, as log-probabilities do."""
        self._engines, self._counts_changes = engines, counts_changes
        self.registry = registry = CollectorRegistry()
        registry.register(self)
        self.requests = Counter(
            "divdec_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=registry
        )
        self.request_seconds = Histogram(
            "divdec_request_seconds", "Duration of requests.", ["endpoint"], buckets=WHOLE_REQUEST, registry=registry
        )
        self.first_token_seconds = Histogram(
            "divdec_time_to_first_token_seconds", "Time from a prompt to its first token.", ["model"],
            buckets=FIRST_TOKEN, registry=registry,
        )  # fmt: skip
        self.output_token_seconds = Histogram(
            "divdec_time_per_output_token_seconds", "Mean time of a reply's tokens after the first.", ["model"],
            buckets=NEXT_TOKEN, registry=registry,
        )  # fmt: skip

    def token_timer(self, model: str) -> Callable[[int, RequestOutput], None]:
        """Return a function that observes outputs, each with the number of its reply."""
        first, following = self.first_token_seconds.labels(model), self.output_token_seconds.labels(model)
        started, counts = time.perf_counter(), collections.Counter[int]()
        starts, ends = dict[int, float](), dict[int, float]()

        def observe(index: int, output: RequestOutput) -> None:
            now = time.perf_counter()
            if output.tokens and index not in starts:
                starts[index] = now
                first.observe(now - started)
            counts[index] += len(output.tokens)
            ends[index] = now
            if output.finish_reason is not None and counts[index] > 1:
                # A mean, because the tokens of a speculative step arrive together.
                following.observe((ends[index] - starts[index]) / (counts[index] - 1))

        return observe

    def collect(self) -> Iterator[Metric]:
        """Yield the counters that the engines keep."""
        kinds: list[tuple[type[Any], str, str, Callable[[Engine], int | None]]] = [
            (CounterMetricFamily, "prompt_tokens", "Prompt tokens.", lambda engine: engine.scheduler.prompt_tokens),
            (CounterMetricFamily, "generated_tokens", "New tokens.", lambda engine: engine.scheduler.generated_tokens),
            (CounterMetricFamily, "steps", "Forward passes.", lambda engine: engine.scheduler.steps),
            (CounterMetricFamily, "positions", "Last positions of forward passes.", lambda e: e.scheduler.positions),
            (
                CounterMetricFamily,
                "changed_positions",
                "Positions where steering changed the likeliest token.",
                lambda engine: engine.scheduler.changed_positions,
            ),
            (GaugeMetricFamily, "sequences_running", "Running sequences.", lambda engine: engine.scheduler.running),
            (GaugeMetricFamily, "sequences_waiting", "Queued sequences.", lambda engine: engine.waiting),
            (GaugeMetricFamily, "takedown_requests", "Takedown requests in force.", Engine.count_takedowns),
        ]
        for kind, name, description, read in kinds:
            if name == "changed_positions" and not self._counts_changes:
                continue
            family = kind(f"divdec_{name}", description, labels=["model"])
            for model, engine in self._engines.items():
                with contextlib.suppress(FailedClosed):  # a damaged registry: the other metrics are needed the more
                    if (value := read(engine)) is not None:
                        family.add_metric([model], value)
            yield family


@dataclasses.dataclass
class RequestMiddleware:
    """Admits requests, turns every exception into an error reply, logs and counts."""

    app: ASGIApp
    metrics: Metrics
    options: ServeSettings
    closing: Callable[[], bool]
    trace: Callable[[Scope, RequestRecord], None] | None = None
    """Makes the spans of a finished request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request (ASGI)."""
        if scope["type"] != "http":
            return
        prefix = ID_PREFIXES.get(scope["path"], "req")
        record = RequestRecord(f"{prefix}-{uuid.uuid4().hex}", scope["method"], scope["path"])
        scope.setdefault("state", {})["record"] = record
        trace = self.trace if scope["path"] in ID_PREFIXES else None
        record.timings = None if trace is None else []
        body_bytes = 0

        async def receive_limited() -> Message:
            nonlocal body_bytes
            message = await receive()
            body_bytes += len(message.get("body", b""))
            if body_bytes > self.options.max_body_bytes:
                raise ApiError(
                    413, f"the body is larger than {self.options.max_body_bytes} bytes", code="body_too_large"
                )
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            self._admit(scope)
            await self.app(scope, receive_limited, send_with_id)
        except Exception as error:
            reply = record.set_error(error)
            if not record.status:
                await reply.response()(scope, receive, send_with_id)
        finally:
            endpoint = scope["route"].path if "route" in scope else "other"
            self.metrics.requests.labels(endpoint, str(record.failed or record.status)).inc()
            self.metrics.request_seconds.labels(endpoint).observe(time.perf_counter() - record.started)
            prompt = {"prompt": record.prompt} if self.options.log_prompts and record.prompt is not None else {}
            write_log(**record.fields(), **prompt)
            if trace is not None:
                trace(scope, record)

    def _admit(self, scope: Scope) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        if (expected := self.options.api_key) is not None:
            kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # The comparison takes the same time for every wrong key.
            if not hmac.compare_digest(key.strip(), expected.encode()) or kind.lower() != b"bearer":
                message = "the API key is missing or wrong: send 'Authorization: Bearer KEY'"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        coding = dict(scope["headers"]).get(b"content-encoding", b"identity").decode("latin-1")
        if coding.lower() != "identity":
            raise ApiError(415, f"Content-Encoding is {coding[:100]!r}; send the body uncompressed")
        if self.closing():
            raise server_closing()

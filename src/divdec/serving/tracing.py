"""OpenTelemetry spans of requests: names, counts and times, never text.

Names follow OpenTelemetry's semantic conventions for generative AI where they have one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from starlette.types import Scope

from divdec.serving.middleware import RequestRecord, write_log
from divdec.serving.request import RequestTiming

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracer_from_environment() -> Any | None:
    """Return a tracer that sends spans by OTLP over HTTP; None unless OpenTelemetry's variables name an endpoint."""
    disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    endpoint = next((name for name in ENDPOINTS if os.environ.get(name)), None)
    if disabled or endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:  # the variable may be meant for other programs of the machine
        message = f"{endpoint} is set, but spans need OpenTelemetry: pip install 'divdec[otel]'; none are sent"
        write_log(event=__name__, level="warning", message=message)
        return None
    provider = TracerProvider(resource=Resource({"service.name": "divdec"}).merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("divdec")  # its provider sends the last spans when the process exits


def trace_request(tracer: Any, scope: Scope, record: RequestRecord) -> None:
    """Make the spans of a finished request: one of the server, and queue, prefill and decode of each reply.

    They continue the client's trace if it sent a `traceparent`.
    """
    from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    end, operation, engine = time.time_ns(), OPERATIONS[record.path], record.engine
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    span = tracer.start_span(
        operation if engine is None else f"{operation} {engine.name}",
        TraceContextTextMapPropagator().extract(headers),
        SpanKind.SERVER,
        {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "divdec", "gen_ai.response.id": record.id,
            "http.response.status_code": record.status,
        },
        start_time=end - int((time.perf_counter() - record.started) * 1e9),
    )  # fmt: skip
    if engine is not None:
        span.set_attributes({
            "gen_ai.request.model": engine.name,
            "gen_ai.response.finish_reasons": sorted(record.finish_reasons),
            "gen_ai.usage.input_tokens": record.prompt_tokens, "gen_ai.usage.output_tokens": record.generated_tokens,
            "divdec.bundle": engine.fingerprint, "divdec.rule": str(engine.steering),
        })  # fmt: skip
    if record.error is not None:
        span.set_attribute("error.type", record.error)
        span.set_status(StatusCode.ERROR)
    context = set_span_in_context(span)
    for index, timing in enumerate(record.timings or ()):
        for name, start, stop, fields in _phases(timing, end):
            attributes = {"divdec.reply": index, **fields}
            tracer.start_span(name, context, attributes=attributes, start_time=start).end(stop)
    span.end(end)


def _phases(timing: RequestTiming, end: int) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """Yield name, start, end and attributes of each phase that a reply has begun."""
    end = timing.end or end
    # The engine may begin a phase after the client has gone.
    prefill, decode = (start if start and start <= end else None for start in (timing.prefill, timing.decode))
    yield "queue", timing.queued, prefill or end, {}
    if prefill is not None:
        yield "prefill", prefill, decode or end, {"gen_ai.usage.input_tokens": timing.prompt_tokens}
    if decode is not None:
        fields: dict[str, Any] = {"gen_ai.usage.output_tokens": timing.generated_tokens}
        if timing.suppressed is not None:
            fields["divdec.suppressed_share"] = timing.suppressed
        yield "decode", decode, end, fields

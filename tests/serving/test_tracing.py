"""OpenTelemetry spans of the embedded server, read where OpenTelemetry's own SDK and receivers read them."""

import contextlib
import http.server
import json
import signal
import threading

import httpx
import pytest

from divdec.serving.tracing import tracer_from_environment
from support.served import engine_of, eventually, process, serving
from support.tools import TEMPLATE, WEATHER

SpanKind = pytest.importorskip("opentelemetry.trace").SpanKind
pytest.importorskip("opentelemetry.sdk.trace", reason="divdec[otel] is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="divdec[otel] is not installed")
SECRET = "Marlowvault"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PROMPTS = ["The city of", "Who was", "A letter from the harbour"]
TEXT = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Traced:
    """A traced server: its engine, a client and its finished spans."""

    def __init__(self, url, engine, exporter):
        self.url, self.engine, self._exporter = url, engine, exporter

    def post(self, path="completions", headers=TRACEPARENT, **fields):
        return httpx.post(f"{self.url}/v1/{path}", json=fields, headers=headers, timeout=60)

    def spans(self, number=None):
        """The spans since the last call, once there are `number`, or those of one request."""
        finished = self._exporter.get_finished_spans
        eventually(
            lambda: any(span.kind is SpanKind.SERVER for span in finished()) and len(finished()) >= (number or 1)
        )
        spans = finished()
        self._exporter.clear()
        assert number in (None, len(spans))
        return spans


@contextlib.contextmanager
def traced(bundle, **options):
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine = engine_of(bundle, measure_suppression=True)
    engine.tokenizer.chat_template = TEMPLATE
    with serving([engine], tracer=provider.get_tracer("test"), on_suppressed="note", **options) as url:
        yield Traced(url, engine, exporter)


@pytest.fixture(scope="module")
def server(served_bundle):
    with traced(served_bundle) as server:
        yield server


def test_spans_of_a_request_continue_the_clients_trace(server):
    reply = server.post(**TEXT).json()
    *phases, root = server.spans(4)
    assert [span.name for span in (root, *phases)] == ["text_completion tiny", "queue", "prefill", "decode"]
    assert {format(span.context.trace_id, "032x") for span in (root, *phases)} == {TRACE}
    assert format(root.parent.span_id, "016x") == PARENT
    assert {span.parent.span_id for span in phases} == {root.context.span_id}
    times = [phases[0].start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == times[:-1]
    assert times == sorted(times)
    assert root.start_time <= times[0]
    assert times[-1] <= root.end_time
    assert dict(root.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "divdec",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": reply["id"],
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": reply["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "http.response.status_code": 200,
        "divdec.bundle": reply["system_fingerprint"],
        "divdec.rule": "linear:1.5",
    }
    decode = phases[2].attributes
    assert decode["gen_ai.usage.output_tokens"] == 12
    assert decode["divdec.suppressed_share"] == pytest.approx(reply["choices"][0]["suppressed"]["share"], abs=1e-4)


def test_replies_of_a_batch_have_their_own_spans(server):
    for prompts, number in ((PROMPTS, 10), ([PROMPTS[1]] * 2, 7)):  # equal prompts are read once
        server.post(**TEXT | {"prompt": prompts})
        decodes = [span.attributes["divdec.reply"] for span in server.spans(number) if span.name == "decode"]
        assert sorted(decodes) == list(range(len(prompts)))


def test_no_span_contains_text(server):
    """Neither of prompts and answers, nor of anything else that a client may send, in requests that fail too."""
    messages = [{"role": "user", "content": f"Who is {SECRET}?"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    tool = {**WEATHER, "function": {**WEATHER["function"], "name": SECRET}}
    answers = [
        server.post(
            "chat/completions", **chat, ignore_eos=True, user=SECRET, stop=SECRET, metadata={SECRET: SECRET}, n=2
        ),
        server.post("chat/completions", **chat, stream=True),
        server.post("chat/completions", **chat | {"max_tokens": 60}, tools=[tool], tool_choice="required"),
        server.post(**TEXT | {"prompt": SECRET, "echo": True, "logprobs": 1}),
        server.post(**TEXT | {"model": SECRET}),
        server.post(**{SECRET: SECRET}),
        server.post(**TEXT, headers={"Authorization": f"Bearer {SECRET}", "X-Name": SECRET, "traceparent": SECRET}),
        server.post(
            "chat/completions", **chat, tools=[{"type": "function", "function": {"name": f"{SECRET} {SECRET}"}}]
        ),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 404, 400, 200, 400]
    texts = [choice["message"]["content"] for choice in answers[0].json()["choices"]]
    assert all(len(text) > 10 for text in texts)
    spans = [span.to_json() for span in server.spans(1 + 6 + 4 + 4 + 4 + 1 + 1 + 4 + 1)]
    for text in (SECRET, *texts):
        assert not [span for span in spans if text in span or json.dumps(text)[1:-1] in span]


def test_failed_and_cancelled_requests_have_spans(served_bundle):
    with traced(served_bundle, max_seconds=0.2) as server:
        assert server.post(**TEXT | {"max_tokens": 4000}).status_code == 504
        spans = server.spans()
        assert spans[-1].attributes["error.type"] == "timeout"
        assert spans[-1].status.status_code.name == "ERROR"
        assert all(span.start_time <= span.end_time for span in spans)
        assert httpx.get(f"{server.url}/metrics").status_code == 200
        assert server.post(**TEXT | {"model": "other"}).status_code == 404
        (root,) = server.spans(1)  # and none of the metrics
        assert (root.name, root.attributes["error.type"]) == ("text_completion", "model_not_found")


class _Receiver(http.server.BaseHTTPRequestHandler):
    """A receiver of OTLP over HTTP."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def test_environment_names_receiver_and_service(served_bundle):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    receiver.bodies = []
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_SERVICE_NAME": "steered",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with process(served_bundle, "--name", "tiny", **variables) as server:
        httpx.post(f"{server.url}/v1/completions", json=TEXT | {"prompt": SECRET}, headers=TRACEPARENT, timeout=60)
        code, log = server.end(signal.SIGTERM)
    receiver.shutdown()
    receiver.server_close()
    assert code == 0, log
    spans = []
    for path, body in receiver.bodies:
        assert path == "/v1/traces"
        assert SECRET.encode() not in body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            assert {item.key: item.value.string_value for item in resource.resource.attributes}[
                "service.name"
            ] == "steered"
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"text_completion tiny", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "steered"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_tracing_is_off_without_an_endpoint(variables, monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tracer_from_environment() is None


def test_missing_extra_is_reported_and_nothing_is_traced(monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)
    assert tracer_from_environment() is None
    assert "pip install 'divdec[otel]'" in json.loads(capsys.readouterr().err)["message"]

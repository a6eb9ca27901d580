"""How the server is run: limits, keys, clients that leave, shutdown, logs, several bundles."""

import asyncio
import json
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from divdec import UsageError
from divdec.cli import main
from divdec.serving.middleware import Metrics
from divdec.serving.request import RequestOutput
from support.served import bundle_of, engine_of, eventually, figure, process, serving

LONG = {"model": "tiny", "prompt": "The", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "seed": 1}
SHORT = {"model": "tiny", "prompt": "The", "max_tokens": 2, "temperature": 0}
PATH = "/v1/completions"
KEY = "a-key-of-32-characters-for-tests"


def events_of(response):
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def idle(url):
    return figure(url, "divdec_sequences_running") + figure(url, "divdec_sequences_waiting") == 0


def test_disconnect_during_stream_frees_batch_row(url, http):
    with http.stream("POST", PATH, json=LONG | {"stream": True, "n": 3}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert figure(url, "divdec_sequences_running") == 3
        before = figure(url, "divdec_generated_tokens_total")
    eventually(lambda: idle(url))
    assert figure(url, "divdec_generated_tokens_total") - before < 3 * 3000
    assert http.post(PATH, json=SHORT).status_code == 200


def test_disconnect_without_streaming_frees_batch_row(url, http):
    before = figure(url, "divdec_generated_tokens_total")
    with pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json=LONG, timeout=0.5)
    eventually(lambda: idle(url))
    assert figure(url, "divdec_generated_tokens_total") - before < 3000


def test_full_queue_returns_retry_after(served_bundle):
    with (
        serving([engine_of(served_bundle, max_num_seqs=1, max_queue=1)], shutdown_timeout=0.0) as url,
        httpx.Client(base_url=url) as http,
    ):
        with http.stream("POST", PATH, json=LONG | {"stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            waiting = threading.Thread(target=lambda: httpx.post(url + PATH, json=SHORT, timeout=60))
            waiting.start()
            eventually(lambda: figure(url, "divdec_sequences_waiting") == 1)
            for asked in (SHORT, SHORT | {"stream": True}):
                refused = http.post(PATH, json=asked)
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["type"] == "rate_limit_error"
        waiting.join(30)
        eventually(lambda: idle(url))
        assert http.post(PATH, json=SHORT).status_code == 200


def test_limits_of_a_request(served_bundle):
    limits = {"max_tokens": 3900, "max_seconds": 0.4, "max_body_bytes": 2000, "max_queue": 4}
    long = LONG | {"max_tokens": 3900}
    with (
        serving([engine_of(served_bundle)], shutdown_timeout=0.0, **limits) as url,
        httpx.Client(base_url=url) as http,
    ):
        late = http.post(PATH, json=long)
        assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
        with http.stream("POST", PATH, json=long | {"stream": True}) as response:
            *events, last = events_of(response)
        assert events
        assert json.loads(last)["error"]["code"] == "timeout"
        # The stream, too, although it began with 200.
        failed = 'divdec_requests_total{endpoint="/v1/completions",status="504"} 2.0'
        eventually(lambda: failed in http.get("/metrics").text)
        eventually(lambda: idle(url))
        assert "at most 3900" in http.post(PATH, json=LONG).json()["error"]["message"]
        assert http.post(PATH, json=SHORT | {"n": 5}).json()["error"]["param"] == "n"
        body = json.dumps(SHORT | {"prompt": "a" * 3000}).encode()
        kind = {"Content-Type": "application/json"}
        assert http.post(PATH, content=body, headers=kind).status_code == 413
        in_parts = http.post(
            PATH, content=(body[start : start + 100] for start in range(0, len(body), 100)), headers=kind
        )
        assert (in_parts.status_code, in_parts.json()["error"]["code"]) == (413, "body_too_large")


def test_time_limit_includes_tokenization(served_bundle):
    engine = engine_of(served_bundle)
    encode = engine.encode_text

    async def slow(text):
        await asyncio.sleep(2)
        return await encode(text)

    engine.encode_text = slow
    with serving([engine], shutdown_timeout=0.0, max_seconds=0.2) as url:
        started = time.perf_counter()
        assert httpx.post(url + PATH, json=SHORT).status_code == 504
        assert time.perf_counter() - started < 1.5


def test_api_key_is_required(served_bundle):
    with serving([engine_of(served_bundle)], api_key=KEY) as url, httpx.Client(base_url=url) as http:
        wrong = [f"Bearer {KEY}x", KEY, f"Basic {KEY}", "Bearer", b"Bearer \xff\xff"]
        for headers in ({}, *({"Authorization": value} for value in wrong)):
            for method, path in (("GET", "/v1/models"), ("POST", PATH), ("GET", "/openapi.json"), ("GET", "/nothing")):
                refused = http.request(method, path, headers=headers)
                assert refused.status_code == 401
                assert refused.headers["www-authenticate"] == "Bearer"
                assert refused.json()["error"]["type"] == "authentication_error"
        assert http.get("/health").status_code == 200
        assert http.get("/metrics").status_code == 200
        with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            assert client.completions.create(**SHORT).choices[0].finish_reason == "length"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


@pytest.mark.parametrize("value", ["[1]", "{", '"a"'])
def test_invalid_chat_template_kwargs_give_one_line_error(tmp_path, capsys, value):
    assert main(["serve", str(tmp_path), "--chat-template-kwargs", value]) == 2
    assert "JSON object" in one_line(capsys)


def test_engine_has_variables_of_the_chat_template(served_bundle):
    from divdec.cli.serving import ServeSettings, build_engine

    settings = ServeSettings(chat_template_kwargs='{"enable_thinking": false}')
    with pytest.raises(UsageError, match="'enable_thinking', which is no variable"):
        build_engine("tiny", str(served_bundle), settings)


ORIGIN = "https://chat.example.org"
PREFLIGHT = {
    "Origin": ORIGIN, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}  # fmt: skip


def test_web_pages_are_refused_by_default(http):
    assert http.options(PATH, headers=PREFLIGHT).status_code == 405
    replies = (http.options(PATH, headers=PREFLIGHT), http.post(PATH, json=SHORT, headers={"Origin": ORIGIN}))
    assert not any(name.startswith("access-control") for reply in replies for name in reply.headers)


def test_web_pages_of_given_origins_are_accepted(served_bundle):
    origins = ("http://localhost:3000", ORIGIN)
    with (
        serving([engine_of(served_bundle)], api_key=KEY, cors_origin=origins) as url,
        httpx.Client(base_url=url) as http,
    ):
        allowed = http.options(PATH, headers=PREFLIGHT)  # browsers send it without the key
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "x-stainless-lang" in allowed.headers["access-control-allow-headers"]
        for key, status in ((KEY, 200), ("wrong", 401)):
            reply = http.post(PATH, json=SHORT, headers={"Origin": ORIGIN, "Authorization": f"Bearer {key}"})
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, ORIGIN)
        other = http.options(PATH, headers=PREFLIGHT | {"Origin": "https://other.example.org"})
        assert "access-control-allow-origin" not in other.headers


def test_figures(url, http):
    before = {name: figure(url, name) for name in ("divdec_prompt_tokens_total", "divdec_requests_total")}
    asked = http.post(PATH, json=SHORT | {"max_tokens": 5, "ignore_eos": True}).json()
    assert (
        figure(url, "divdec_prompt_tokens_total") - before["divdec_prompt_tokens_total"]
        == asked["usage"]["prompt_tokens"]
    )
    assert figure(url, "divdec_requests_total") > before["divdec_requests_total"]
    page = http.get("/metrics").text
    for name in ("time_to_first_token_seconds", "time_per_output_token_seconds", "request_seconds"):
        assert f"divdec_{name}_bucket" in page
    assert 'divdec_requests_total{endpoint="/v1/completions",status="200"}' in page
    http.get("/some/invented/path")
    assert "invented" not in http.get("/metrics").text


def test_time_per_output_token_is_a_mean_because_tokens_of_a_speculative_step_arrive_together(monkeypatch):
    times = iter((0.0, 1.0, 1.08, 1.08, 1.08, 1.08))
    monkeypatch.setattr("divdec.serving.middleware.time", SimpleNamespace(perf_counter=lambda: next(times)))
    metrics = Metrics({}, counts_changes=True)
    observe = metrics.token_timer("tiny")
    for number in range(5):
        observe(0, RequestOutput(tokens=(7,), finish_reason="stop" if number == 4 else None))
    name, labels = "divdec_time_per_output_token_seconds", {"model": "tiny"}
    assert metrics.registry.get_sample_value(f"{name}_count", labels) == 1
    assert metrics.registry.get_sample_value(f"{name}_sum", labels) == pytest.approx(0.02)


def test_multiple_bundles_use_their_own_steering(served_bundle, models):
    other = bundle_of(models, "other", "rank:20")
    asked = SHORT | {"echo": True, "logprobs": 0, "max_tokens": 0, "prompt": "Who wrote"}
    with serving([engine_of(served_bundle), engine_of(other, "other")]) as url, httpx.Client(base_url=url) as http:
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
        reported = [
            http.post(PATH, json=asked | {"model": name}).json()["choices"][0]["logprobs"]["token_logprobs"]
            for name in ("tiny", "other")
        ]
        assert reported[0] != reported[1]


def test_server_applies_registry_and_fails_closed(served_bundle, models, tmp_path, world, caplog):
    from divdec.cli.serving import ServeSettings, build_engine
    from divdec.data.records import texts_of
    from divdec.errors import FailedClosed
    from divdec.takedowns.registry import Registry
    from divdec.takedowns.store import DATABASE

    registry = Registry.create(tmp_path / "registry", texts_of("retain", world.corpus[:20]), models / "target", order=3)
    settings = ServeSettings(registry=str(tmp_path / "registry"))
    text = max(world.corpus, key=len)
    asked = SHORT | {"prompt": text[:120], "echo": True, "logprobs": 0, "max_tokens": 0}
    with (
        serving([build_engine("tiny", str(served_bundle), settings)], logprobs="full") as url,
        httpx.Client(base_url=url) as http,
    ):

        def reported():
            return http.post(PATH, json=asked).json()["choices"][0]["logprobs"]["token_logprobs"][1:]

        before = reported()
        assert http.get("/health").status_code == 200
        assert figure(url, "divdec_takedown_requests") == 0
        registry.add("case", texts_of("t", [text]))
        assert sum(reported()) < sum(before) - 5
        assert figure(url, "divdec_takedown_requests") == 1
        registry.remove("case")
        assert reported() == pytest.approx(before, abs=1e-4)
        (tmp_path / "registry" / DATABASE).write_text("damaged\n")
        refused = http.post(PATH, json=asked)
        assert refused.status_code == 500
        assert refused.json()["error"]["code"] == "steering_failed"
        assert str(tmp_path) not in refused.text
        assert str(tmp_path) in caplog.text  # the operator's log says what failed
        assert http.get("/metrics").status_code == 200
        assert (health := http.get("/health")).status_code == 500
        assert str(tmp_path) not in health.text
        (tmp_path / "registry" / DATABASE).unlink()
        assert http.post(PATH, json=asked | {"stream": True}).status_code == 500
    with pytest.raises(FailedClosed):
        build_engine("tiny", str(served_bundle), settings)


def test_stopped_server_finishes_streams_and_exits_with_0(served_bundle):
    with process(served_bundle, "--shutdown-timeout", "200") as running:
        card = httpx.get(running.url + "/v1/models/tiny").json()
        assert running.ready == f"serving tiny (linear:1.5, {card['system_fingerprint']}) on {running.url}/v1"
        asked = LONG | {"max_tokens": 400, "stream": True}
        with httpx.stream("POST", running.url + PATH, json=asked, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(running.url + "/health").status_code == 503)
            refused = httpx.post(running.url + PATH, json=SHORT)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "closing"
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(30) == 0


def test_streams_exceeding_shutdown_timeout_end_with_error(served_bundle):
    secret = "an unmistakable prompt"
    with process(served_bundle, "--shutdown-timeout", "0.3", "--name", "other", DIVDEC_API_KEY=KEY) as running:
        headers = {"Authorization": f"Bearer {KEY}"}
        asked = LONG | {"model": "other", "prompt": secret, "stream": True}
        with httpx.stream("POST", running.url + PATH, json=asked, timeout=60, headers=headers) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGINT)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(events[-1])["error"]["code"] == "closing"
        assert "[DONE]" not in events
        code, log = running.end(signal.SIGTERM) if running.process.poll() is None else (running.process.wait(), "")
        log = log or running.process.stderr.read()
    assert code == 0
    records = [json.loads(line) for line in log.splitlines()]
    (record,) = [record for record in records if record.get("path") == PATH]
    assert record["model"] == "other"
    assert record["system_fingerprint"].startswith("fp_")
    assert record["stream"] is True
    assert record["status"] == 200
    assert record["error"] == "closing"
    assert record["prompt_tokens"] > 0
    assert record["generated_tokens"] > 0
    assert "unmistakable" not in log
    assert KEY not in log


def test_log_prompts_option_logs_prompts(served_bundle, capsys):
    with serving([engine_of(served_bundle)], log=True, log_prompts=True) as url:
        httpx.post(url + PATH, json=SHORT | {"prompt": "an unmistakable prompt"})
    line = json.loads(capsys.readouterr().err.strip().splitlines()[-1])
    assert line["prompt"] == "an unmistakable prompt"


def one_line(capsys):
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("divdec serve: ")
    return lines[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--engine", "triton"], "embedded, vllm"),
        (["--api-key", "short"], "at least 16"),
        (["--api-key", "with a space in the key"], "ASCII"),
        (["--port", "70000"], "port is 70000"),
        (["--cors-origin", "http://localhost:3000/"], "--cors-origin is 'http://localhost:3000/'"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-body-bytes", "0"], "max-body-bytes is 0"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout at least 0"),
        (["--speculative", "much"], "speculative"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--extra-bundle", "nameless"], "name=path"),
        (["--extra-bundle", "tiny=elsewhere"], "two bundles are named 'tiny'"),
        (["--extra-bundle", "other=elsewhere", "--steering", "linear:1"], "single bundle"),
        (["--steering", "linear:much", "--port", "0"], "linear:much"),
        (["--registry", "absent", "--port", "0"], "absent"),
        (["--unknown", "1"], "--unknown"),
        (["--vllm-options=--max-model-len 9"], "--engine vllm"),
        (["--engine", "vllm", "--max-num-seqs", "3"], "--max-num-seqs is for --engine embedded"),
        (["--engine", "vllm", "--extra-bundle", "other=elsewhere"], "--extra-bundle is for --engine embedded"),
    ],
)
def test_invalid_serve_options_give_one_line_error(served_bundle, options, words, capsys):
    assert main(["serve", str(served_bundle), *options]) == 2
    assert words in one_line(capsys)


def test_invalid_bundle_gives_one_line_error(tmp_path, models, capsys):
    for index in (tmp_path, models / "target", tmp_path / "absent"):
        assert main(["serve", str(index), "--port", "0"]) == 2
        assert one_line(capsys)


def test_port_in_use_is_reported_before_loading_models(tmp_path, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        started = time.perf_counter()
        assert main(["serve", str(tmp_path / "absent"), "--port", port]) == 2
    assert "--port" in one_line(capsys)
    assert time.perf_counter() - started < 10


def test_public_address_without_api_key_gives_warning(tmp_path, capsys):
    assert main(["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]) == 2
    assert "no --api-key is set" in capsys.readouterr().err


def test_replies_say_what_answered_and_metrics_count_what_steering_changed(models, served_bundle):
    engines = [engine_of(served_bundle), engine_of(bundle_of(models, "without effect", "linear:0"), "plain")]
    with serving(engines) as url, httpx.Client(base_url=url) as http:
        cards = {card["id"]: card["system_fingerprint"] for card in http.get("/v1/models").json()["data"]}
        assert len(set(cards.values())) == 2
        texts = {}
        for name, fingerprint in cards.items():
            reply = http.post(PATH, json=SHORT | {"model": name, "max_tokens": 12, "ignore_eos": True}).json()
            assert reply["system_fingerprint"] == fingerprint
            texts[name] = reply["choices"][0]["text"]
        page = http.get("/metrics").text
    counts = {
        (name, model): float(re.search(rf'^divdec_{name}_total{{model="{model}"}} (\S+)', page, re.M)[1])
        for name in ("positions", "changed_positions") for model in cards
    }  # fmt: skip
    assert counts["positions", "tiny"] == counts["positions", "plain"] == 12
    assert counts["changed_positions", "plain"] == 0
    assert (counts["changed_positions", "tiny"] > 0) == (texts["tiny"] != texts["plain"])
    assert texts["tiny"] != texts["plain"]
    assert engine_of(served_bundle).fingerprint == cards["tiny"]


def test_metrics_do_not_show_what_hidden_log_probabilities_would(served_bundle):
    with serving([engine_of(served_bundle)], logprobs="off") as url, httpx.Client(base_url=url) as http:
        assert http.post(PATH, json=SHORT).status_code == 200
        page = http.get("/metrics").text
    assert "divdec_positions_total{" in page
    assert "divdec_changed_positions_total" not in page

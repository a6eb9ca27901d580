"""Figures for Prometheus, in a registry of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from divdec.errors import FailedClosed
from divdec.serving.engine.engine import Engine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """What is counted while requests are answered."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engines(engines))
        self._requests = Counter(
            "divdec_requests", "Requests by endpoint and status.", ["endpoint", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "divdec_request_seconds", "From a request's beginning to the end of its answer.", ["endpoint"],
            buckets=WHOLE, registry=self.registry,
        )  # fmt: skip
        self.first = Histogram(
            "divdec_time_to_first_token_seconds", "From a prompt to the first token of its answer.", ["model"],
            buckets=FIRST, registry=self.registry,
        )  # fmt: skip
        self.between = Histogram(
            "divdec_inter_token_seconds", "Between two tokens of an answer.", ["model"],
            buckets=BETWEEN, registry=self.registry,
        )  # fmt: skip

    def answered(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that is over."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def watch(self, model: str, count: int) -> Watch:
        """Measure the pieces of so many answers from now on."""
        return Watch(self, model, count)

    def page(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self.registry)


class Watch:
    """Measures the time between the pieces of some answers."""

    def __init__(self, metrics: Metrics, model: str, count: int) -> None:
        self._first, self._between = metrics.first.labels(model), metrics.between.labels(model)
        self._started = time.perf_counter()
        self._last: list[float | None] = [None] * count

    def piece(self, number: int, tokens: int) -> None:
        """A piece of an answer has come."""
        if not tokens:
            return
        now, last = time.perf_counter(), self._last[number]
        if last is None:
            self._first.observe(now - self._started)
        else:
            for _ in range(tokens):  # those of a speculative step come together
                self._between.observe((now - last) / tokens)
        self._last[number] = now


class _Engines(Collector):
    """What engines count themselves."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        counters = {
            "divdec_prompt_tokens": ("Tokens of prompts.", "prompt_tokens_total"),
            "divdec_generated_tokens": ("Tokens of answers.", "generated_tokens_total"),
            "divdec_steps": ("Passes of the model.", "steps_total"),
        }
        gauges = {
            "divdec_sequences_running": ("Answers that are being made.", "running"),
            "divdec_sequences_waiting": ("Answers that wait for a row.", "waiting"),
            "divdec_takedown_requests": ("Takedown requests in force.", "registry_requests"),
        }
        for kind, metrics in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (text, attribute) in metrics.items():
                family = kind(name, text, labels=["model"])
                for model, engine in self._engines.items():
                    if (value := _read(engine, attribute)) is not None:
                        family.add_metric([model], value)
                yield family


def _read(engine: Engine, attribute: str) -> int | None:
    try:
        return getattr(engine, attribute)
    except FailedClosed:  # a damaged registry: answers say so, and the other figures are wanted all the more
        return None

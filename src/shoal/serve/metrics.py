"""Numbers of the server for Prometheus, in a registry of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.serve.client import EngineClient

__all__ = ["METRICS", "Metrics", "Timer"]

_PREFIX = "shoal_serve_"

# Metrics of this process: name -> what it counts.
_HTTP = "http_requests_total"
_OUTCOMES = "requests_total"
_PROMPT = "prompt_tokens_total"
_GENERATED = "generated_tokens_total"
_TTFT = "time_to_first_token_seconds"
_TPOT = "time_per_output_token_seconds"
_LATENCY = "request_seconds"

# Metrics of the engine: name -> (its key in the stats, kind, what it counts).
_ENGINE = {
    "requests_running": ("requests_running", "gauge", "Requests that hold cache blocks."),
    "requests_waiting": ("requests_waiting", "gauge", "Requests that wait for their first step."),
    "cache_blocks_used": ("blocks_used", "gauge", "Cache blocks that requests hold."),
    "cache_blocks": ("blocks_total", "gauge", "Cache blocks there are."),
    "prefix_hit_tokens_total": (
        "prefix_hit_tokens",
        "counter",
        "Prompt tokens found in the cache.",
    ),
    "prefix_query_tokens_total": (
        "prefix_query_tokens",
        "counter",
        "Prompt tokens looked up in the cache.",
    ),
    "engine_prompt_tokens_total": (
        "tokens_prompt_total",
        "counter",
        "Prompt tokens that the engine computed.",
    ),
    "engine_generated_tokens_total": (
        "tokens_generated_total",
        "counter",
        "Tokens that the engine generated.",
    ),
    "engine_steps_total": ("steps_total", "counter", "Steps of the engine."),
    "engine_step_seconds_total": ("step_seconds_total", "counter", "Time in steps, s."),
    "preemptions_total": (
        "preemptions_total",
        "counter",
        "Requests whose cache was taken, to be recomputed.",
    ),
}

METRICS: tuple[str, ...] = tuple(
    _PREFIX + name
    for name in (
        _HTTP,
        _OUTCOMES,
        _PROMPT,
        _GENERATED,
        _TTFT,
        _TPOT,
        _LATENCY,
        *_ENGINE,
        "requests_open",
        "engine_up",
        "engine_restarts_total",
    )
)
"""Names of all metrics."""

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _EngineCollector(Collector):
    """What the engine told last; its counters begin again when it restarts."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        stats: Mapping[str, float] = self._client.last_stats
        for name, (key, kind, text) in _ENGINE.items():
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(_PREFIX + name, text, value=float(stats.get(key, 0.0)))
        yield GaugeMetricFamily(
            f"{_PREFIX}requests_open", "Answers under way.", value=float(self._client.num_open)
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}engine_up", "1 while the engine runs.", value=float(self._client.ready)
        )
        yield CounterMetricFamily(
            f"{_PREFIX}engine_restarts_total",
            "How often the engine was started again.",
            value=float(self._client.restarts),
        )


class Metrics:
    """Counters and histograms of a server.

    Args:
        client: the engine whose numbers are shown too.
    """

    def __init__(self, client: EngineClient) -> None:
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            _PREFIX + _HTTP, "HTTP requests.", ("route", "status"), registry=registry
        )
        self._outcomes = Counter(
            _PREFIX + _OUTCOMES, "Answers by how they ended.", ("finish",), registry=registry
        )
        self._prompt = Counter(_PREFIX + _PROMPT, "Prompt tokens received.", registry=registry)
        self._generated = Counter(_PREFIX + _GENERATED, "Tokens answered.", registry=registry)
        self._ttft = Histogram(
            _PREFIX + _TTFT,
            "From the request to its first token, s.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._tpot = Histogram(
            _PREFIX + _TPOT,
            "Between tokens of an answer, its mean, s.",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._latency = Histogram(
            _PREFIX + _LATENCY,
            "From the request to the end of the answer, s.",
            buckets=_SECONDS,
            registry=registry,
        )
        registry.register(_EngineCollector(client))

    def http(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(route, str(status)).inc()

    def begin(self, prompt_tokens: int) -> Timer:
        """An answer was asked for; tell the timer what comes of it."""
        self._prompt.inc(prompt_tokens)
        return Timer(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _end(self, finish: str, began: float, first: float | None, last: float, num: int) -> None:
        self._outcomes.labels(finish).inc()
        self._generated.inc(num)
        if first is not None:
            self._ttft.observe(first - began)
            if num > 1:
                self._tpot.observe((last - first) / (num - 1))
        self._latency.observe(last - began)


class Timer:
    """Measures one answer."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._began = time.monotonic()
        self._first: float | None = None
        self._last = self._began
        self._num = 0
        self._ended = False

    def tokens(self, number: int) -> None:
        """So many tokens have come now."""
        if number:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._num += number

    def end(self, finish: str) -> None:
        """The answer ended: stop, length, abort or error; only the first end counts."""
        if not self._ended:
            self._ended = True
            self._metrics._end(finish, self._began, self._first, self._last, self._num)

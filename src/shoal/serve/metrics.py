"""Numbers of the server for Prometheus, in a registry of its own.

The names are those of vLLM with another prefix, so that its dashboards need one change.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shoal.serve.client import EngineClient

__all__ = ["METRICS", "Metrics", "Timer"]

_PREFIX = "shoal:"
_LABEL = "model_name"

# Metrics of this process: name -> what it counts.
_HTTP = "http_requests_total"
_OUTCOMES = "request_success_total"
_PROMPT = "prompt_tokens_total"
_GENERATED = "generation_tokens_total"
_TTFT = "time_to_first_token_seconds"
_TPOT = "inter_token_latency_seconds"
_LATENCY = "e2e_request_latency_seconds"

# Metrics of the engine: name -> (its key in the stats, kind, what it counts).
_ENGINE = {
    "num_requests_running": ("requests_running", "gauge", "Requests that hold cache blocks."),
    "num_requests_waiting": (
        "requests_waiting",
        "gauge",
        "Requests that wait for their first step.",
    ),
    "kv_cache_blocks": ("blocks_total", "gauge", "Cache blocks there are."),
    "prefix_cache_hits_total": (
        "prefix_hit_tokens",
        "counter",
        "Prompt tokens found in the cache.",
    ),
    "prefix_cache_queries_total": (
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
    "num_preemptions_total": (
        "preemptions_total",
        "counter",
        "Requests whose cache was taken, to be recomputed or swapped in.",
    ),
    "swap_out_blocks_total": (
        "swap_out_blocks_total",
        "counter",
        "Cache blocks copied to the host.",
    ),
    "swap_in_blocks_total": (
        "swap_in_blocks_total",
        "counter",
        "Cache blocks copied back from the host.",
    ),
    "swap_copies_total": (
        "swap_copies_total",
        "counter",
        "Runs of blocks copied to the host or back.",
    ),
    "request_switch_seconds_total": (
        "switch_seconds_total",
        "counter",
        "Time in which caches of requests were on the way to the host or back, s.",
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
        "kv_cache_usage_perc",
        "num_requests_open",
        "engine_up",
        "engine_restarts_total",
    )
)
"""Names of all metrics."""

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _EngineCollector(Collector):
    """What the engine told last; its counters begin again when it restarts."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client = client
        self._model = model

    def collect(self) -> Iterable[Metric]:
        client = self._client
        stats: Mapping[str, float] = client.last_stats
        for name, (key, kind, text) in _ENGINE.items():
            yield self._one(name, kind, text, stats.get(key, 0.0))
        total = stats.get("blocks_total", 0.0)
        yield self._one(
            "kv_cache_usage_perc",
            "gauge",
            "Share of the cache blocks that requests hold; 1 is all of them.",
            stats.get("blocks_used", 0.0) / total if total else 0.0,
        )
        yield self._one("num_requests_open", "gauge", "Answers under way.", client.num_open)
        yield self._one("engine_up", "gauge", "1 while the engine runs.", client.ready)
        yield self._one(
            "engine_restarts_total",
            "counter",
            "How often the engine was started again.",
            client.restarts,
        )

    def _one(self, name: str, kind: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        found = family(_PREFIX + name, text, labels=[_LABEL])
        found.add_metric([self._model], float(value))
        return found


class Metrics:
    """Counters and histograms of a server.

    Args:
        client: the engine whose numbers are shown too.
        model: what the model is called in requests; the label ``model_name``.
    """

    def __init__(self, client: EngineClient, model: str) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            _PREFIX + _HTTP, "HTTP requests.", (_LABEL, "route", "status"), registry=registry
        )
        self._outcomes = Counter(
            _PREFIX + _OUTCOMES,
            "Answers by how they ended.",
            (_LABEL, "finished_reason"),
            registry=registry,
        )
        self._prompt = Counter(
            _PREFIX + _PROMPT, "Prompt tokens received.", (_LABEL,), registry=registry
        ).labels(model)
        self._generated = Counter(
            _PREFIX + _GENERATED, "Tokens answered.", (_LABEL,), registry=registry
        ).labels(model)
        self._ttft = Histogram(
            _PREFIX + _TTFT,
            "From the request to its first token, s.",
            (_LABEL,),
            buckets=_SECONDS,
            registry=registry,
        ).labels(model)
        self._tpot = Histogram(
            _PREFIX + _TPOT,
            "From a token of an answer to the next, s.",
            (_LABEL,),
            buckets=_TOKEN_SECONDS,
            registry=registry,
        ).labels(model)
        self._latency = Histogram(
            _PREFIX + _LATENCY,
            "From the request to the end of the answer, s.",
            (_LABEL,),
            buckets=_SECONDS,
            registry=registry,
        ).labels(model)
        registry.register(_EngineCollector(client, model))

    def http(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(self._model, route, str(status)).inc()

    def begin(self, prompt_tokens: int) -> Timer:
        """An answer was asked for; tell the timer what comes of it."""
        self._prompt.inc(prompt_tokens)
        return Timer(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _end(self, finish: str, began: float, first: float | None, last: float, num: int) -> None:
        self._outcomes.labels(self._model, finish).inc()
        self._generated.inc(num)
        if first is not None:
            self._ttft.observe(first - began)
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
            now = time.monotonic()
            if self._first is None:
                self._first = now
            else:  # tokens that come together share the time since the last one
                for _ in range(number):
                    self._metrics._tpot.observe((now - self._last) / number)
            self._last = now
            self._num += number

    def end(self, finish: str) -> None:
        """The answer ended: stop, length, abort or error; only the first end counts."""
        if not self._ended:
            self._ended = True
            self._metrics._end(finish, self._began, self._first, self._last, self._num)

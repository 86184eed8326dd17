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

from shoal.serve.engine.client import EngineClient

_PREFIX = "shoal:"
_LABEL = "model_name"

# Metrics of this process: name -> what it counts.
_HTTP = "http_requests_total"
_OUTCOMES = "request_success_total"
_PROMPT = "prompt_tokens_total"
_GENERATED = "generation_tokens_total"
_TTFT = "time_to_first_token_seconds"
_ITL = "inter_token_latency_seconds"
_ITL_OLDER = "time_per_output_token_seconds"
_LATENCY = "e2e_request_latency_seconds"
_DEBTS = "kv_debt_blocks"

DEBT_KEY = "debt_blocks_"
"""What the engine's stats begin with that say ``DEBTOR_CREDITOR``: blocks."""

# Histograms of the parts of a request's time: name -> what they are.
_TIMES = {
    "request_queue_time_seconds": "Time from arrival to the first step, s.",
    "request_prefill_time_seconds": "Time from the first step to the first token, s.",
    "request_decode_time_seconds": "Time from the first token to the last, s.",
    "request_inference_time_seconds": "Time from the first step to the last token, s.",
    "request_time_per_output_token_seconds": "TPOT: mean time per token after the first, s.",
}
# Histograms of what requests are like: name -> what they are.
_NUMBERS = {
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
    "request_params_max_tokens": "Maximum tokens of a request (max_tokens).",
    "request_params_n": "Number of answers of a request (n).",
}

# Metrics of the engine: name -> (its key in the stats, kind, what it counts).
_ENGINE = {
    "num_requests_running": (
        "requests_running",
        "gauge",
        "Running requests, which hold cache blocks.",
    ),
    "num_requests_waiting": (
        "requests_waiting",
        "gauge",
        "Waiting requests.",
    ),
    "kv_cache_blocks": ("blocks_total", "gauge", "Total cache blocks."),
    "prefix_cache_hits_total": (
        "prefix_hit_tokens",
        "counter",
        "Prompt tokens found in the prefix cache.",
    ),
    "prefix_cache_queries_total": (
        "prefix_query_tokens",
        "counter",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "engine_prompt_tokens_total": (
        "tokens_prompt_total",
        "counter",
        "Computed prompt tokens.",
    ),
    "engine_generated_tokens_total": (
        "tokens_generated_total",
        "counter",
        "Generated tokens.",
    ),
    "engine_steps_total": ("steps_total", "counter", "Steps of the engine."),
    "engine_step_seconds_total": ("step_seconds_total", "counter", "Time in steps, s."),
    "num_preemptions_total": (
        "preemptions_total",
        "counter",
        "Preempted requests.",
    ),
    "spec_decode_num_drafts_total": (
        "draft_trees_total",
        "counter",
        "Verified draft trees.",
    ),
    "spec_decode_num_draft_tokens_total": (
        "draft_tokens_total",
        "counter",
        "Verified draft tokens.",
    ),
    "spec_decode_num_accepted_tokens_total": (
        "draft_tokens_accepted_total",
        "counter",
        "Accepted draft tokens.",
    ),
    "num_forks_total": (
        "forks_total",
        "counter",
        "Answers that share the prompt's cache with another answer.",
    ),
    "adapter_merged": (
        "adapter_merged",
        "gauge",
        "1 while an adapter is merged into the weights.",
    ),
    "adapter_switches_total": (
        "adapter_switches_total",
        "counter",
        "Number of adapter merges and unmerges.",
    ),
    "copied_blocks_total": (
        "blocks_copied_total",
        "counter",
        "Cache blocks copied on write.",
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
        "Transfers of block runs to the host or back.",
    ),
    "request_switch_seconds_total": (
        "switch_seconds_total",
        "counter",
        "Time of cache transfers to the host or back, s.",
    ),
    "diffusion_forwards_total": (
        "diffusion_forwards_total",
        "counter",
        "Forward passes of a model that is decoded by diffusion.",
    ),
    "diffusion_request_forwards_total": (
        "diffusion_request_forwards_total",
        "counter",
        "Forward passes, summed over the requests in them.",
    ),
    "diffusion_computed_tokens_total": (
        "diffusion_computed_tokens_total",
        "counter",
        "Tokens and masks that these passes computed.",
    ),
    "diffusion_unmasked_tokens_total": (
        "diffusion_unmasked_tokens_total",
        "counter",
        "Masks that became text; over the forwards of requests, the tokens of a forward pass.",
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
        _ITL,
        _ITL_OLDER,
        _LATENCY,
        *_TIMES,
        *_NUMBERS,
        *_ENGINE,
        "kv_cache_usage_perc",
        "num_requests_open",
        "engine_up",
        "engine_restarts_total",
        _DEBTS,
    )
)
"""Names of all metrics."""

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_COUNTS = tuple(float(2**power) for power in range(18))
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class _Renamed(Collector):
    """A histogram under an older name, too."""

    def __init__(self, histogram: Histogram, name: str, older: str) -> None:
        self._histogram = histogram
        self._name = name
        self._older = older

    def collect(self) -> Iterable[Metric]:
        for family in self._histogram.collect():
            older = Metric(self._older, f"{family.documentation} Older name.", family.type)
            older.samples = [
                sample._replace(name=sample.name.replace(self._name, self._older, 1))
                for sample in family.samples
            ]
            yield older


class _EngineCollector(Collector):
    """What the engine reported last; its counters begin again when it restarts."""

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
            "Fraction of cache blocks in use, 0 to 1.",
            stats.get("blocks_used", 0.0) / total if total else 0.0,
        )
        yield self._one("num_requests_open", "gauge", "Open answers.", client.num_open)
        yield self._one("engine_up", "gauge", "1 while the engine runs.", client.ready)
        yield self._one(
            "engine_restarts_total",
            "counter",
            "Number of engine restarts.",
            client.restarts,
        )

        yield self._debts(stats)

    def _debts(self, stats: Mapping[str, float]) -> Metric:
        """Who uses how many cache blocks of whom, where instances lend each other memory."""
        labels = [_LABEL, "debtor", "creditor"]
        text = "Cache blocks that an instance borrows from another."
        debts = GaugeMetricFamily(_PREFIX + _DEBTS, text, labels=labels)
        for key, blocks in stats.items():
            if key.startswith(DEBT_KEY):
                debtor, creditor = key.removeprefix(DEBT_KEY).split("_")
                debts.add_metric([self._model, debtor, creditor], float(blocks))
        return debts

    def _one(self, name: str, kind: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
        result = family(_PREFIX + name, text, labels=[_LABEL])
        result.add_metric([self._model], float(value))
        return result


class Metrics:
    """Counters and histograms of a server.

    Args:
        client: the engine whose numbers are shown too.
    """

    def __init__(self, client: EngineClient, model: str) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._http = Counter(
            _PREFIX + _HTTP, "HTTP requests.", (_LABEL, "route", "status"), registry=registry
        )
        self._outcomes = Counter(
            _PREFIX + _OUTCOMES,
            "Finished answers, by finish reason.",
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
            "TTFT: time from arrival to the first token, s.",
            (_LABEL,),
            buckets=_SECONDS,
            registry=registry,
        ).labels(model)
        gaps = Histogram(
            _PREFIX + _ITL,
            "ITL: time between two tokens of an answer, s.",
            (_LABEL,),
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self._gaps = gaps.labels(model)
        registry.register(_Renamed(gaps, _PREFIX + _ITL, _PREFIX + _ITL_OLDER))
        self._request = {
            name: Histogram(
                _PREFIX + name,
                text,
                (_LABEL,),
                buckets=_COUNTS
                if name in _NUMBERS
                else _TOKEN_SECONDS
                if "per_output" in name
                else _SECONDS,
                registry=registry,
            ).labels(model)
            for name, text in {**_TIMES, **_NUMBERS}.items()
        }
        self._latency = Histogram(
            _PREFIX + _LATENCY,
            "E2E: time from arrival to the end of the answer, s.",
            (_LABEL,),
            buckets=_SECONDS,
            registry=registry,
        ).labels(model)
        registry.register(_EngineCollector(client, model))

    def http(self, route: str, status: int) -> None:
        """Count an HTTP request."""
        self._http.labels(self._model, route, str(status)).inc()

    def begin(self, prompt_tokens: int, max_tokens: int, n: int) -> Timer:
        """Count a new request; the caller reports its outcome to the timer."""
        self._prompt.inc(prompt_tokens)
        for name, value in (
            ("prompt_tokens", prompt_tokens),
            ("params_max_tokens", max_tokens),
            ("params_n", n),
        ):
            self._request[f"request_{name}"].observe(value)
        return Timer(self)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gap(self, seconds: float, number: int) -> None:
        for _ in range(number):
            self._gaps.observe(seconds)

    def _end(self, finish: str, timer: Timer) -> None:
        self._outcomes.labels(self._model, finish).inc()
        self._generated.inc(timer.num_tokens)
        self._latency.observe(timer.last - timer.asked)
        self._request["request_generation_tokens"].observe(timer.num_tokens)
        if timer.first is not None:
            self._ttft.observe(timer.first - timer.asked)
        for name, seconds in timer.parts().items():
            self._request[f"request_{name}_seconds"].observe(seconds)


class Timer:
    """Measures one answer; all times are s on the monotonic clock.

    Args:
        metrics: where it is recorded at its end.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._ended = False
        self.asked = self.last = time.monotonic()
        self.first: float | None = None
        self.num_tokens = 0
        self._began: float | None = None

    def began(self, at: float) -> None:
        """Its first step began then."""
        self._began = at

    def tokens(self, number: int) -> None:
        """So many tokens have come now."""
        if number:
            now = time.monotonic()
            if self.first is None:
                self.first = now
                self._metrics._gap(0.0, number - 1)
            else:  # tokens that come together share the time since the last one
                self._metrics._gap((now - self.last) / number, number)
            self.last = now
            self.num_tokens += number

    def parts(self) -> dict[str, float]:
        """The parts of its time that are known, s."""
        known = {}
        if self._began is not None:
            known["queue_time"] = self._began - self.asked
            if self.first is not None:
                known["prefill_time"] = self.first - self._began
                known["inference_time"] = self.last - self._began
        if self.first is not None:
            known["decode_time"] = self.last - self.first
            if self.num_tokens > 1:
                known["time_per_output_token"] = (self.last - self.first) / (self.num_tokens - 1)
        return known

    def end(self, finish: str) -> None:
        """The answer ended: stop, length, abort or error; only the first end counts."""
        if not self._ended:
            self._ended = True
            self._metrics._end(finish, self)

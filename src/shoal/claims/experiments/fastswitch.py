"""[86] FastSwitch: are switches cheap when copies are few, beside the computation and of news only?

Source: Shen et al., FastSwitch: Optimizing Context Switching Efficiency in Fairness-aware Large
Language Model Serving, 2024.

Conversations on a real engine whose cache is too small for them, with fair priorities that change
while they run. Host memory is real and copies are real; the link to it is emulated: 100 us a copy
and 4 GB/s. The parts are added one by one: a copy a block that everybody waits for, then block
groups, then copies beside the computation, then copies that are kept. The answers are those of the
trace, so that all variants serve the same tokens. The A/A run puts the first variant in the place
of each later one. The quick run counts copies and blocks with a smaller model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from pydantic import JsonValue

from shoal.claims.protocols import Attempt, Context, Metric, Paired, Samples
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import Arrival, Output, Runner, Step, StepResult

__all__ = ["FastSwitch"]

_DROPPED = {"name": "swap", "keep_host_copies": False}
_BLOCKS = "per-block synchronous swap"
_ASYNCHRONOUS = "groups, asynchronous"
# Variant -> bookkeeping of the cache, preemption.
_VARIANTS: dict[str, tuple[Any, Any]] = {
    _BLOCKS: (
        {"name": "paged", "prefix_reuse": False},
        {**_DROPPED, "asynchronous": "never", "join": False},
    ),
    "groups": ("groups", {**_DROPPED, "asynchronous": "never"}),
    _ASYNCHRONOUS: ("groups", _DROPPED),
    "groups, asynchronous, kept": ("groups", "swap"),
}
_ALL = "groups, asynchronous, kept"
_COPY_S, _BYTES_PER_S = 1e-4, 4e9


@dataclass(frozen=True, slots=True)
class _Size:
    """How much is served: model, cache and trace."""

    model: str
    positions: int
    kv_tokens: int
    requests: int
    rate: float
    think_s: float
    scale: float


@dataclass(slots=True)
class _Seen:
    """What serving the trace once gave."""

    copies: float = 0.0
    blocks: float = 0.0
    switches: float = 0.0
    switch_s: float = 0.0
    ttft_p95: float = 0.0
    tbt_p99: float = 0.0
    tokens_per_s: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)

    def take(self, output: Output, now: float) -> None:
        """Tokens have come."""
        before = self.last.get(output.request_id)
        if before is not None:
            self.gaps.append(now - before)
        self.last[output.request_id] = now


class _Said:
    """A runner whose answers are those of the trace, as the next turns have them."""

    def __init__(self, inner: Runner, answers: Mapping[str, Sequence[int]]) -> None:
        self._inner, self._answers = inner, answers

    def execute(self, step: Step) -> StepResult:
        """Compute, and say what the trace says."""
        result = self._inner.execute(step)
        said = {
            chunk.request.id: (self._answers[chunk.request.id][chunk.request.n_generated],)
            for chunk in step.chunks
            if chunk.request.id in result.tokens
        }
        return StepResult(said, result.infos, result.seconds, result.done)


@part
class FastSwitch:
    """Context switches of conversations under fair priorities.

    Args:
        model: of the zoo, with random weights.
        requests: turns served.
        rate: turns a second.
        turns: turns of a conversation.
        think_s: mean time between turns, s.
        kv_tokens: tokens of the cache.
        group: blocks of a group.
        frequency: updates of the priorities a step.
        rounds: times that the first and the last variant are served.
    """

    model: str = "shoal-4m"
    requests: int = 112
    rate: float = 13.0
    turns: int = 20
    think_s: float = 0.7
    kv_tokens: int = 4096
    group: int = 16
    frequency: float = 0.1
    rounds: int = 5

    rows: ClassVar[tuple[int, ...]] = (86,)
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            name="copies_with_groups",
            unit="x",
            statistic="speedup",
            comparison=">=",
            threshold=8.0,
            baseline=_BLOCKS,
            evidence="mechanism",
        ),
        Metric(
            name="bytes_with_reuse",
            unit="x",
            statistic="ratio",
            comparison="<=",
            threshold=0.6,
            baseline=_ASYNCHRONOUS,
            evidence="mechanism",
        ),
        Metric.counted(
            "switches_per_request", ">=", 0.3, "none", statistic="min", evidence="mechanism"
        ),
        Metric.speedup(
            "tbt_p99", 1.4, _BLOCKS, evidence="mechanism", paper="1.4x to 11.2x over vLLM"
        ),
        Metric.speedup("ttft_p95", 1.2, _BLOCKS, evidence="mechanism", paper="1.4x to 5.8x"),
        Metric(
            name="throughput",
            unit="x",
            statistic="ratio",
            comparison=">=",
            threshold=1.0,
            baseline=_BLOCKS,
            evidence="mechanism",
            timing=True,
        ),
    )
    attempts: ClassVar[tuple[Attempt, ...]] = (
        Attempt(
            metric="switches_per_request",
            tried="6 turns a second: bytes 0.597, P99 3.0x and P95 2.4x, but variants with groups "
            "hardly ever switched",
            value=0.016,
        ),
        Attempt(
            metric="switches_per_request",
            tried="11 turns a second; 13 is the least at which every variant switches often "
            "enough, and there the baseline is close to what it can carry, which helps both tails",
            value=0.17,
        ),
    )

    def __post_init__(self) -> None:
        for name in ("requests", "turns", "kv_tokens", "group", "rounds"):
            value = getattr(self, name)
            require(value >= 1, f"claim.fastswitch.{name}", value, expected="1 or more")
        require(
            self.rate > 0 and self.think_s > 0 and 0 < self.frequency <= 1,
            "claim.fastswitch.rate",
            self.rate,
            expected="positive, as think_s and frequency",
        )

    def refuses(self, context: Context) -> str | None:
        """The engine needs torch."""
        if importlib.util.find_spec("torch") is None:
            return "no torch; install shoal-ml[run]"
        return None

    def run(self, context: Context, *, quick: bool, as_baseline: bool = False) -> Samples:
        """See :class:`~shoal.claims.protocols.Experiment`."""
        size = _Size(self.model, 2048, self.kv_tokens, self.requests, self.rate, self.think_s, 2.0)
        if quick:
            size = _Size(
                "shoal-1m", 1024, 3 * self.kv_tokens // 8, 40, 6 * self.rate, self.think_s / 6, 3.0
            )
        rounds = 1 if quick else self.rounds
        seen: dict[str, list[_Seen]] = {}
        names = list(_VARIANTS)
        total = 2 * rounds + 2
        for turn in range(rounds):
            # The one that goes first changes with each round.
            ends = (names[0], names[-1])[:: 1 if turn % 2 == 0 else -1]
            for name in (*ends, *(names[1:-1] if turn == 0 else ())):
                done = sum(len(found) for found in seen.values())
                context.progress(name, done / total)
                ran = names[0] if as_baseline else name
                served = self._remembered(context, ran, turn, size, again=as_baseline)
                seen.setdefault(name, []).append(served)
        return self._samples(seen, timed=not quick)

    def _remembered(
        self, context: Context, name: str, turn: int, size: _Size, *, again: bool
    ) -> _Seen:
        """Serve with a variant; the A/A run serves once a round and takes it for all."""
        key = f"{name} {turn} {size.model} {again}"
        return context.remember(key, lambda: self._serve(context, name, size))

    def _samples(self, seen: Mapping[str, list[_Seen]], *, timed: bool) -> Samples:
        first, last = seen[_BLOCKS], seen[_ALL]

        def paired(name: str, method: Sequence[_Seen], baseline: Sequence[_Seen]) -> Paired:
            pairs = list(zip(method, baseline, strict=False))
            return Paired(
                method=tuple(getattr(one, name) for one, _ in pairs),
                baseline=tuple(getattr(one, name) for _, one in pairs),
            )

        metrics = {
            "copies_with_groups": paired("copies", seen["groups"], first),
            "bytes_with_reuse": paired("blocks", last, seen[_ASYNCHRONOUS]),
            "switches_per_request": Paired(
                method=tuple(one.switches for found in seen.values() for one in found)
            ),
        }
        if timed:
            for metric, name in (
                ("tbt_p99", "tbt_p99"),
                ("ttft_p95", "ttft_p95"),
                ("throughput", "tokens_per_s"),
            ):
                metrics[metric] = paired(name, last, first)
        shown = ("copies", "blocks", "switches", "switch_s")
        times = ("ttft_p95", "tbt_p99", "tokens_per_s")
        details: dict[str, JsonValue] = {
            name: {
                what: [round(getattr(one, what), 4) for one in found] for what in (*shown, *times)
            }
            for name, found in seen.items()
        }
        profile = "; ".join(
            f"{name}: {found[0].switch_s:.1f} s under way in {found[0].copies:.0f} copies"
            for name, found in seen.items()
        )
        return Samples(metrics=metrics, profile=profile, details=details)

    def _serve(self, context: Context, name: str, size: _Size) -> _Seen:
        """Serve the trace once, in real time."""
        from shoal.core.parts import table
        from shoal.ir import HostLink, ServeJob
        from shoal.serve.bench import replay
        from shoal.serve.build import engine_of, prepare
        from shoal.serve.cache import token_bytes
        from shoal.train import zoo

        kv, preempt = _VARIANTS[name]
        job = ServeJob.model_validate(
            {
                "model": size.model,
                "precision": "fp32",
                "threads": 1,
                "kv": {"name": "blockgroups", "init": self.group} if kv == "groups" else kv,
                "kv_tokens": size.kv_tokens,
                "host_tokens": 8 * size.kv_tokens,
                "preempt": preempt,
                # Room to grow: a request that joins leaves a fifth of the cache to the others.
                "scheduler": {"name": "fair", "frequency": self.frequency, "watermark": 0.2},
                "max_running": 24,
                "max_step_tokens": 128,
                "max_position": size.positions,
            }
        )
        model = context.remember(
            f"model {size.model}", lambda: prepare(job, zoo.random(size.model, context.seed))
        )
        config, weight = model.config, model.embed.weight
        link = HostLink(
            copy_s=_COPY_S,
            bytes_per_s=_BYTES_PER_S,
            block_bytes=16.0 * token_bytes(config, weight.dtype),
            layers=config.num_layers,
        )
        workload = {
            "name": "multiturn",
            "requests": size.requests,
            "rate": size.rate,
            "scale": size.scale,
            "turns": self.turns,
            "think_s": size.think_s,
        }
        arrivals: list[Arrival] = (
            table("workload")
            .build(workload)
            .arrivals(
                count=size.requests,
                vocab_size=config.vocab_size,
                max_position=size.positions,
                seed=context.seed,
            )
        )
        engine, _, runner = engine_of(job, model, link=link)
        engine.runner = _Said(runner, _answers(arrivals))
        seen = _Seen()
        served = replay(engine, arrivals, watch=seen.take)
        assert runner.mover is not None
        runner.mover.close()
        stats = engine.stats()
        seen.copies = config.num_layers * stats["swap_copies_total"]
        seen.blocks = stats["swap_out_blocks_total"] + stats["swap_in_blocks_total"]
        seen.switches = stats["preemptions_total"] / len(arrivals)
        seen.switch_s = stats["switch_seconds_total"]
        seen.ttft_p95 = float(np.percentile([one.ttft for one in served], 95))
        seen.tbt_p99 = float(np.percentile(seen.gaps, 99))
        seen.tokens_per_s = sum(one.n_output for one in served) / max(one.finish for one in served)
        return seen


def _answers(arrivals: Sequence[Arrival]) -> dict[str, Sequence[int]]:
    """What each turn is answered: what its conversation goes on with, or else zeros."""
    following: dict[str, Arrival] = {}
    found: dict[str, Sequence[int]] = {}
    for number in range(len(arrivals) - 1, -1, -1):
        turn = arrivals[number]
        after = following.get(turn.session)
        start = len(turn.prompt)
        found[str(number)] = (
            after.prompt[start : start + turn.output_tokens]
            if after is not None
            else (0,) * turn.output_tokens
        )
        following[turn.session] = turn
    return found

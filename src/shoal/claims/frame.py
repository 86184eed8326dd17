"""One run of a claim: which arm is in which place, times taken in turn, samples collected.

A claim names its arms and its metrics. Here the A/A run puts the baseline in the place of the
method, arms are timed in turn, and samples become what the judge reads.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.errors import ConfigError
from shoal.core.measure import interleave

Arm = Callable[[], object]
"""What is timed; a result that is lazy must be waited for inside."""

Numbers = float | Iterable[float]
"""Samples, or the only one."""

_T = TypeVar("_T")


def paired(method: Numbers, baseline: Numbers = ()) -> PairedSamples:
    """Samples of a metric; see :class:`~shoal.claims.protocols.PairedSamples`."""
    return PairedSamples(method=_row(method), baseline=_row(baseline))


def _row(samples: Numbers) -> tuple[float, ...]:
    return tuple(map(float, samples)) if isinstance(samples, Iterable) else (float(samples),)


def wire_bytes(totals: Mapping[str, float], *words: str) -> float:
    """Bytes sent, of a meter's totals, where the counter's name contains every word."""
    return sum(
        number
        for name, number in totals.items()
        if name.startswith("wire_bytes") and all(word in name for word in words)
    )


class ClaimRun:
    """What one run of a claim is asked for, and what it collects.

    Args:
        context: where and on what to run.
        quick: only the metrics marked ``quick``.
        as_baseline: this is the A/A run.

    Attributes:
        metrics: metric -> raw samples; :meth:`put` adds to it.
        skipped: metric -> reason.
        bounds: metric -> physical limit.
        peers: metric -> rates of our own baseline and of the peer.
        details: anything else worth keeping, JSON; tuples become lists, and keys text.
        profile: where the time goes.
    """

    def __init__(
        self, context: ExperimentContext, *, quick: bool = False, as_baseline: bool = False
    ) -> None:
        self.context, self.quick, self.as_baseline = context, quick, as_baseline
        self.seed, self.work_dir = context.seed, context.work_dir
        self.progress, self.remember = context.progress, context.remember
        self.metrics: dict[str, PairedSamples] = {}
        self.skipped: dict[str, str] = {}
        self.bounds: dict[str, float] = {}
        self.peers: dict[str, PairedSamples] = {}
        self.details: dict[str, Any] = {}
        self.profile = ""

    def pick(self, method: _T, baseline: _T) -> _T:
        """What is in the place of the method: the baseline in the A/A run."""
        return baseline if self.as_baseline else method

    def arms(self, arms: Mapping[str, _T], swaps: Mapping[str, str] | None = None) -> dict[str, _T]:
        """The arms of this run: in the A/A run each method is what its baseline is.

        Args:
            arms: name -> arm.
            swaps: name of a method -> name of its baseline.
        """
        places = swaps if swaps is not None else {"method": "baseline"}
        for name, baseline in places.items():
            if name != baseline and arms.get(name, arms) is arms.get(baseline):
                raise ConfigError(f"claim: {name} and {baseline} are one and the same arm")
        return {name: arms[self.pick(name, places.get(name, name))] for name in arms}

    def race(
        self,
        arms: Mapping[str, Arm],
        rounds: int,
        *,
        swaps: Mapping[str, str] | None = None,
        warmup: int = 2,
        threads: int = 0,
    ) -> Mapping[str, tuple[float, ...]]:
        """Seconds of each arm by round, in turn, in an order that changes from round to round.

        Args:
            arms: name -> what is timed.
            rounds: how many.
            swaps: as of :meth:`arms`.
            warmup: rounds before, not timed.
            threads: of PyTorch's operators meanwhile; 0 leaves them as they are.
        """
        from shoal.kernel.threads import torch_threads

        with torch_threads(threads) if threads else contextlib.nullcontext():
            return interleave(self.arms(arms, swaps), rounds, warmup=warmup, seed=self.seed).seconds

    def versus(
        self,
        arms: Mapping[str, Arm],
        pairs: Mapping[str, tuple[str, str]],
        rounds: int,
        *,
        warmup: int = 2,
        threads: int = 0,
    ) -> Mapping[str, tuple[float, ...]]:
        """Time arms in turn, and put each metric's method beside the baseline that it names.

        In the A/A run that baseline stands in the method's place, timed a second time.

        Args:
            arms: name -> what is timed.
            pairs: metric -> names of its method and of its baseline.
            rounds: how many.
            warmup: rounds before, not timed.
            threads: as of :meth:`race`.

        Returns:
            Seconds of each arm by round.
        """
        timed = dict(arms)
        if self.as_baseline:
            timed |= {f"{baseline} again": arms[baseline] for _, baseline in pairs.values()}
        seconds = self.race(timed, rounds, swaps={}, warmup=warmup, threads=threads)
        for metric, (method, baseline) in pairs.items():
            self.put(metric, seconds[self.pick(method, f"{baseline} again")], seconds[baseline])
        return seconds

    def turns(
        self, arms: Mapping[str, Callable[[], _T]], rounds: int, *, warmup: int = 0
    ) -> dict[str, list[_T]]:
        """What each arm says of itself by round, such as its own seconds, in turn.

        Every other round goes backwards, so that drift favours none.
        """
        said: dict[str, list[_T]] = {name: [] for name in arms}
        for turn in range(-warmup, rounds):
            for name in list(arms)[:: 1 if turn % 2 else -1]:
                answer = arms[name]()
                if turn >= 0:
                    said[name].append(answer)
        return said

    def put(
        self, metric: str, method: Numbers, baseline: Numbers = (), *, bound: float | None = None
    ) -> None:
        """Keep the samples of a metric.

        Args:
            metric: its name.
            method: samples of the method.
            baseline: of the baseline, pair by pair.
            bound: the physical limit of the metric's number.
        """
        self.metrics[metric] = paired(method, baseline)
        if bound is not None:
            self.bounds[metric] = bound

    def put_peer(self, metric: str, ours: Iterable[float], theirs: Iterable[float]) -> None:
        """Keep the seconds of our own baseline and of the peer, as rates."""
        self.peers[metric] = paired((1 / s for s in ours), (1 / s for s in theirs))

    def skip(self, reason: str, *metrics: str) -> None:
        """Say why metrics cannot be measured here."""
        self.skipped |= dict.fromkeys(metrics, reason)

    def lacks(self, reason: str | None, *metrics: str) -> bool:
        """Whether there is a reason for which metrics cannot be measured here; it is kept."""
        if reason is not None:
            self.skip(reason, *metrics)
        return reason is not None

    def samples(self) -> ClaimSamples:
        """Everything collected."""
        return ClaimSamples(
            metrics=self.metrics,
            skipped=self.skipped,
            bounds=self.bounds,
            peers=self.peers,
            profile=self.profile,
            details=json.loads(json.dumps(self.details)),
        )

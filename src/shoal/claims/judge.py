"""The verdict: a pure function of raw samples and thresholds.

Any reader of a results file can compute it again, and gets the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from shoal.claims.protocols import (
    PAIRED_STATISTICS,
    Attempt,
    ClaimSamples,
    Evidence,
    Metric,
    MetricVerdict,
    PairedSamples,
    Verdict,
)
from shoal.core.errors import ConfigError, nearest, require
from shoal.core.measure import Spread, bootstrap

__all__ = ["MAX_HALF_WIDTH", "MIN_PEER_RATIO", "judge", "measure", "wanted"]

MAX_HALF_WIDTH = 0.05
MIN_PEER_RATIO = 0.9
MIN_ATTEMPTS = 2
REAL: tuple[Evidence, ...] = ("same_regime", "mechanism")


def judge(
    metrics: Sequence[Metric],
    samples: ClaimSamples,
    *,
    aa: ClaimSamples | None,
    quick: bool = False,
    seed: int = 0,
    attempts: Sequence[Attempt] = (),
) -> Verdict:
    """Judge a claim.

    Args:
        metrics: what is claimed.
        samples: what the run saw.
        aa: what the run with the part replaced by its baseline saw; None if it was
            not run because nothing could be measured.
        quick: judge only the quick metrics.
        seed: seed of the bootstrap.
        attempts: what was tried where a threshold is not reached.

    Raises:
        ConfigError: samples are missing, unknown or of the wrong form.
    """
    chosen = wanted(metrics, quick)
    _check_names(chosen, metrics, samples)
    skipped = {m.name: samples.skipped[m.name] for m in chosen if m.name in samples.skipped}
    judged = [m for m in chosen if m.name in samples.metrics]
    if not judged:
        reasons = "; ".join(dict.fromkeys(skipped.values())) or "no metric of it can be judged"
        return Verdict(status="skipped", skipped=skipped, reason=reasons)
    results = tuple(_judge_metric(m, samples, seed) for m in judged)
    evidence = _evidence(judged)
    void = _void(judged, samples, aa, quick, seed)
    if void:
        return Verdict(
            status="skipped",
            evidence=evidence,
            metrics=results,
            skipped=skipped,
            reason=f"void: {void}",
        )
    short = [r for r in results if not r.holds and not r.noisy]
    noisy = [r for r in results if r.noisy]
    if short:
        by_name = {m.name: m for m in judged}
        reason = "; ".join(
            f"{r.name} is {r.value:.4g}, wanted {by_name[r.name].condition}" for r in short
        )
        missing = tuple(_owed([by_name[r.name] for r in short], samples, attempts))
        return Verdict(
            status="falls_short",
            evidence=evidence,
            metrics=results,
            skipped=skipped,
            reason=reason,
            missing=missing,
        )
    if noisy:
        names = ", ".join(r.name for r in noisy)
        reason = f"the interval of {names} is wider than +-{MAX_HALF_WIDTH:.0%}; run it again"
        return Verdict(
            status="noisy", evidence=evidence, metrics=results, skipped=skipped, reason=reason
        )
    status = "works" if evidence in REAL else "modelled"
    return Verdict(status=status, evidence=evidence, metrics=results, skipped=skipped)


def wanted(metrics: Iterable[Metric], quick: bool) -> list[Metric]:
    """The metrics that a run must bring."""
    return [metric for metric in metrics if metric.quick or not quick]


@functools.lru_cache(maxsize=4096)
def measure(metric: Metric, paired: PairedSamples, seed: int = 0) -> Spread:
    """The number of one metric with its 90 % bootstrap interval.

    It follows from the arguments alone, and pages ask for the same ones again and again.

    Raises:
        ConfigError: the baseline column is missing or has a zero where it divides.
    """
    where = f"claim samples of {metric.name}"
    method_N = np.asarray(paired.method)
    if metric.statistic in PAIRED_STATISTICS:
        require(
            bool(paired.baseline),
            where,
            "no baseline",
            expected=f"pairs, which the statistic {metric.statistic} compares",
        )
        baseline_N = np.asarray(paired.baseline)
        if metric.statistic == "difference":
            return bootstrap(method_N - baseline_N, seed=seed)
        divisor_N = method_N if metric.statistic == "speedup" else baseline_N
        require(bool(np.all(divisor_N != 0)), where, 0.0, expected="no zero where samples divide")
        if metric.statistic == "speedup":
            return bootstrap(baseline_N / method_N, seed=seed)
        ratio_N = method_N / baseline_N
        return bootstrap(
            np.abs(ratio_N - 1) if metric.statistic == "relative_error" else ratio_N, seed=seed
        )
    if metric.statistic == "mean":
        return bootstrap(method_N, lambda values: np.mean(values, axis=-1), seed=seed)
    if metric.statistic in ("max", "min"):
        extreme = np.max if metric.statistic == "max" else np.min
        # Resampling says nothing true about an extreme.
        value = float(extreme(method_N))
        return Spread(value, value, value)
    return bootstrap(method_N, seed=seed)


def _judge_metric(metric: Metric, samples: ClaimSamples, seed: int) -> MetricVerdict:
    spread = measure(metric, samples.metrics[metric.name], seed)
    bound = samples.bounds.get(metric.name)
    return MetricVerdict(
        name=metric.name,
        value=spread.value,
        low=spread.low,
        high=spread.high,
        holds=metric.holds(spread.value),
        noisy=metric.timing and not _half_width(metric, spread) <= MAX_HALF_WIDTH,
        share_of_bound=spread.value / bound if bound else None,
    )


def _half_width(metric: Metric, spread: Spread) -> float:
    """Half the interval's width, as a share of what is measured."""
    if metric.statistic == "relative_error":  # a share already
        return (spread.high - spread.low) / 2
    return spread.half_width


def _evidence(judged: Sequence[Metric]) -> Evidence:
    grades: tuple[Evidence, ...] = get_args(Evidence)
    real = [metric.evidence for metric in judged if metric.evidence in REAL]
    return max(real or [metric.evidence for metric in judged], key=grades.index)


def _void(
    judged: Sequence[Metric], samples: ClaimSamples, aa: ClaimSamples | None, quick: bool, seed: int
) -> str:
    """Why the claim shows nothing, or the empty text."""
    for metric in judged:
        if not metric.peer or quick:
            continue
        paired = samples.peers.get(metric.name)
        if paired is None:
            return f"our baseline of {metric.name} was not run beside {metric.peer}"
        require(
            bool(paired.baseline) and 0.0 not in paired.baseline,
            f"claim samples of {metric.name}",
            paired.baseline,
            expected=f"rates of {metric.peer} above 0",
        )
        ratio = float(np.median(np.divide(paired.method, paired.baseline)))
        if ratio < MIN_PEER_RATIO:
            return (
                f"our baseline of {metric.name} reaches only {ratio:.2f}x {metric.peer}, "
                f"wanted {MIN_PEER_RATIO}x"
            )
    if aa is None:
        return "it was not run with the part replaced by its baseline"
    replaced = [metric for metric in judged if metric.name in aa.metrics]
    if not replaced:
        return "the run with the part replaced by its baseline has no samples"
    if all(_judge_metric(metric, aa, seed).holds for metric in replaced):
        return "with the part replaced by its baseline every threshold holds too"
    return ""


def _owed(short: Sequence[Metric], samples: ClaimSamples, attempts: Sequence[Attempt]) -> list[str]:
    owed = []
    for metric in short:
        tried = sum(attempt.metric == metric.name for attempt in attempts)
        if tried < MIN_ATTEMPTS:
            owed.append(f"{metric.name}: {MIN_ATTEMPTS - tried} more recorded attempts")
        if metric.name not in samples.bounds:
            owed.append(f"{metric.name}: the physical limit")
    if short and not samples.profile:
        owed.append("a profile")
    return owed


def _check_names(
    chosen: Sequence[Metric], metrics: Sequence[Metric], samples: ClaimSamples
) -> None:
    known = [metric.name for metric in metrics]
    for name in (*samples.metrics, *samples.skipped, *samples.bounds, *samples.peers):
        require(
            name in known,
            "claim samples",
            name,
            expected=f"one of the metrics {', '.join(known)}",
            hint=nearest(name, known),
        )
    absent = [
        metric.name
        for metric in chosen
        if metric.name not in samples.metrics and metric.name not in samples.skipped
    ]
    if absent:
        raise ConfigError(
            f"claim samples: nothing of {', '.join(absent)}; "
            "measure it, or give a reason under skipped"
        )

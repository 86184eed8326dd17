"""The verdict: a pure function of raw samples and thresholds.

Any reader of a results file can compute it again, and gets the same. A threshold holds when the
conservative end of the 90 % interval meets it, and is missed when not even the other end does.
Between the two, and where a timing spreads too far or has too few pairs, the metric is noisy.
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
    Status,
    Verdict,
)
from shoal.core.errors import ConfigError, nearest, require
from shoal.core.measure import Spread, bootstrap

MAX_HALF_WIDTH = 0.05
MIN_PEER_RATIO = 0.9
MIN_ATTEMPTS = 2
MIN_PAIRS = 5
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
    headlines = [metric for metric in judged if not metric.check]
    void = _void(judged, headlines, samples, aa, quick, seed)
    absent = [f"{m.name}: {skipped[m.name]}" for m in chosen if not m.check and m.name in skipped]
    short = [m for m, r in zip(judged, results, strict=True) if not r.holds and not r.noisy]
    noisy = [m for m, r in zip(judged, results, strict=True) if r.noisy]
    by_name = {result.name: result for result in results}
    evidence = _weakest(headlines or judged)
    status: Status = "works" if evidence in REAL else "modelled"
    reason = ""
    missing: tuple[str, ...] = ()
    if void:
        status, reason = "skipped", f"void: {void}"
    elif short:
        status, missing = "falls_short", tuple(_owed(short, samples, attempts))
        reason = "; ".join(
            f"{m.name} is {by_name[m.name].value:.4g}, wanted {m.condition}" for m in short
        )
    elif noisy:
        status = "noisy"
        reason = "; ".join(_noise(m, by_name[m.name], samples) for m in noisy) + "; run it again"
    elif absent:
        status, reason = "skipped", "; ".join(absent)
    return Verdict(
        status=status,
        evidence=evidence,
        metrics=results,
        skipped=skipped,
        reason=reason,
        missing=missing,
    )


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
        if metric.timing:
            return bootstrap(method_N, lambda values: extreme(values, axis=-1), seed=seed)
        # Resampling says nothing true about the extreme of counts.
        value = float(extreme(method_N))
        return Spread(value, value, value)
    return bootstrap(method_N, seed=seed)


def _judge_metric(metric: Metric, samples: ClaimSamples, seed: int) -> MetricVerdict:
    paired = samples.metrics[metric.name]
    spread = measure(metric, paired, seed)
    bound = samples.bounds.get(metric.name)
    holds = metric.holds(spread.low) and metric.holds(spread.high)
    unsure = not holds or (
        metric.timing
        and not (len(paired.method) >= MIN_PAIRS and _half_width(metric, spread) <= MAX_HALF_WIDTH)
    )
    return MetricVerdict(
        name=metric.name,
        value=spread.value,
        low=spread.low,
        high=spread.high,
        holds=holds,
        noisy=unsure and metric.may_hold(spread.low, spread.high),
        share_of_bound=spread.value / bound if bound else None,
    )


def _noise(metric: Metric, result: MetricVerdict, samples: ClaimSamples) -> str:
    """Why a metric is noisy."""
    pairs = len(samples.metrics[metric.name].method)
    if metric.timing and pairs < MIN_PAIRS:
        return f"{metric.name} has {pairs} of {MIN_PAIRS} samples"
    if not result.holds:
        return (
            f"the interval of {metric.name}, {result.low:.4g} .. {result.high:.4g}, "
            f"reaches beyond {metric.condition}"
        )
    return f"the interval of {metric.name} is wider than +-{MAX_HALF_WIDTH:.0%}"


def _half_width(metric: Metric, spread: Spread) -> float:
    """Half the interval's width, as a share of what is measured."""
    if metric.statistic == "relative_error":  # a share already
        return (spread.high - spread.low) / 2
    return spread.half_width


def _weakest(headlines: Sequence[Metric]) -> Evidence:
    grades: tuple[Evidence, ...] = get_args(Evidence)
    return max((metric.evidence for metric in headlines), key=grades.index)


def _void(
    judged: Sequence[Metric],
    headlines: Sequence[Metric],
    samples: ClaimSamples,
    aa: ClaimSamples | None,
    quick: bool,
    seed: int,
) -> str:
    """Why the claim shows nothing, or the empty text."""
    for metric in judged:
        bound = samples.bounds.get(metric.name)
        if bound and metric.exceeds(measure(metric, samples.metrics[metric.name], seed), bound):
            return f"{metric.name} is beyond its physical limit of {bound:.4g}: the limit is wrong"
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
    for metric in headlines:
        if metric.name not in aa.metrics:
            return f"the run with {metric.baseline} in its place has no samples of {metric.name}"
        value = measure(metric, aa.metrics[metric.name], seed).value
        if metric.holds(value):
            return (
                f"with {metric.baseline} in its place {metric.name} is {value:.4g}, "
                f"and {metric.condition} holds too"
            )
    checked = [metric for metric in judged if metric.name in aa.metrics]
    if not headlines and all(_judge_metric(metric, aa, seed).holds for metric in checked):
        return "with the baseline in its place every check holds too"
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

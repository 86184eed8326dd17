"""Plans of serving jobs as ranked rows for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.ir import Interval, ServeJob, ServePlan

__all__ = ["COLUMNS", "explain", "rank"]


def rank(plans: Sequence[ServePlan]) -> list[ServePlan]:
    """Those that fit first; then by tokens per second, then by time to the first token.

    Rates within one percent are equal: no simulation knows better.
    """

    def key(plan: ServePlan) -> tuple[float, ...]:
        if not plan.predicted:
            return (1.0,)
        rate = plan.predicted["tokens_per_s"].value
        return (0.0, -round(math.log(rate) / math.log(1.01)), plan.predicted["ttft_p50_s"].value)

    return sorted(plans, key=key)


COLUMNS = ("plan", "fits", "tokens/s", "ttft p50", "ttft p95", "tpot p50", "cache")
"""Columns of :func:`explain`."""


def explain(plans: Sequence[ServePlan]) -> list[dict[str, str]]:
    """One row a plan, keyed by :data:`COLUMNS`; unknown things are ``-``.

    All but the cache are 90 % intervals: ``value (low .. high)``, in one unit.
    """
    return [_row(plan) for plan in plans]


def _row(plan: ServePlan) -> dict[str, str]:
    result = plan.predicted
    return {
        "plan": _name(plan.job),
        "fits": "yes" if plan.fits else "no",
        "tokens/s": _shown(result.get("tokens_per_s"), 1.0, ""),
        "ttft p50": _time(result.get("ttft_p50_s")),
        "ttft p95": _time(result.get("ttft_p95_s")),
        "tpot p50": _time(result.get("tpot_p50_s")),
        "cache": f"{plan.job.kv_tokens:,} tokens",
    }


def _name(job: ServeJob) -> str:
    split = "".join(
        f" {n}{v}" for n, v in (("tp", job.parallel.tp), ("pp", job.parallel.pp)) if v > 1
    )
    preempt = "" if job.preempt == ServeJob.model_fields["preempt"].default else f" {job.preempt}"
    guesses = "" if job.speculative is None else f" {job.speculative.name}"
    return f"{job.scheduler} {job.kv}{preempt} {job.precision}{split}{guesses}"


def _time(interval: Interval | None) -> str:
    if interval is not None:
        for size, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s")):
            if interval.value >= 2 * size:
                return _shown(interval, size, unit)
    return _shown(interval, 1e-3, "ms")


def _shown(interval: Interval | None, size: float, unit: str) -> str:
    if interval is None:
        return "-"
    value, low, high = (
        f"{number / size:,.0f}" if number / size >= 100 else f"{number / size:.3g}"
        for number in (interval.value, interval.low, interval.high)
    )
    return f"{value} {unit} ({low} .. {high})".replace("  ", " ")

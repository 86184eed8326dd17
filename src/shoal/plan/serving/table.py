"""Plans of serving jobs: ranked, and as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.tables import SECONDS, Table, digits, scale_of, shares, without_empty
from shoal.ir import ServeJob, ServePlan
from shoal.ir.estimate import cells
from shoal.ir.job_kind import plan_marks


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


def tables(plans: Sequence[ServePlan], *, verbose: bool = False) -> list[Table | str]:
    """Ranked plans and what the best one consists of, for people; each table fits 80 columns.

    Args:
        plans: best first.
        verbose: also requests per second, all output tokens, and a decode step by cause.
    """
    fitting = [plan for plan in plans if plan.fits]
    shown = fitting or list(plans)
    best = shown[0]
    title = "plans, best first; tok/s per device" if fitting else "no plan fits in memory"
    result: list[Table | str] = []
    if fitting:
        result += [numbers(shown, title), choices(shown)]
        if len(fitting) < len(plans):
            result.append(f"{len(plans) - len(fitting)} more plans do not fit in memory")
    else:
        result.append(choices(shown, title))
    cost = best.estimate
    if verbose and fitting:
        result.append(rates(shown))
    if cost is not None:
        many = f"{cost.tokens:.0f} request{'s' if cost.tokens > 1 else ''}"
        if verbose:
            step = cost if best.fits else cost.model_copy(update={"terms_s": {}})
            title = f"time of a decode step of {many} by cause"
            result += step.tables(title=title, memory_title="memory")
        else:
            if best.fits:
                result.append(f"time of a decode step of {many}: {shares(cost.terms_s)}")
            size = cost.memory_total
            result.append(f"memory, {digits(size / 1e9)} GB: {shares(cost.memory_bytes)}")
    return [*result, best.why, *(f"note: {note}" for note in best.notes)]


def numbers(plans: Sequence[ServePlan], title: str = "") -> Table:
    """What plans are predicted to do, in the median: a row each, 90 % intervals in columns.

    ``tok/s`` are the output tokens per second of one device; TTFT is the time to the first
    token, TPOT that of a further one; USD/M is the price of a million output tokens.
    """
    first = plans[0].predicted
    times = [first[name].value for name in ("ttft_p50_s", "tpot_p50_s")]
    (wait, wait_s), (token, token_s) = (scale_of(value, SECONDS) for value in times)
    rows = [
        (
            str(place),
            f"{_devices(plan):,}",
            *cells(plan.predicted["tokens_per_s"], _devices(plan)),
            *cells(plan.predicted["ttft_p50_s"], wait_s),
            *cells(plan.predicted["tpot_p50_s"], token_s),
            _price(plan),
        )
        for place, plan in enumerate(plans, 1)
    ]
    columns = (
        *("#", "devices", "tok/s", "90 %", f"TTFT\n{wait}", "90 %", f"TPOT\n{token}"),
        *("90 %", "USD/M"),
    )
    return without_empty(title, columns, rows, "rrrrrrrrr", plan_marks(plans))


def choices(plans: Sequence[ServePlan], title: str = "") -> Table:
    """What plans choose, and the tokens that the cache holds; numbered as in :func:`numbers`."""
    rows = [
        (str(place), f"{plan.job.kv_tokens:,}", _name(plan.job))
        for place, plan in enumerate(plans, 1)
    ]
    columns = ("#", "cache, tokens", "plan")
    return without_empty(title, columns, rows, "rr ", plan_marks(plans))


def rates(plans: Sequence[ServePlan]) -> Table:
    """Rates of all devices, and how long the slowest 5 % wait."""
    rows = [
        (
            str(place),
            *cells(plan.predicted["tokens_per_s"]),
            digits(plan.predicted["requests_per_s"].value),
            *cells(plan.predicted["ttft_p95_s"], 1e-3),
        )
        for place, plan in enumerate(plans, 1)
    ]
    columns = ("#", "tokens/s", "90 %", "requests/s", "TTFT p95, ms", "90 %")
    return without_empty("", columns, rows, "rrrrrr")


def _devices(plan: ServePlan) -> int:
    """Devices of a plan: the ranks of a CPU share one."""
    if plan.machine.device.kind == "cpu":
        return 1
    job = plan.job
    return job.parallel.world * job.replicas if job.disagg is None else job.disagg.devices


def _price(plan: ServePlan) -> str:
    """Of a million output tokens, where the machine's price is known."""
    rate, usd = plan.predicted.get("tokens_per_s"), plan.machine.usd_per_device_hour
    if rate is None or usd is None or rate.value <= 0.0:
        return ""
    return digits(1e6 * usd * _devices(plan) / 3600.0 / rate.value)


def _name(job: ServeJob) -> str:
    degrees = ((n, getattr(job.parallel, n)) for n in ("tp", "pp", "dp", "ep"))
    split = "".join(f" {n}{v}" for n, v in degrees if v > 1)
    preempt = "" if job.preempt == ServeJob.model_fields["preempt"].default else f" {job.preempt}"
    guesses = "" if job.speculative is None else f" {job.speculative.name}"
    return f"{job.scheduler} {job.kv}{preempt} {job.precision}{split}{guesses}"

"""Ranked plans as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.errors import PlanError
from shoal.core.tables import (
    JOULES,
    SECONDS,
    Table,
    digits,
    scale_of,
    shares,
    without_empty,
)
from shoal.core.traits import traits
from shoal.cost.training.memory import tier_bytes
from shoal.cost.training.step import Pricer
from shoal.ir import Estimate, Parallel, TrainPlan, Work
from shoal.ir.estimate import cells
from shoal.ir.job_kind import plan_marks
from shoal.plan.strategy.objective import worth


def tables(plans: Sequence[TrainPlan], *, verbose: bool = False) -> list[Table | str]:
    """Ranked plans and what the best one consists of, for people; each table fits 80 columns.

    Args:
        plans: best first, each with an estimate.
        verbose: also time and memory by cause, the whole job, step, energy and what binds.
    """
    fitting = [plan for plan in plans if plan.fits]
    shown, best = fitting or list(plans), plans[0]
    cost = best.estimate
    assert cost is not None
    title = "no plan fits; closest first"
    if fitting:
        ties = "; within 1% the simpler first" if _tied(fitting) else ""
        title = f"plans, best first{ties}; tok/s per device"
    result: list[Table | str] = [numbers(shown, title), choices(shown)]
    if fitting and len(fitting) < len(plans):
        result.append(f"{len(plans) - len(fitting)} more plans do not fit in memory")
    if verbose:
        result += [details(shown), *cost.tables(), *_whole_table(best)]
    else:
        size = tier_bytes(best.job, best.machine, cost.memory_bytes)["device"]
        result.append(f"step time: {shares(cost.terms_s)}")
        result.append(f"memory per rank, {digits(size / 1e9)} GB: {shares(cost.memory_bytes)}")
    result += [line for line in (best.why, *(f"note: {note}" for note in best.notes)) if line]
    return result


def numbers(plans: Sequence[TrainPlan], title: str = "") -> Table:
    """What plans take: a row each, a unit a column, 90 % intervals in columns of their own.

    ``tok/s`` are the tokens per second of one device; MFU is the share of its data sheet's
    FLOP/s that the model's own operations reach, recomputation left out.
    """
    costs = [_estimate(plan) for plan in plans]
    first = costs[0]
    whole = first.total_s is not None
    unit, size = scale_of((first.total_s or first.step_s).value, SECONDS)
    rows = []
    for place, (plan, cost) in enumerate(zip(plans, costs, strict=True), 1):
        time = cost.total_s if whole else cost.step_s
        devices = _devices(plan)
        rows.append(
            (
                str(place),
                f"{devices:,}",
                digits(cost.tokens_per_s / devices) if cost.tokens else "",
                _mfu(plan),
                *cells(time, size),
                *cells(cost.usd),
            )
        )
    columns = (
        *("#", "devices", "tok/s", "MFU", unit if whole else f"step, {unit}", "90 %"),
        *("USD", "90 %"),
    )
    return without_empty(title, columns, rows, "rrrrrrrr", plan_marks(plans))


def choices(plans: Sequence[TrainPlan]) -> Table:
    """What plans choose, and the memory per rank in GB; numbered as in :func:`numbers`."""
    rows = []
    for place, plan in enumerate(plans, 1):
        size = tier_bytes(plan.job, plan.machine, _estimate(plan).memory_bytes)["device"]
        rows.append((str(place), digits(size / 1e9), spell(plan)))
    return without_empty("", ("#", "GB", "plan"), rows, "rr ", plan_marks(plans))


def details(plans: Sequence[TrainPlan]) -> Table:
    """Seconds of a step, all tokens per second, energy, and what binds."""
    costs = [_estimate(plan) for plan in plans]
    unit, size = scale_of(costs[0].step_s.value, SECONDS)
    energy, joules = "J", 1.0
    if costs[0].energy_j is not None:
        energy, joules = scale_of(costs[0].energy_j.value, JOULES)
    rows = [
        (
            str(place),
            *cells(cost.step_s, size),
            digits(cost.tokens_per_s),
            "" if cost.energy_j is None else digits(cost.energy_j.value / joules),
            cost.bound,
        )
        for place, cost in enumerate(costs, 1)
    ]
    columns = ("#", f"step, {unit}", "90 %", "tokens/s", energy, "bound by")
    return without_empty("", columns, rows, "rrrrr ")


def _tied(plans: Sequence[TrainPlan]) -> bool:
    """Whether one stands before another that is worth a little more."""
    worths = [worth(plan.job, plan.machine, _estimate(plan).step_s.value) for plan in plans]
    return worths != sorted(worths)


def _estimate(plan: TrainPlan) -> Estimate:
    if plan.estimate is None:
        raise PlanError("the plan has no estimate; plan the job again")
    return plan.estimate


def _whole_table(plan: TrainPlan) -> list[Table]:
    """The time of the whole job by cause; nothing for a job without a length."""
    cost = _estimate(plan)
    if cost.total_s is None:
        return []
    saving = Pricer(plan.machine).saving(Work(shape=plan.shape, job=plan.job), cost.step_s.value)
    often = f"every {saving.every} steps and at the end" if saving.every else "at the end"
    words = {
        "saves": f"{often}, {_time(saving.stall_s)} each",
        "failures": f"one every {_time(saving.mtbf_s)}; {_time(saving.restart_s)} lost by each",
    }
    rows = tuple(
        (cause, _time(seconds), f"{seconds / cost.total_s.value:.1%}", words.get(cause, ""))
        for cause, seconds in cost.whole_s.items()
        if seconds
    )
    title = "time of the job by cause"
    return [Table(title=title, columns=("", "", "", ""), rows=rows, right=" rr ")]


def _time(seconds: float) -> str:
    unit, size = scale_of(seconds, SECONDS)
    return f"{digits(seconds / size)} {unit}"


def spell(plan: TrainPlan) -> str:
    """The choices of a plan in a few words: ``dp8 tp2 pp1 zero1 mb4 recompute bf16``."""
    job = plan.job
    split = job.parallel
    words = [f"dp{split.dp}", f"tp{split.tp}" + "+sp" * split.sp, f"pp{split.pp}"]
    if split.pp > 1 and split.schedule != Parallel().schedule:
        chunks = f"*{split.vpp}" if split.vpp > 1 else ""
        words[-1] += f"{chunks}({split.schedule.name})"
    if split.cp > 1:
        words.append(f"cp{split.cp}({split.context.name})")
    if split.folded:
        words.append(f"ep{split.ep}" + f" etp{split.etp}" * (split.etp > 1))
        if split.expert_dispatch != "flat":
            words.append(split.expert_dispatch)
        if split.overlap == "experts":
            words.append("overlap")
        if max(split.chunks) > 1:
            words.append(f"chunks{split.chunks[0]}/{split.chunks[1]}")
        if split.slices:
            words.append("slices")
    if split.vocab == "pp":
        words.append("vocab-pp")
    words += [job.shard.name, f"mb{job.microbatch}"]
    if job.recompute != "none":
        words.append("recompute" if job.recompute == "full" else f"recompute-{job.recompute}")
    if job.offload is not None:
        words.append(job.offload.name)
    if "moves_activations" in traits("activation", job.activation):
        words.append(job.activation.name)
    if job.base != "own":
        words.append(f"base-{job.base}")
    if job.layers:
        words.append(f"{len(job.layers)} layer groups")
    words.append(job.precision if job.products == "same" else job.products)
    return " ".join(words)


def _devices(plan: TrainPlan) -> int:
    """Devices of a plan: ranks of a CPU share one."""
    return plan.job.parallel.world if plan.machine.device.kind == "gpu" else 1


def _mfu(plan: TrainPlan) -> str:
    cost, device = plan.estimate, plan.machine.device
    peak = device.peak_flops.get(plan.job.precision)
    if cost is None or not peak or not cost.flops:
        return ""
    return f"{cost.flops / (cost.step_s.value * _devices(plan) * peak):.0%}"

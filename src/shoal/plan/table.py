"""Plans as rows for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.core.errors import require
from shoal.core.traits import traits
from shoal.cost.training.memory import tier_bytes
from shoal.ir import Interval, Parallel, TrainPlan

__all__ = ["COLUMNS", "explain"]

COLUMNS = (
    "plan",
    "fits",
    "step",
    "tokens/s",
    "of one",
    "MFU",
    "time",
    "memory/rank",
    "energy",
    "price",
    "binds",
    "why",
)


def explain(plans: Sequence[TrainPlan]) -> list[dict[str, str]]:
    """One row a plan, keyed by :data:`COLUMNS`; unknown things are ``-``.

    ``of one`` are the tokens per second of one device; MFU is the share of its data sheet's FLOP/s
    that the model's own operations reach, recomputation left out. The time and the price of the
    job come with their 90 % intervals, ``value (low .. high) unit``; step and energy have the same
    one in proportion.
    """
    return [_row(plan) for plan in plans]


def _row(plan: TrainPlan) -> dict[str, str]:
    cost = plan.estimate
    require(
        cost is not None,
        "plan.estimate",
        None,
        expected="a plan with an estimate",
        hint="plan the job again; a plan written by hand has none",
    )
    assert cost is not None
    device = tier_bytes(plan.job, plan.machine, cost.memory_bytes)["device"]
    return {
        "plan": spell(plan),
        "fits": "yes" if plan.fits else "no",
        "step": _value(cost.step_s, _seconds),
        "tokens/s": _si(cost.tokens_per_s),
        "of one": _si(cost.tokens_per_s / _devices(plan)),
        "MFU": _mfu(plan),
        "time": _interval(cost.total_s, _seconds),
        "memory/rank": f"{device / 1e9:.1f} GB",
        "energy": _value(cost.energy_j, _joules),
        "price": _interval(cost.usd, lambda _: (1.0, "USD")),
        "binds": cost.bound,
        "why": plan.why,
    }


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
        if max(split.chunks) > 1:
            words.append(f"chunks{split.chunks[0]}/{split.chunks[1]}")
        if split.slices:
            words.append("slices")
    if split.vocab == "pp":
        words.append("vocab-pp")
    words += [job.shard.name, f"mb{job.microbatch}"]
    if job.recompute != "none":
        words.append("recompute" if job.recompute == "full" else "recompute-stage")
    if job.offload is not None:
        words.append(job.offload.name)
    if "moves_activations" in traits("activation", job.activation):
        words.append(job.activation.name)
    if job.layers:
        words.append(f"{len(job.layers)} layer groups")
    words.append(job.precision)
    return " ".join(words)


def _devices(plan: TrainPlan) -> int:
    """Devices of a plan: ranks of a CPU share one."""
    return plan.job.parallel.world if plan.machine.device.kind == "gpu" else 1


def _mfu(plan: TrainPlan) -> str:
    cost, device = plan.estimate, plan.machine.device
    peak = device.peak_flops.get(plan.job.precision)
    if cost is None or not peak or not cost.flops:
        return "-"
    return f"{cost.flops / (cost.step_s.value * _devices(plan) * peak):.0%}"


def _interval(found: Interval | None, unit_of: Callable[[float], tuple[float, str]]) -> str:
    """Value and ends in the value's unit, said once."""
    if found is None:
        return "-"
    size, unit = unit_of(found.value)
    value, low, high = (_short(number / size) for number in (found.value, found.low, found.high))
    return f"{value} ({low} .. {high}) {unit}"


def _value(found: Interval | None, unit_of: Callable[[float], tuple[float, str]]) -> str:
    if found is None:
        return "-"
    size, unit = unit_of(found.value)
    return f"{_short(found.value / size)} {unit}"


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds(seconds: float) -> tuple[float, str]:
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return size, unit
    return (1.0, "s") if seconds >= 1 else (1e-3, "ms")


def _joules(joules: float) -> tuple[float, str]:
    for size, unit in ((3.6e9, "MWh"), (3.6e6, "kWh")):
        if joules >= size:
            return size, unit
    return 1e3, "kJ"


def _si(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"

"""What competes with a serving job: other schedulers, other bookkeeping, other splits."""

from __future__ import annotations

import dataclasses
import itertools

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.shapes import resolve
from shoal.ir import Machine, ModelShape, ServeJob, ServeParallel

__all__ = ["alternatives", "check_split", "splits"]

# Slots are whole multiples of so many tokens, the default size of a block.
_SLOT_STEP = 16


def splits(job: ServeJob, machine: Machine) -> list[ServeJob]:
    """The job split over the devices of a machine in every other way that the model allows.

    Degrees are powers of two. Ranks of a CPU share its cores, so there are none there.

    Args:
        job: that they compete with.
        machine: whose devices there are.
    """
    shape, found = resolve(job.model), []
    if machine.device.kind == "cpu":
        return []
    degrees = [2**n for n in range(machine.num_devices.bit_length())]
    for tp, pp in itertools.product(degrees, degrees):
        other = job.model_copy(update={"parallel": ServeParallel(tp=tp, pp=pp)})
        if (tp, pp) == (job.parallel.tp, job.parallel.pp) or tp > machine.devices_per_node:
            continue
        try:
            check_split(other, shape, machine)
        except PlanError:
            continue
        found.append(other)
    return found


def alternatives(job: ServeJob, max_position: int | None = None) -> list[ServeJob]:
    """The job with every other scheduler and cache bookkeeping that needs no options.

    Args:
        job: that they compete with.
        max_position: most tokens of its requests, which all of them must be able to serve;
            slots are as long as that.
    """
    longest = max_position or job.max_position
    found = []
    for scheduler in _choices("scheduler", job.scheduler.name):
        for kv in _choices("kv", job.kv.name):
            if kv == "distributed" and kv != job.kv.name:
                continue  # further engines with memory of their own are no choice for this one
            changes: dict[str, object] = {}
            if scheduler != job.scheduler.name:
                changes["scheduler"] = scheduler
            if kv != job.kv.name:
                changes["kv"] = kv
                if kv == "slots" and longest is not None:
                    slot = -(-longest // _SLOT_STEP) * _SLOT_STEP
                    changes["kv"] = {"name": kv, "max_len": slot}
            if changes:
                changes["max_position"] = longest
                found.append(ServeJob.model_validate({**job.model_dump(), **changes}))
    return found


def _choices(kind: str, own: str) -> list[str]:
    parts = table(kind)
    return [own, *(name for name in parts if name != own and _optionless(parts.load(name)))]


def _optionless(part: type) -> bool:
    """Every option of the part has a default."""
    return all(
        option.default is not dataclasses.MISSING
        or option.default_factory is not dataclasses.MISSING
        for option in dataclasses.fields(part)
    )


def check_split(job: ServeJob, shape: ModelShape, machine: Machine) -> None:
    """Refuse ranks that the model or the machine does not have.

    Raises:
        PlanError: which degree, and what would be right.
    """
    split = job.parallel
    require(
        job.replicas == 1 or split.depth == 1,
        "replicas",
        job.replicas,
        expected="1 where steps are under way together: a fleet of pipelines is not simulated",
        hint="plan one of them, or give --slo",
        error=PlanError,
    )
    require(
        shape.num_heads % split.tp == 0
        and (shape.num_kv_heads % split.tp == 0 or split.tp % shape.num_kv_heads == 0)
        and shape.ffn_hidden % split.tp == 0,
        "parallel.tp",
        split.tp,
        expected=f"a divisor of the {shape.num_heads} heads and of the feed-forward layer's "
        f"{shape.ffn_hidden} columns that goes with {shape.num_kv_heads} heads of keys",
        error=PlanError,
    )
    require(
        split.pp <= shape.num_layers,
        "parallel.pp",
        split.pp,
        expected=f"at most {shape.num_layers}, a layer for each stage",
        error=PlanError,
    )
    many = machine.num_devices
    require(
        machine.device.kind == "cpu" or split.world * job.replicas <= many,
        "parallel",
        f"tp = {split.tp}, pp = {split.pp}, replicas = {job.replicas}",
        expected=f"at most {many} ranks, the devices of {machine.name}",
        error=PlanError,
    )

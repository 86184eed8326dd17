"""What competes with a serving job: other schedulers, other bookkeeping, other splits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice, table
from shoal.cost.shapes import resolve
from shoal.ir import Machine, ModelShape, ServeJob, ServeParallel, ServeWork

__all__ = ["alternatives", "check_split", "offered", "splits"]

# Keys of a job whose parts compete, each named as its kind.
_SEARCHED = ("scheduler", "kv", "preempt", "speculative")


def splits(job: ServeJob, machine: Machine) -> list[ServeJob]:
    """The job split over the devices of a machine in every other way that the model allows.

    Degrees are powers of two. Ranks of a CPU share its cores, so there are none there.

    Args:
        job: that they compete with.
        machine: whose devices there are.
    """
    shape, splits = resolve(job.model), []
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
        splits.append(other)
    return splits


def offered(kind: str, work: ServeWork, machine: Machine) -> Iterator[Choice]:
    """What the parts of a kind offer for a workload, in the order of their table."""
    parts = table(kind)
    for name in parts:
        offer = getattr(parts.load(name), "candidates", None)
        for one in () if offer is None else offer(work, machine):
            yield parts.spell(one)


def alternatives(work: ServeWork, machine: Machine) -> list[ServeJob]:
    """The job with every other legal combination of what its parts offer.

    All of them give the answers of the job as it is: how weights and cache are kept and how
    scores become text stay as they are.

    Args:
        work: the job that they compete with, and what it serves.
        machine: where it is served.
    """
    job, alternatives = work.job, []
    choices = []
    for key in _SEARCHED:
        own = getattr(job, key)
        others = (one for one in offered(key, work, machine) if own is None or one.name != own.name)
        choices.append([(key, own), *((key, one) for one in others)])
    for chosen in itertools.product(*choices):
        changes = {key: one for key, one in chosen if one != getattr(job, key)}
        if changes:
            with contextlib.suppress(ConfigError):  # parts that do not go with each other
                alternatives.append(ServeJob.model_validate({**job.model_dump(), **changes}))
    return alternatives


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

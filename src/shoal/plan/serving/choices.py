"""What competes with a serving job: other schedulers, other bookkeeping, other splits."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice, table
from shoal.cost.kernels.serving_engines import serving_engine
from shoal.cost.shapes import resolve
from shoal.ir import Machine, ModelShape, ServeJob, ServeParallel, ServeWork

# Keys of a job whose parts compete, each named as its kind.
_SEARCHED = ("scheduler", "kv", "preempt", "speculative")


def splits(job: ServeJob, machine: Machine) -> list[ServeJob]:
    """The job split over the devices of a machine in every other way that the model allows.

    Degrees are powers of two. Ranks of a CPU share its cores, so there are none there.
    """
    shape, splits = resolve(job.model), []
    if machine.device.kind == "cpu":
        return []
    degrees = [2**n for n in range(machine.num_devices.bit_length())]
    ways = [ServeParallel(tp=tp, pp=pp) for tp, pp in itertools.product(degrees, degrees)]
    # Groups that share experts take all devices; fewer experts on each is what they are for.
    ways += [
        ServeParallel(tp=tp, dp=machine.num_devices // tp, ep=machine.num_devices)
        for tp in degrees
        if machine.num_devices % (2 * tp) == 0
    ]
    for way in ways:
        other = job.model_copy(update={"parallel": way})
        if way == job.parallel or way.tp > machine.devices_per_node:
            continue
        with contextlib.suppress(PlanError):
            check_split(other, shape, machine)
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
    engine = serving_engine(job.engine)
    require(
        split.dp == 1 or (engine.groups and bool(shape.num_experts) and split.pp == 1),
        "parallel.dp",
        split.dp,
        expected="1, or experts that groups share, one stage, and an engine that has such groups",
        hint="--engine vllm, sglang or trtllm of a mixture; replicas are whole engines",
        error=PlanError,
    )
    ranks = split.tp * split.dp
    mixture = engine.groups and shape.num_experts and shape.num_experts % split.ep == 0
    require(
        split.ep == 1 or (bool(mixture) and ranks % split.ep == 0),
        "parallel.ep",
        split.ep,
        expected=f"1, or a divisor of the {ranks} ranks of a stage and of the {shape.num_experts} "
        "experts, and an engine that divides them",
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

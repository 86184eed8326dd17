"""How well a job scales over nodes: weak and strong efficiency, predicted.

Weak: every replica keeps its batch, so the work grows with the devices; the efficiency is the
time of a step on few devices over that on many. Strong: the batch of a step stays, and the
devices share it; the efficiency is the speed-up over the ratio of devices.

Sources: Gustafson, Reevaluating Amdahl's Law, 1988; Amdahl, 1967.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from shoal.core.config import Value
from shoal.core.errors import ConfigError, PlanError, require
from shoal.cost.shapes import resolve
from shoal.cost.training.step import Pricer
from shoal.ir import Machine, ModelShape, TrainJob, Work


class ScalingPoint(Value):
    """A job on a number of devices.

    Args:
        devices: how many.
        replicas: data-parallel replicas.
        global_batch: sequences of a step.
        step_s: seconds of a step.
        efficiency: of the first point's speed for each device.
        bound: what limits the step.
    """

    devices: int
    replicas: int
    global_batch: int
    step_s: float
    efficiency: float
    bound: str


def scaling_report(
    job: TrainJob,
    machine: Machine,
    replicas: Sequence[int],
    *,
    kind: Literal["weak", "strong"],
    shape: ModelShape | None = None,
) -> list[ScalingPoint]:
    """The job with ever more data-parallel replicas.

    Args:
        job: a concrete job; its batch is that of its own replicas (weak), or of all (strong).
        machine: where it runs; its nodes are as many as are needed.
        replicas: how many, the first of which the others are compared with.
        kind: weak or strong.
        shape: the model, where the job does not name one that is known.

    Raises:
        ConfigError: no replicas, or, for strong scaling, a batch that they cannot share.
        PlanError: a split that is not legal.
    """
    require(
        bool(replicas) and all(dp >= 1 for dp in replicas),
        "scaling.replicas",
        list(replicas),
        expected="at least one number of replicas, each 1 or more",
    )
    shape = shape or resolve(job.model)
    own = job.parallel.dp
    scaling_report: list[ScalingPoint] = []
    for dp in replicas:
        batch = job.global_batch // own * dp if kind == "weak" else job.global_batch
        size = job.microbatch or 1
        if batch % (dp * size):
            raise ConfigError(
                f"scaling.replicas = {dp}: {batch} sequences are not whole micro-batches of {size} "
                "for each; choose another batch or other replicas"
            )
        parallel = job.parallel.model_copy(update={"dp": dp})
        nodes = -(-parallel.world // machine.devices_per_node)
        if machine.fabric is not None and nodes > machine.fabric.hosts:
            raise PlanError(
                f"scaling.replicas = {dp}: {nodes} nodes, and the fabric of {machine.name} has "
                f"ports for {machine.fabric.hosts}; use fewer replicas"
            )
        here = machine.model_copy(update={"nodes": nodes})
        scaled = job.model_copy(update={"parallel": parallel, "global_batch": batch})
        cost = Pricer(here).estimate(Work.model_construct(shape=shape, job=scaled))
        each = batch / cost.step_s.value / parallel.world
        first = scaling_report[0] if scaling_report else None
        efficiency = (
            1.0 if first is None else each / (first.global_batch / first.step_s / first.devices)
        )
        scaling_report.append(
            ScalingPoint(
                devices=parallel.world,
                replicas=dp,
                global_batch=batch,
                step_s=cost.step_s.value,
                efficiency=efficiency,
                bound=cost.bound,
            )
        )
    return scaling_report

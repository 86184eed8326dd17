"""Plans of a training of diffusion experts: every method in every way it offers, by time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from shoal.core.config import Value
from shoal.core.native import cpu_model
from shoal.core.parts import Choice, table
from shoal.fields.federate.ddm.job import TrainExpertsJob, TrainExpertsPlan
from shoal.fields.federate.ddm.protocols import (
    ExpertMixture,
    FlowData,
    FlowShape,
    FlowTraining,
    FlowWork,
    NetworkTask,
)
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.rates import core_share, kept_rates, least_seconds
from shoal.ir import Interval, Machine

# FLOP/s of a core in layers of this size under torch, and of a described core whose share is 1.
_SMALL, _CORE = 2e10, 1e11
# Seconds of a step whatever its batch, where none was timed.
_CALL_S = 1.5e-3
_SPREAD_TIMED, _SPREAD_DERIVED = 0.35, 2.0
# A process with torch.
_PROCESS = 3e8
# Seconds of everything beside training: imports, clusters, a classifier.
_BESIDE_S = 6.0


class FlowRates(Value):
    """How long a training step takes on a core.

    Args:
        call_s: seconds whatever the batch.
        row_s: seconds of each sample.
        measured: timed on this machine.
    """

    call_s: float
    row_s: float
    measured: bool = True


def flow_rates(task: NetworkTask, machine: Machine) -> FlowRates:
    """Timed and kept if it is this machine and torch is there, else derived."""
    share = core_share(machine, _CORE)
    derived = FlowRates(
        call_s=_CALL_S / share, row_s=task.shape.flops / _SMALL / share, measured=False
    )
    if machine.fingerprint.get("cpu") != cpu_model():
        return derived
    try:
        import torch  # noqa: F401
    except ImportError:
        return derived
    shape = task.shape
    key = f"{cpu_model()}, {shape.features}, {shape.width}, {shape.depth}, {shape.classes}"
    return kept_rates("flow.json", key, FlowRates, lambda: _timed(task))


def _timed(task: NetworkTask) -> FlowRates:
    from shoal.fields.federate.ddm.training import NetworkTraining
    from shoal.kernel.threads import torch_threads

    draw, seconds, batches = np.random.default_rng(0), [], (32, 256)
    shape = task.shape
    data = FlowData(
        x=draw.random((256, shape.features), np.float32),
        y=np.zeros(256, np.int64),
        classes=shape.classes,
    )
    with torch_threads(1):
        for batch in batches:
            training = NetworkTraining(task.model_copy(update={"batch": batch}), data)

            def steps(training: NetworkTraining = training) -> None:
                for _ in range(5):
                    training.advance(training.loss())

            steps()
            seconds.append(least_seconds(steps, 5)[0] / 5)
    row = max((seconds[1] - seconds[0]) / (batches[1] - batches[0]), 1e-9)
    return FlowRates(call_s=max(seconds[0] - row * batches[0], 1e-6), row_s=row)


def examples_of(job: TrainExpertsJob) -> tuple[Examples, Examples]:
    """What the model learns from, and what it is validated on.

    Raises:
        ShoalError: the data cannot be read.
    """
    train, test = table("example_source").build(job.data, where="data").load(job.seed)
    return train, test


def whole_task(job: TrainExpertsJob, features: int, classes: int) -> NetworkTask:
    """One network of all the data."""
    shape = FlowShape(
        features=features,
        outputs=features,
        width=job.width,
        depth=job.depth,
        classes=classes if job.conditional else 0,
        residual=True,
    )
    return NetworkTask(
        role="expert",
        experts=1,
        shape=shape,
        path=job.path,
        steps=job.steps,
        batch=job.batch,
        lr=job.lr,
        ema=job.ema,
        seed=job.seed,
    )


def plan_experts(job: TrainExpertsJob, machine: Machine) -> list[TrainExpertsPlan]:
    """The ways to do it, the shortest first.

    Raises:
        ShoalError: the data cannot be read, or the batch cannot be divided.
    """
    train, _ = examples_of(job)
    task = whole_task(job, math.prod(train.x.shape[1:]), train.classes)
    rates = flow_rates(task, machine)
    work = FlowWork(
        samples=len(train),
        shape=task.shape,
        steps=job.steps,
        batch=job.batch,
        call_s=rates.call_s,
        row_s=rates.row_s,
    )
    plans = [_plan(job, machine, work, rates, choice) for choice in _methods(job, work, machine)]
    return sorted(plans, key=lambda plan: plan.predicted["total_s"].value)


def _methods(job: TrainExpertsJob, work: FlowWork, machine: Machine) -> Iterator[Choice]:
    if job.method is not None:
        yield job.method
        return
    for choice, _ in table("flow_training").offered(work, machine):
        yield choice


def _plan(
    job: TrainExpertsJob, machine: Machine, work: FlowWork, rates: FlowRates, choice: Choice
) -> TrainExpertsPlan:
    method: FlowTraining = table("flow_training").build(choice, where="method")
    cost = method.estimate(work, machine)
    spread = _SPREAD_TIMED if rates.measured else _SPREAD_DERIVED
    # A forward pass costs a third of a step; the whole batch, as many as samples.
    mixture: ExpertMixture = table("expert_mixture").build(job.mixture, where="mixture")
    active = mixture.active(cost.experts)
    draws = active * job.samples * job.sample_steps * rates.row_s / 3
    student = work.train_s(work.shape, job.distill, job.batch) * (1 + cost.experts / 3)
    size = 4.0 * work.shape.parameters
    process = _PROCESS + 5 * size + 8 * work.samples * work.shape.features
    memory = process * (cost.processes + 1)
    capacity = machine.device.main_memory.capacity_bytes
    return TrainExpertsPlan(
        job=job.model_copy(update={"method": choice}),
        machine=machine,
        predicted={
            "total_s": Interval.around(cost.train_s + draws + student + _BESIDE_S, spread),
            "train_s": Interval.around(cost.train_s, spread),
            "network_bytes": Interval.exact(cost.network_bytes),
            "gradient_bytes": Interval.exact(2 * size * (cost.ranks - 1) * job.steps),
            "memory_bytes": Interval.around(process, 0.4),
        },
        planner="flow trainings",
        fits=not capacity or memory <= capacity,
        why=f"{choice}: {cost.why}; {cost.processes} processes at a time",
        notes=(
            "steps timed on this machine" if rates.measured else "steps derived from a description",
            f"all methods take {job.steps * job.batch:,} training samples",
        ),
        parameters=work.shape.parameters,
        samples=work.samples,
    )

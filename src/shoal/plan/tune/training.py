"""What is tuned of a training job: its split, its batches, what is divided and computed again.

The objective is the simulated rate of useful work, TFLOP/s of a device. A configuration that
does not fit the memory, or that is no legal split, fails with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice
from shoal.cost.shapes import shape_of
from shoal.cost.training.step import Pricer
from shoal.ir import Estimate, Machine, ModelShape, Parallel, TrainJob, Work
from shoal.plan.strategy.judge import fits, usable_bytes
from shoal.plan.strategy.space import divisors
from shoal.plan.tune.protocols import Axis, Config, SearchSpace, Setting, TrialOutcome

# In the order in which they are listed.
AXES = ("nodes", "tp", "pp", "vpp", "microbatch", "accumulate", "shard", "recompute")
# A schedule of its own is needed for several stages of a rank.
INTERLEAVED = "interleaved"


def training_space(
    shape: ModelShape, machine: Machine, fixed: Mapping[str, Sequence[Setting]] | None = None
) -> SearchSpace:
    """The axes of a model on a machine.

    ``nodes`` of the machine are used; ``tp`` is a divisor of a node's devices, ``pp`` one of the
    blocks and of all devices; ``vpp`` is how many stages a rank has; ``microbatch`` is sequences
    of a pass and ``accumulate`` passes of a step; ``shard`` is replicated or zero1; ``recompute``
    none or full.

    Args:
        shape: the model.
        machine: where it runs.
        fixed: axis -> the values that it may have instead.

    Raises:
        ConfigError: an axis that there is not.
    """
    fixed = dict(fixed or {})
    for name in fixed:
        require(name in AXES, "tune.fix", name, expected=f"one of {', '.join(AXES)}")
    most = machine.num_devices
    usual: dict[str, tuple[Setting, ...]] = {
        "nodes": (machine.nodes,),
        "tp": tuple(d for d in divisors(machine.devices_per_node) if shape.num_heads % d == 0),
        "pp": tuple(d for d in divisors(shape.num_layers) if most % d == 0),
        "vpp": (1, 2),
        "microbatch": (1, 2, 4, 8),
        "accumulate": (8, 16, 32, 64, 128),
        "shard": ("replicated", "zero1"),
        "recompute": ("none", "full"),
    }
    return SearchSpace(
        axes=tuple(Axis(name=name, values=tuple(fixed.get(name, usual[name]))) for name in AXES)
    )


@dataclass(frozen=True, eq=False)
class TrainingObjective:
    """TFLOP/s of a device that a configuration reaches in the simulator.

    Args:
        model: the model, where the job does not name one that is known.
        whole_flops: include recomputation, as Megatron and DeepSpeed report it.
    """

    job: TrainJob
    machine: Machine
    model: ModelShape | None = None
    whole_flops: bool = False
    _kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shape(self) -> ModelShape:
        """The model."""
        if self.model is not None:
            return self.model
        if "shape" not in self._kept:
            self._kept["shape"] = shape_of(self.job)
        shape: ModelShape = self._kept["shape"]
        return shape

    def machine_of(self, nodes: int) -> Machine:
        """So many nodes of the machine.

        Raises:
            PlanError: it has fewer.
        """
        require(
            1 <= nodes <= self.machine.nodes,
            "tune.nodes",
            nodes,
            expected=f"1 to the {self.machine.nodes} nodes of {self.machine.name}",
            error=PlanError,
        )
        return self.machine.model_copy(update={"nodes": nodes})

    def job_of(self, config: Config) -> TrainJob:
        """The concrete job of a configuration; its batch follows from the split.

        Raises:
            ConfigError: the configuration has no value for an axis, or its parallelism is invalid.
            PlanError: the devices are not filled.
        """
        missing = [name for name in AXES if name not in config]
        require(not missing, "tune.config", ", ".join(missing), expected="a value of every axis")
        nodes, tp, pp, vpp, size, passes = (int(config[name]) for name in AXES[:6])
        devices = nodes * self.machine.devices_per_node
        layers = self.shape.num_layers
        legal = {
            f"tp * pp = {tp * pp} does not divide {devices} devices": devices % (tp * pp) == 0,
            f"tp = {tp} does not divide {self.shape.num_heads} heads": (
                self.shape.num_heads % tp == 0
            ),
            f"pp * vpp = {pp * vpp} does not divide {layers} blocks": layers % (pp * vpp) == 0,
            "vpp above 1 needs pp above 1": vpp == 1 or pp > 1,
            f"interleaving needs accumulate = {passes} to be a multiple of pp = {pp}": (
                vpp == 1 or passes % pp == 0
            ),
        }
        for reason, holds in legal.items():
            if not holds:
                raise PlanError(reason)
        dp = devices // (tp * pp)
        schedule = Choice(name=INTERLEAVED) if vpp > 1 else Choice(name="1f1b")
        return self.job.model_copy(
            update={
                "parallel": Parallel(dp=dp, tp=tp, pp=pp, vpp=vpp, schedule=schedule),
                "global_batch": dp * size * passes,
                "microbatch": size,
                "shard": Choice(name=str(config["shard"])),
                "recompute": str(config["recompute"]),
            }
        )

    def price(self, config: Config) -> tuple[TrainJob, Estimate]:
        """The job of a configuration and what it costs.

        Raises:
            ConfigError: see :meth:`job_of`.
            PlanError: see :meth:`job_of`.
        """
        job = self.job_of(config)
        nodes = int(config["nodes"])
        key = f"pricer {nodes}"
        if key not in self._kept:
            self._kept[key] = Pricer(self.machine_of(nodes))
        pricer: Pricer = self._kept[key]
        return job, pricer.estimate(Work.model_construct(shape=self.shape, job=job))

    def rate(self, job: TrainJob, cost: Estimate) -> float:
        """FLOP/s of a device."""
        again = 4.0 / 3.0 if self.whole_flops and job.recompute != "none" else 1.0
        return again * cost.flops / cost.step_s.value / job.parallel.world

    def utilisation(self, job: TrainJob, cost: Estimate) -> float:
        """The rate as a share of the device's peak.

        Raises:
            PlanError: the machine does not say its peak.
        """
        peak = self.machine.device.peak_flops.get(job.precision)
        if peak is None:
            raise PlanError(
                f"machine {self.machine.name}: device.peak_flops has no {job.precision}; add it"
            )
        return self.rate(job, cost) / peak

    def __call__(self, config: Config) -> TrialOutcome:
        """See :data:`~shoal.plan.tune.protocols.Objective`."""
        try:
            job, cost = self.price(config)
        except (ConfigError, PlanError) as cause:
            return TrialOutcome(failure=str(cause))
        over = cost.memory_total / usable_bytes(job, self.machine)
        if not fits(job, self.machine, cost):
            failure = f"out of memory: a rank needs {over:.2g} times what it has"
            return TrialOutcome(failure=failure, excess=math.log(over))
        return TrialOutcome(value=self.rate(job, cost) / 1e12, excess=min(0.0, math.log(over)))

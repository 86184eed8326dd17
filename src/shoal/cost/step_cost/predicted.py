"""The predicted cost of a step: kernel by kernel on accelerators, by measured rates on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.core.errors import require
from shoal.cost.gpu.device import gpu_of
from shoal.cost.kernels.own import own_table
from shoal.cost.kernels.serving_engines import serving_engine
from shoal.cost.step_cost.accelerated import AcceleratedStepCost, Formats, ServingSplit
from shoal.cost.step_cost.roofline import BYTES, Roofline, Terms
from shoal.cost.step_cost.sharded import ShardedStepCost
from shoal.ir import Machine, ModelShape
from shoal.ir.weight_formats import weight_format


class PredictedStepCost(Protocol):
    """Seconds of a step, and of its causes."""

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See :class:`~shoal.ir.engine.StepCost`."""

    def terms(self, chunks: Sequence[tuple[int, int]]) -> Terms:
        """Seconds of a step of ``chunks`` (tokens before, tokens in it), by cause."""


def predicted_step_cost(
    machine: Machine,
    shape: ModelShape,
    precision: str,
    threads: int = 0,
    *,
    engine: str = "shoal",
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    ranks: int = 1,
    weights: str = "plain",
    head_bytes: float | None = None,
) -> PredictedStepCost:
    """Seconds of steps of a model on devices of a machine, through all stages.

    Args:
        machine: whose devices they are.
        shape: the model.
        precision: fp32 or bf16, of weights and cache.
        threads: threads that compute on a CPU; 0 for all cores.
        engine: that runs the steps.
        tp: devices that share every layer.
        pp: stages.
        dp: groups of devices with attention of their own.
        ep: devices of a stage that divide the experts.
        ranks: processes that compute beside each other on a CPU, and share it.
        weights: format of the weights of blocks; plain for that of ``precision``.
        head_bytes: bytes of the key or the value of one token and head; None for plain ones.

    Raises:
        ConfigError: another precision, or an unknown engine.
        MachineError: the machine has no value for a required rate.
        PlanError: heads that ``tp`` does not divide.
    """
    require(precision in BYTES, "precision", precision, expected=" or ".join(BYTES))
    if machine.device.kind != "cpu":
        kv = BYTES[precision] if head_bytes is None else head_bytes / shape.head_dim
        dense = kernel_format(weights, precision)
        return AcceleratedStepCost(
            gpu_of(machine),
            shape,
            serving_engine(engine),
            ServingSplit(tp=tp, replicas=dp, experts_over=ep, pp=pp),
            Formats(dense=dense, experts=dense, kv=_of_bytes(kv)),
            own_table(machine.device.name)[0],
        )
    roofline = Roofline(
        machine,
        shape,
        precision,
        threads,
        ranks=ranks,
        weight_bytes=None if weights == "plain" else weight_format(weights).bits / 8,
        head_bytes=head_bytes,
        engine=serving_engine(engine),
    )
    inside = machine.link("device") or machine.link("node") or machine.link("loopback")
    return ShardedStepCost(roofline, tp, pp, inside)


def kernel_format(weights: str, precision: str) -> str:
    """The format of products with weights of a job's format, as kernels know it."""
    if weights == "plain":
        return _of_bytes(BYTES[precision])
    bits = weight_format(weights).bits
    if weights.startswith(("fp8", "float8")):
        return "fp8"
    if weights.startswith(("nvfp4", "mxfp4")):
        return weights
    return _of_bytes(bits / 8)


def _of_bytes(nbytes: float) -> str:
    """The format of numbers of so many bytes, their scales included."""
    return next(name for most, name in _FORMATS if nbytes < most)


_FORMATS = ((0.75, "int4"), (1.5, "int8"), (3.0, "bf16"), (float("inf"), "fp32"))

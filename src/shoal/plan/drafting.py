"""Plans of drafters' training: what the target makes of the text, then the steps."""

from __future__ import annotations

from shoal.core.parts import table
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.cost.rates import Rates
from shoal.cost.shapes import resolve
from shoal.ir import Interval, Machine, ModelShape, Parallel
from shoal.ir.drafting import DrafterJob, DrafterPlan, DrafterWork

__all__ = ["features_s", "plan_drafter"]

# Sequences that the target reads or writes at a time.
_ROWS = 32
# Half-width of the 90 % interval of the time before the first step, as a share.
_SPREAD = 1.0


def plan_drafter(job: DrafterJob, machine: Machine) -> DrafterPlan:
    """What training a drafter costs on a machine.

    Raises:
        PlanError: the drafter cannot be trained so.
        ModelError: there is no such model.
    """
    shape = resolve(job.model)
    part = table("drafter").build(job.drafter, where="drafter")
    part.check(job, shape)
    step = part.estimate(DrafterWork(shape=shape, job=job), machine)
    width = 2.0 if job.precision == "bf16" else 4.0
    sequences = job.sequences + job.calibration_prompts
    memory = {
        **step.memory_bytes,
        "base": step.memory_bytes.get("base", 0.0) + width * parameters(shape),
        "disk": sequences * job.seq_len * (width * shape.hidden + 4.0),
    }
    before = Interval.around(features_s(job, shape, machine), _SPREAD)
    steps = step.step_s.scaled(job.steps)
    total = Interval(
        value=before.value + steps.value,
        low=before.low + steps.low,
        high=before.high + steps.high,
    )
    estimate = step.model_copy(update={"memory_bytes": memory, "total_s": total})
    capacity = machine.device.main_memory.capacity_bytes
    fits = not capacity or estimate.memory_total <= capacity
    trained = part.parameters(shape)
    return DrafterPlan(
        job=job,
        machine=machine,
        shape=shape,
        estimate=estimate,
        parameters=trained,
        drafter_bytes=int(width * trained),
        fits=fits,
        why=f"{job.drafter.name}: {trained / 1e6:.3g} M parameters; a step is bound by "
        f"{step.bound}; the target {'writes' if job.own_text else 'reads'} "
        f"{job.sequences * job.seq_len} tokens first",
    )


def features_s(job: DrafterJob, shape: ModelShape, machine: Machine) -> float:
    """Seconds until the target has read the text, or has written it, token by token."""
    rates = Rates(machine, Parallel(), job.threads)
    forward = flops_per_token(shape, job.seq_len, training=False)
    read = job.sequences * job.seq_len * forward / rates.matmul_curve(job.precision)(shape.hidden)
    width = 2.0 if job.precision == "bf16" else 4.0
    # A token of all rows at once passes through the weights, or through so many products.
    stream = width * parameters(shape) / (machine.device.main_memory.read_bandwidth or 1e10)
    token = max(stream, _ROWS * forward / rates.matmul_curve(job.precision)(_ROWS))
    batches = -(-job.calibration_prompts // _ROWS)
    if job.own_text:
        return (batches + -(-job.sequences // _ROWS)) * job.seq_len * token
    return read + batches * (job.seq_len - job.prompt_tokens) * token

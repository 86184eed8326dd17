"""Plans of drafters' training: what the target makes of the text, then the steps."""

from __future__ import annotations

from shoal.core.parts import table
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.cost.price.rates import RankRates
from shoal.cost.shapes import resolve
from shoal.ir import Interval, Machine, ModelShape, Parallel
from shoal.ir.drafting import DrafterJob, DrafterPlan, DrafterWork

# Sequences that the target writes at a time.
_ROWS = 64
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
        "base": width * parameters(shape),
        # Mapped into memory as they are read; they lie on disk.
        "features": sequences * job.seq_len * (width * shape.hidden + 4.0),
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
        predicted={
            "parameters": Interval.exact(trained),
            "drafter_bytes": Interval.exact(width * trained),
        },
        fits=fits,
        why=f"{job.drafter.name}: {trained / 1e6:.3g} M parameters; a step is bound by "
        f"{step.bound}; the target {'writes' if job.own_text else 'reads'} "
        f"{job.sequences * job.seq_len} tokens first",
    )


def features_s(job: DrafterJob, shape: ModelShape, machine: Machine) -> float:
    """Seconds until the target has read the text, or has written it, token by token."""
    rates = RankRates(machine, Parallel(), job.threads).matmul_curve(job.precision)
    forward = flops_per_token(shape, job.seq_len, training=False)
    width = 2.0 if job.precision == "bf16" else 4.0
    stream = width * parameters(shape) / (machine.device.main_memory.read_bandwidth or 1e10)

    def writes(sequences: int, tokens: int) -> float:
        """So many tokens behind each of these sequences, a batch of them at a time."""
        rows = min(_ROWS, sequences)
        # A product of a few rows is as fast as a cube of as many multiplications.
        rate = rates((rows * shape.hidden**2) ** (1 / 3))
        return -(-sequences // rows) * tokens * max(stream, rows * forward / rate)

    judged = writes(job.calibration_prompts, job.seq_len - job.prompt_tokens)
    if job.own_text:
        return judged + writes(job.sequences, job.seq_len)
    return judged + job.sequences * job.seq_len * forward / rates(shape.hidden)

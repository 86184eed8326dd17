"""What estimates of drafters share: floating-point operations, bytes, and the rates of a rank."""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.cost.price.rates import RankRates
from shoal.cost.training.memory import RUNTIME_BYTES
from shoal.ir import Estimate, Interval, Machine, ModelShape, Parallel
from shoal.ir.drafting import DrafterJob, DrafterWork

# Half-width of the 90 % interval of a step, as a share: small matrices, and many small operators.
SPREAD = 0.8
# How often what is kept for the backward pass goes through memory: written, read, its gradient
# too, and what operators make on the way.
_PASSES = 6.0
# Logits are cast to fp32, made shares of, compared, and all of it again for the gradient.
_LOGITS = 12.0


def priced(
    work: DrafterWork,
    machine: Machine,
    *,
    trained: float,
    flops_per_token: float,
    activations: float,
    logits: float,
    base: float = 0.0,
    waits: float = 0.0,
    passing: float = 0.0,
) -> Estimate:
    """A step of matrix products, and of an update of what is trained.

    Args:
        work: target and job.
        machine: whose rates count.
        trained: parameters that are trained.
        flops_per_token: of forward and backward pass.
        activations: values kept for the backward pass, for one token.
        logits: number of logits in memory at once, for one token.
        base: parameters of the target that are needed in training.
        waits: parameters in fp32 that are read again for every place of a sequence, one after
            the other.
        passing: values written and read once, and not kept, for one token.
    """
    job, shape = work.job, work.shape
    rates = RankRates(machine, Parallel(), job.threads)
    tokens = job.batch * job.seq_len
    width = 2.0 if job.precision == "bf16" else 4.0
    matmul = flops_per_token * tokens / rates.matmul_curve(job.precision)(shape.hidden)
    moved = (_LOGITS * 4.0 * logits + width * (_PASSES * activations + 2 * passing)) * tokens
    memory = moved / rates.stream_curve()(moved)
    # An update reads and writes seven numbers of each parameter.
    bandwidth = machine.device.main_memory.read_bandwidth or 1e10
    optimizer = 7 * 4.0 * trained / bandwidth
    overhead = job.seq_len * 4.0 * waits / bandwidth
    terms = {"matmul": matmul, "memory": memory, "optimizer": optimizer, "overhead": overhead}
    seconds = sum(terms.values())
    return Estimate(
        step_s=Interval.around(seconds, SPREAD),
        terms_s=terms,
        memory_bytes={
            "weights": (4.0 + width) * trained + width * base,
            "gradients": 4.0 * trained,
            "optimizer": 8.0 * trained,
            "activations": width * activations * tokens,
            "logits": 4.0 * logits * tokens,
            "runtime": RUNTIME_BYTES[machine.device.kind],
        },
        flops=flops_per_token * tokens,
        tokens=tokens,
        bound=max(terms, key=lambda cause: terms[cause]),
    )


def check_levels(job: DrafterJob, shape: ModelShape, levels: int, key: str) -> None:
    """Refuse sequences in which no place has all the tokens that are guessed there.

    Raises:
        PlanError: names the key and what is possible.
    """
    room = job.seq_len - job.prompt_tokens
    require(
        levels + 1 < room,
        f"drafter.{key}",
        levels,
        expected=f"fewer than {room - 1}: sequences of seq_len = {job.seq_len} have {room} tokens "
        "behind their prompt",
        hint="give longer sequences, or fewer levels",
        error=PlanError,
    )
    require(
        job.seq_len <= shape.max_position,
        "seq_len",
        job.seq_len,
        expected=f"at most {shape.max_position}, the longest position of {job.model}",
        error=PlanError,
    )

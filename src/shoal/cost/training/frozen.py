"""How the frozen weights of a fine-tuning job lie on a rank, and what that costs.

A matrix that is only multiplied lies in the type of the products: in a job in bf16 no number
changes by that. Where the ranks divide the base, each has a part of every matrix of the blocks and
gathers the matrix whenever it is multiplied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from shoal.core.traits import traits
from shoal.cost.arithmetic import (
    embedding_parameters,
    linears,
    mixture_layers,
    parameters,
)
from shoal.cost.price.ops import FrozenPasses
from shoal.cost.price.rates import data_link
from shoal.cost.price.shares import passes_of
from shoal.cost.training.memory import ALLOCATOR_SLACK
from shoal.ir import Machine, ModelShape, TrainJob, Work

# Layers of a block that are small and stay whole on every rank.
_WHOLE = ("router", "route", "aggregate_in", "aggregate_out")


class FrozenBase(NamedTuple):
    """Frozen weights on a rank.

    Args:
        outside: bytes of a weight of embedding and output matrix.
        inside: bytes of a weight of the blocks' matrices.
        copied: products use bf16 copies of these matrices, which exist for one step.
        passes: bytes read and written to convert them to the dtype of the products.
    """

    outside: float
    inside: float
    copied: bool
    passes: FrozenPasses


def base_of(job: TrainJob, shape: ModelShape, part: Any) -> FrozenBase:
    """How the base of a job lies.

    Args:
        job: that fine-tunes.
        shape: of the model.
        part: the fine-tuning method.
    """
    low = job.precision == "bf16"
    moves = bool(getattr(part, "forward_only", False))
    exact = shape.stored == "bf16" or "reads_base" not in traits("peft", part.name)
    lies = 2.0 if low and exact and job.base != "shared" and not moves else 4.0
    bits = float(getattr(part, "weight_bits", 32.0))
    if bits < 16:  # made for every product, and gone after it
        return FrozenBase(lies, bits / 8.0, copied=False, passes=FrozenPasses(6.0, 6.0))
    copied = low and lies == 4.0
    return FrozenBase(lies, lies, copied, FrozenPasses(6.0 if copied else 0.0))


def _matrices(shape: ModelShape) -> tuple[float, float, float, int]:
    """Weights of the blocks' matrices, of those that ranks divide, of the largest; how many."""
    every = [one for one in linears(shape) if one.role != "output"]
    parted = [one for one in every if one.role != "expert" and one.name not in _WHOLE]
    return (
        float(sum(one.layers * one.copies * one.N * one.K for one in every)),
        float(sum(one.layers * one.copies * one.N * one.K for one in parted)),
        float(max(one.N * one.K for one in parted)),
        sum(one.layers * one.copies for one in parted),
    )


def gather_s(work: Work, machine: Machine, wire: dict[str, float]) -> float:
    """Seconds of a step in which ranks gather the matrices of a divided base; nothing hides them.

    A matrix is gathered for its product, for the gradient of its input, and once more where the
    product is computed again.
    """
    job, ranks = work.job, work.job.parallel.dp
    link = data_link(machine, job.parallel)
    if job.finetune is None or job.base != "divided" or link is None:
        return 0.0
    _, parted, _, number = _matrices(work.shape)
    times = passes_of(job) * (2 if job.recompute == "none" else 3)
    width = 2.0 if job.precision == "bf16" else 4.0
    sent = times * width * parted * (ranks - 1) / ranks
    wire[link.scope] = wire.get(link.scope, 0.0) + sent
    return sent / link.bandwidth + times * number * (ranks - 1) * link.latency_s


def tuned_memory(
    work: Work, found: dict[str, float], part: Any, microbatch: int, *, is_cpu: bool
) -> dict[str, float]:
    """Bytes of one rank of a fine-tuning run: those of ``base`` and ``adapter`` separately.

    Args:
        work: a step of the job.
        found: what the same job takes that trains all weights.
        part: the fine-tuning method.
        microbatch: sequences of a micro-batch.
        is_cpu: it runs on a CPU, which makes the loss of a chunk of the logits at a time.
    """
    job, shape = work.job, work.shape
    every = float(parameters(shape))
    outside = min(every, embedding_parameters(shape))
    blocks = every - outside - shape.hidden
    base = base_of(job, shape, part)
    matrices, parted, largest, _ = _matrices(shape)
    width = 2.0 if job.precision == "bf16" else 4.0
    tokens = float(job.seq_len * microbatch)
    # The gradient of the output matrix is not there, nor are the inputs of layers that stand still:
    # of a block those of the feed-forward layer's two matrices.
    logits = found["logits"] - (4.0 + width) * shape.vocab_size * shape.hidden
    if not is_cpu:  # in fp32 their logarithms, and the gradients of both
        logits = 12.0 * tokens * shape.vocab_size + 2 * width * tokens * shape.hidden
    dense = (shape.num_layers - mixture_layers(shape)) * (shape.hidden + shape.ffn_hidden)
    kept = found["activations"]
    if job.recompute == "none":
        kept -= width * tokens * dense
    if base.copied:
        kept += 2.0 * blocks
    lies = base.inside * matrices
    gathered = 0.0
    if job.base == "divided":
        lies -= base.inside * parted * (1 - 1 / job.parallel.dp)
        gathered = width * largest
    trained = 0.0 if getattr(part, "forward_only", False) else float(part.parameters(shape))
    drawn = float(part.drawn(shape)) if hasattr(part, "drawn") else 0.0
    tensors = {
        "base": base.outside * outside + lies + 4.0 * (every - outside - matrices),
        "adapter": 4.0 * (trained + drawn),
        "gradients": found["gradients"],
        "optimizer": found["optimizer"],
        "activations": kept * float(getattr(part, "kept", 1.0)) + gathered,
        "logits": logits,
    }
    process = found["runtime"] - ALLOCATOR_SLACK * (sum(found.values()) - found["runtime"])
    return {**tensors, "runtime": process + ALLOCATOR_SLACK * sum(tensors.values())}

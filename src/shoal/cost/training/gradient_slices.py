"""How much of the gradients' sum travels beside layers of experts, slice by slice.

A slice takes what later blocks have left to sum, and no more than the job gives it; the first
block's own gradients and the embedding's are done when nothing is left to travel beside.

Source: Pan et al., FSMoE, 2025, section 5.
"""

from __future__ import annotations

from shoal.cost.arithmetic import block_parameters, expert_parameters
from shoal.ir import ModelShape, TrainJob

_BYTES = 4.0


def hidden_bytes(job: TrainJob, shape: ModelShape) -> float:
    """Bytes of a rank's gradients that are sent in slices, without experts; 4 per parameter."""
    split = job.parallel
    if not split.slices:
        return 0.0
    block = _BYTES * (block_parameters(shape) - expert_parameters(shape)) / shape.num_layers
    table = 0 if shape.tied else shape.vocab_size
    waiting, hidden_bytes = _BYTES * shape.hidden * (1 + table) / split.tp, 0.0
    for number in reversed(range(shape.num_layers)):
        if number >= shape.num_dense_layers:
            pairs = split.slices
            size = min(waiting, sum(pairs[number if len(pairs) > 1 else 0]))
            hidden_bytes += size
            waiting -= size
        waiting += block / split.tp
    return hidden_bytes


def hidden_share(job: TrainJob, shape: ModelShape, whole: float) -> float:
    """The same as a share of ``whole`` bytes of gradients that a rank sums."""
    return min(1.0, hidden_bytes(job, shape) / whole) if whole else 0.0

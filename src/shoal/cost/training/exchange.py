"""What data-parallel ranks exchange under another engine, as far as it is not hidden.

Shoal's own sharding says itself what it exchanges; see :mod:`shoal.cost.training.wire`.

Sources: Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023 (what is gathered when).
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator, GpuCalibration
from shoal.cost.gpu.network import ring_s
from shoal.cost.gpu.spec import EngineSpec
from shoal.cost.price.experts import held_parameters
from shoal.cost.price.ops import stage_share
from shoal.cost.price.passes import PassSeconds
from shoal.cost.price.shares import passes_of
from shoal.ir import Work

# Share of a pass behind which traffic can hide, and by how much kernels run longer while a
# collective takes units and memory from them.
HIDES, CROWDED = 0.85, 0.15


def exchanged_s(
    work: Work,
    engine: EngineSpec,
    gpu: Accelerator,
    k: GpuCalibration,
    divides: frozenset[str],
    forward: PassSeconds,
    backward: PassSeconds,
) -> float:
    """Seconds of a step in which ranks wait for gradients and weights of each other.

    Args:
        work: the job.
        engine: overlap and dtype of the gradient communication.
        gpu: device with the links.
        k: measured constants.
        divides: what is divided over the ranks: weights, gradients, optimizer.
        forward: a micro-batch's pass on the busiest stage.
        backward: its backward pass.
    """
    job, split = work.job, work.job.parallel
    frozen = job.finetune is not None
    if frozen and "weights" not in divides:
        return 0.0
    experts, rest = held_parameters(work.shape, split)
    passes, ranks = passes_of(job), split.dp * split.cp
    blocks = max(1.0, stage_share(work.shape, split.pp) * work.shape.num_layers)

    def ring(width: float) -> float:
        own = ring_s(width * rest, ranks, split.tp, gpu, k)
        return own + ring_s(width * experts, split.edp, split.ep * split.etp, gpu, k)

    ahead, behind = HIDES * forward.device, HIDES * backward.device
    if "weights" in divides:
        # A ring's latency is paid once a block.
        start = ring_s(1.0, ranks, split.tp, gpu, k) * blocks
        gather = ring(2.0) + start
        scatter = 0.0 if frozen else ring(engine.grad_bytes) + start
        copied = 0.0
        if engine.copies:
            # Two gathers read and write bf16; gradients are read, and written as they are sent.
            moved = 8.0 + (0.0 if frozen else 2.0 + engine.grad_bytes)
            copied = moved * (rest + experts) / (k.stream * gpu.stream)
        if not engine.data_overlap:
            return passes * (2 * gather + scatter + copied)
        exposed = max(0.0, gather - ahead) + max(0.0, gather + scatter - behind)
        hidden = min(gather, ahead) + min(gather + scatter, behind)
        # The first gather and the last scatter have nothing to hide behind.
        return passes * (exposed + CROWDED * hidden + copied) + (gather + scatter) / blocks
    sharded = bool(divides) or engine.sharded_update
    scatter = ring(engine.grad_bytes)
    gather = ring(2.0) if sharded else scatter
    if not engine.data_overlap:
        return scatter + gather
    if sharded:
        exposed = max(0.05 * scatter, scatter - behind) + max(0.05 * gather, gather - ahead)
    else:
        exposed = max(0.05 * scatter, scatter + gather - behind)
    return exposed + CROWDED * min(scatter + gather, ahead + behind)

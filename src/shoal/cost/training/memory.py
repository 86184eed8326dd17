"""Bytes that one rank of a training job needs, by cause.

Sources: Rajbhandari et al., ZeRO, 2020 (what is divided); Korthikanti et al., 2022 (activations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from shoal.cost.arithmetic import (
    activation_bytes,
    logits_bytes,
    parameters,
)
from shoal.cost.gpu.engines import ENGINES
from shoal.cost.price.experts import held_parameters
from shoal.cost.price.ops import MOST_PLAIN_SCORES, stage_share
from shoal.cost.price.rates import ranks_per_host
from shoal.cost.price.shares import sharers, vocab_ranks
from shoal.ir import Machine, Parallel, TrainJob, Work

TIERS = ("device", "host", "disk")
"""Places of an offloaded job's state, as an estimate's causes name them."""

ARENAS = ("base", "adapter", "gradients", "optimizer", "activations")
"""Categories of a fine-tuning run's memory, named like an estimate's causes."""

# What a rank's process holds before the model: framework, libraries, allocator.
RUNTIME_BYTES = {"cpu": 0.35e9, "gpu": 1.5e9}
# What a rank holds to talk to the others of its host: libraries and sockets, and for each of them
# the memory that they share.
PEERS_BYTES, PEER_BYTES = 0.025e9, 0.012e9
# What the allocator keeps beyond the tensors (fragmentation, blocks waiting for reuse).
ALLOCATOR_SLACK = 0.08


def standing_bytes(
    work: Work,
    optimizer: float,
    divides: frozenset[str],
    trained: float = 1.0,
    levels: Callable[[float, float], dict[str, float]] | None = None,
) -> dict[str, float]:
    """Bytes of one rank, by cause, that its micro-batches do not change.

    ``trained`` is the share of the parameters that have gradients and moments; ``levels`` says what
    weights and gradients take of so many parameters, and of a block of so many, where a sharding
    divides them over groups of different sizes.
    """
    job, shape = work.job, work.shape
    pp = job.parallel.pp
    dp = sharers(job)
    experts, rest = held_parameters(shape, job.parallel)
    local = experts + rest
    blocks = max(1.0, stage_share(shape, pp) * shape.num_layers)
    block = local / blocks
    # Experts are divided over ranks of their own, and whole where there is one of these.
    edp = job.parallel.edp
    mine = rest / dp + experts / edp
    whole = experts if edp == 1 else 0.0
    passing = (local - whole) / blocks
    engine = ENGINES[job.engine]
    # Where the optimizer has weights in fp32, others are held in the compute type alone.
    beside = engine.masters and job.precision == "bf16"
    held = 2.0 if beside else 4.0
    weights = held * local
    if "weights" in divides:
        # Two blocks are whole at a time: the one at work and the next.
        weights = held * mine + 2 * held * passing
    if levels is not None:
        weights = levels(local, block)["weights"]
    if job.precision == "bf16" and not beside:
        weights += 2.0 * (2 * passing + whole if "weights" in divides else local)
    if job.products != "same":
        # Both operands' layouts in eight bits stay from one micro-batch to the next.
        weights += 2.0 * (2 * passing if "weights" in divides else local)
    gradients = 4.0 * local
    if "gradients" in divides:
        gradients = 4.0 * mine + 4.0 * passing
    if levels is not None:
        gradients = levels(local, block)["gradients"]
    moments = local
    if "optimizer" in divides:
        moments = mine
    if beside:
        optimizer += 4.0 * parameters(shape)
    return {
        "weights": weights,
        "gradients": gradients * trained,
        "optimizer": optimizer * trained * moments / parameters(shape),
    }


def passing_bytes(work: Work, is_cpu: bool, microbatch: int, recompute: str) -> tuple[float, float]:
    """Bytes of one rank that one micro-batch keeps, and those of its logits."""
    job, shape = work.job, work.shape
    tp, pp = job.parallel.tp, job.parallel.pp
    if recompute == "selective":
        recompute = ENGINES[job.engine].selective
    kept = activation_bytes(
        shape,
        job.seq_len,
        microbatch,
        precision=job.precision,
        recompute=recompute,
        tp=tp,
        sp=job.parallel.sp,
        layers=math.ceil(stage_share(shape, pp) * shape.num_layers),
    )
    if is_cpu and job.precision == "bf16":
        scores = microbatch * shape.num_heads * float(job.seq_len) ** 2 / tp
        kept += 4 * 2.0 * min(scores, MOST_PLAIN_SCORES)
    logits = logits_bytes(
        shape, job.seq_len, microbatch, precision=job.precision, tp=vocab_ranks(job)
    )
    return kept, logits / job.parallel.cp


def in_flight_bytes(
    work: Work, kept: float, in_flight: float, microbatch: int, recompute: str
) -> float:
    """Bytes of so many micro-batches, each of which keeps ``kept``."""
    job = work.job
    if recompute == "stage":
        # One micro-batch is whole at a time; of the others the stage's input is left.
        width = 2.0 if job.precision == "bf16" else 4.0
        kept += (in_flight - 1.0) * microbatch * job.seq_len * work.shape.hidden * width
    else:
        kept *= in_flight
    return kept / job.parallel.cp


def runtime_bytes(machine: Machine, parallel: Parallel) -> float:
    """Bytes of one rank's process beside its tensors."""
    runtime = RUNTIME_BYTES[machine.device.kind]
    if machine.device.kind == "cpu" and parallel.world > 1:
        runtime += PEERS_BYTES + PEER_BYTES * ranks_per_host(machine, parallel)
    return runtime


def tier_bytes(job: TrainJob, machine: Machine, causes: Mapping[str, float]) -> dict[str, float]:
    """Tier -> bytes of a rank, of causes as an estimate of a training step has them.

    ``device`` has everything that lies in the rank's own memory, runtime included. A CPU's host is
    its device; of a GPU's memory what is offloaded to the host takes none.
    """
    away = {"disk"}
    if job.offload is not None and machine.device.kind == "gpu":
        away.add("host")
    result = {"device": sum(size for cause, size in causes.items() if cause not in away)}
    return result | {tier: causes[tier] for tier in sorted(away, reverse=True) if causes.get(tier)}

"""What the ranks of claims [92] MoE Parallel Folding and [65] Hecate do: steps of mixtures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from shoal.claims.experiments.co2_ranks import CO2Worker
from shoal.claims.experiments.tiny import llama
from shoal.claims.ranks import in_turn
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.ir import ModelShape, TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm


def scaled(shape: ModelShape, by: int, *, layers: int, experts: int, length: int) -> ModelConfig:
    """A mixture with heads and choices of ``shape``, and each width a part of its."""
    return llama(
        shape.hidden // by, layers, shape.num_heads, kv_heads=shape.num_kv_heads, vocab=256,
        ffn=shape.expert_hidden // by, length=length, name="scaled", family="mixtral",
        head_dim=shape.head_dim // by, num_experts=experts, top_k=shape.top_k,
    )  # fmt: skip


def passes_s(comm: Comm, *, job: TrainJob, config: ModelConfig, rounds: int) -> list[float]:
    """Seconds of the passes of a one-rank job on every rank at once, which exchange nothing."""
    keep_freed_memory()
    alone = comm.split([[rank] for rank in range(comm.world)])
    worker = CO2Worker(alone, job, config, 10**5)
    nothing = torch.zeros(job.global_batch, job.seq_len, dtype=torch.int64)
    rows = worker.session.rows(nothing, nothing, 0)

    def passes() -> None:
        worker.session.passes(rows)
        worker.session.clear()

    return in_turn(comm, {"passes": passes}, rounds)["passes"]


def steps_s(
    comm: Comm, *, jobs: Mapping[str, TrainJob], config: ModelConfig, rounds: int, steps: int = 1
) -> dict[str, list[float]]:
    """Seconds of so many training steps of every job, in turn, on the same text.

    Each job makes as many before those that are timed.
    """
    keep_freed_memory()
    total = steps * (rounds + 1)
    workers = {name: CO2Worker(comm, job, config, total) for name, job in jobs.items()}

    def train(worker: CO2Worker) -> None:
        for _ in range(steps):
            worker.step()

    arms = {name: lambda worker=worker: train(worker) for name, worker in workers.items()}
    return in_turn(comm, arms, rounds)

"""Training runs that the tests of offloading share: one job with and without its tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.claims.lab.same_as_one import SeededWeights, assemble, tokens
from shoal.claims.lab.thread_ranks import run_ranks
from shoal.core.parts import table
from shoal.ir import TrainJob
from shoal.memory.protocols import EarlyUpdater
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences

BUDGETS = {"device_budget": "8MiB", "host_budget": "64MiB"}


class Run(NamedTuple):
    """What a run came to."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    peaks: dict[str, int]
    scored: float


def config(**changes: Any) -> ModelConfig:
    """A model whose matrices are large enough for the disk."""
    return ModelConfig(
        **{
            "family": "llama",
            "vocab_size": 300,
            "hidden": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "ffn_hidden": 192,
            "max_position": 64,
            **changes,
        }
    )


def job(parallel: dict[str, Any] | None = None, **changes: Any) -> TrainJob:
    """Small steps whose gradients are clipped, so that the global norm matters."""
    return TrainJob(
        **{
            "model": "shoal-0.3m",
            "seq_len": 32,
            "global_batch": 4,
            "microbatch": 2,
            "precision": "fp32",
            "parallel": parallel or {},
            "grad_clip": 0.05,
            "steps": 4,
            **changes,
        }
    )


def run(wanted: TrainJob, model: ModelConfig, place: Path, steps: int = 4) -> Run:
    """Train on threads; what rank 0 saw, with whole parameters."""
    return run_ranks(wanted.parallel.world, lambda comm: _rank(wanted, model, comm, place, steps))[
        0
    ]


def _rank(wanted: TrainJob, model: ModelConfig, comm: Any, place: Path, steps: int) -> Run:
    schedule = check_split(wanted, model.shape())
    weights = SeededWeights(model, wanted.seed)
    engine = ParallelEngine(wanted, schedule, weights, comm, place=place)
    optimizer = table("optimizer").build(wanted.optimizer)
    updater = engine.updater(optimizer)
    losses, norms = [], []
    size = wanted.global_batch // engine.replicas
    part = slice(engine.replica * size, (engine.replica + 1) * size)
    for step in range(steps):
        whole = tokens(wanted, model.vocab_size, step, documents=False)
        rows = ReplicaSequences(whole.inputs[part], whole.targets[part], None, part.start, step)
        count = int((whole.targets != -100).sum())
        if isinstance(updater, EarlyUpdater):
            updater.begin(1.0)
        loss = engine.backward(rows, wanted.microbatch or size, count)
        engine.finish()
        norm = engine.grad_norm()
        if wanted.grad_clip:
            engine.sharded.scale_gradients((wanted.grad_clip / (norm + 1e-6)).clamp(max=1.0))
        updater.step(1.0)
        engine.sharded.publish()
        comm.all_reduce(loss, tag="loss").wait()
        losses.append(float(loss))
        norms.append(float(norm))
    scored = float(engine.loss_sum(whole.inputs[:2], whole.targets[:2]))
    shapes = {n: tuple(weights.whole(n).shape) for n in weights._shapes}
    parameters = assemble(engine.held(), shapes, comm, torch.float32)
    state = {n: {k: v.clone() for k, v in s.items()} for n, s in updater.state().items()}
    peaks: dict[str, int] = {}
    if wanted.offload is not None:
        peaks = updater.tiers.peaks()
        left = updater.tiers.used()["device"]
        # What streams is gone between steps; a window stays.
        assert left < 2**16 or getattr(wanted.offload, "name", "") == "superpipeline"
        updater.close()
    return Run(losses, norms, parameters, state, peaks, scored)


def same(one: Run, other: Run) -> None:
    """Nothing differs by a bit."""
    assert one.losses == other.losses
    assert one.norms == other.norms
    assert one.scored == other.scored
    for name, value in one.parameters.items():
        assert torch.equal(value, other.parameters[name]), name
    for name, entries in one.state.items():
        for key, value in entries.items():
            assert torch.equal(value, other.state[name][key]), f"{name} {key}"

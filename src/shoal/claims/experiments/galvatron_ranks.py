"""What the ranks of claim [103] Galvatron do: layers and plans measured, a run that re-plans."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.claims.lab.measure_layers import measure_layers
from shoal.claims.lab.session import RankSession
from shoal.claims.ranks import in_turn
from shoal.core.files import write_json
from shoal.core.random import generator
from shoal.ir import Machine, TrainJob
from shoal.train.allocator import keep_freed_memory
from shoal.train.replan import Replanner
from shoal.train.reshard import switch_engine

if TYPE_CHECKING:
    from shoal.cost.training.layer_fit import LayerProfile
    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.tensor.rows import ReplicaSequences


def measured(comm: TorchComm, **options: Any) -> dict[str, Any]:
    """See :func:`~shoal.claims.lab.measure_layers.measure_layers`."""
    keep_freed_memory()
    return measure_layers(comm, **options)


def _rows(session: RankSession, vocab_size: int, step: int) -> ReplicaSequences:
    job = session.job
    source = generator(job.seed, purpose="claim galvatron", step=step)
    ids = torch.from_numpy(source.integers(0, vocab_size, (job.global_batch, job.seq_len + 1)))
    return session.rows(ids[:, :-1], ids[:, 1:], step)


def time_plans(
    comm: TorchComm, *, jobs: Sequence[TrainJob], config: ModelConfig, turns: int
) -> dict[str, list[float]]:
    """Seconds of a step of every plan on this rank, in turn, each after one that is not timed."""
    keep_freed_memory()
    sessions = {str(at): RankSession(comm, job, config) for at, job in enumerate(jobs)}
    numbers = itertools.count()

    def step(name: str) -> None:
        rows = _rows(sessions[name], config.vocab_size, next(numbers))
        sessions[name].step(rows, record=True)

    arms = {name: functools.partial(step, name) for name in sessions}
    return in_turn(comm, arms, turns, ready=step)


def run_with_replan(
    comm: TorchComm,
    *,
    job: TrainJob,
    plans: Sequence[TrainJob],
    config: ModelConfig,
    machine: Machine,
    profile: LayerProfile,
    steps: int,
    signal: str,
) -> dict[str, Any]:
    """Train with one plan, and with others when they are better, if the job allows it.

    The first rank writes each step that has ended to ``signal``. Returns ``seconds`` and ``losses``
    of every step, ``changes`` (step, microbatch, degrees), ``moved_bytes`` and ``moved_s``.
    """
    keep_freed_memory()
    session = RankSession(comm, job, config)
    replanner = None
    if job.replan.enabled:
        replanner = Replanner(job, machine, config.shape(), comm, profile=profile, plans=plans)
    seconds, losses = [], []
    changes: list[dict[str, Any]] = []
    for step in range(steps):
        comm.barrier()
        begin = time.perf_counter()
        loss = session.step(_rows(session, config.vocab_size, step), record=True)
        busy = sum(event.end - event.start for event in session.engine.runtime.events or [])
        total = torch.tensor([float(loss)], dtype=torch.float64)
        comm.all_reduce(total, tag="loss").wait()
        own = time.perf_counter() - begin
        change = replanner.observe(own, busy) if replanner is not None else None
        if change is not None and replanner is not None:
            before = time.perf_counter()
            session.engine, session.updater, sent = switch_engine(
                session.engine, session.updater, change.job, comm
            )
            now = session.job = change.job
            replanner.changed(now)
            changes.append(
                {
                    "step": step,
                    "parallel": now.parallel.model_dump(mode="json", exclude_defaults=True),
                    "microbatch": now.microbatch,
                    "shard": now.shard.name,
                    "gain": change.gain,
                    "reason": change.reason,
                    "moved_bytes": sent,
                    "moved_s": time.perf_counter() - before,
                }
            )
        comm.barrier()
        # What a change takes, and what measuring takes, are parts of the step.
        seconds.append(time.perf_counter() - begin)
        losses.append(float(total) / (job.global_batch * job.seq_len))
        if comm.rank == 0:
            write_json(Path(signal), {"step": step})
    return {"seconds": seconds, "losses": losses, "changes": changes}

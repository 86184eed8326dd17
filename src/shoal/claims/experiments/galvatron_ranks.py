"""What the ranks of claim [103] Galvatron do: layers and plans measured, a run that re-plans."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shoal.claims.lab.measure_layers import measure_layers
from shoal.claims.lab.measure_passes import PlaceholderWeights
from shoal.core.files import write_json
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.cost.training.layer_fit import LayerProfile
from shoal.ir import Machine, TrainJob
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.train.allocator import keep_freed_memory
from shoal.train.replan import Replanner
from shoal.train.reshard import switch_engine

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.train.protocols import Updater

__all__ = ["measured", "run_with_replan", "time_plans"]


def measured(
    comm: TorchComm,
    *,
    config: Mapping[str, Any],
    seq_len: int,
    sizes: Sequence[int],
    tps: Sequence[int],
    repeats: int,
) -> dict[str, Any]:
    """See :func:`~shoal.claims.lab.measure_layers.measure_layers`."""
    keep_freed_memory()
    return measure_layers(
        comm, config=config, seq_len=seq_len, sizes=sizes, tps=tps, repeats=repeats
    )


def _rows(job: TrainJob, vocab_size: int, step: int, engine: ParallelEngine) -> ReplicaSequences:
    """The rows of this rank's replica."""
    source = generator(job.seed, purpose="claim galvatron", step=step)
    ids = torch.from_numpy(source.integers(0, vocab_size, (job.global_batch, job.seq_len + 1)))
    share = job.global_batch // engine.replicas
    mine = ids[engine.replica * share : (engine.replica + 1) * share]
    return ReplicaSequences(mine[:, :-1], mine[:, 1:], None, engine.replica * share, step)


def _step(engine: ParallelEngine, updater: Updater, rows: ReplicaSequences) -> tuple[float, float]:
    """A whole training step: its loss, summed on this rank, and the seconds of its passes."""
    job = engine.job
    count = job.global_batch * job.seq_len
    loss = engine.backward(rows, job.microbatch or len(rows.inputs), count, record=True)
    engine.finish()
    norm = engine.grad_norm()
    engine.sharded.scale_gradients((1.0 / (norm + 1e-6)).clamp(max=1.0))
    updater.step(1.0)
    engine.sharded.publish()
    busy = sum(event.end - event.start for event in engine.runtime.events or [])
    return float(loss), busy


def _built(comm: TorchComm, job: TrainJob, config: ModelConfig) -> tuple[ParallelEngine, Updater]:
    engine = ParallelEngine(job, check_split(job, config.shape()), PlaceholderWeights(config), comm)
    updater = table("optimizer").build(job.optimizer).build(engine.sharded.owned())
    return engine, updater


def time_plans(
    comm: TorchComm,
    *,
    jobs: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    rounds: int,
    turns: int,
) -> list[list[float]]:
    """Seconds of training steps of every plan, on this rank.

    Args:
        comm: all ranks.
        jobs: the plans' jobs.
        config: the model.
        rounds: steps of a plan in a row, after one that is not timed.
        turns: how often all plans are gone through, forward and backward in turn.

    Returns:
        By plan, seconds of its steps.
    """
    from shoal.model.config import ModelConfig

    keep_freed_memory()
    model = ModelConfig.model_validate(config)
    plans = [TrainJob.model_validate(job) for job in jobs]
    times: list[list[float]] = [[] for _ in plans]
    built = [_built(comm, plan, model) for plan in plans]
    for turn in range(turns):
        for at in list(range(len(plans)))[:: -1 if turn % 2 else 1]:
            engine, updater = built[at]
            for number in range(rounds + 1):
                rows = _rows(plans[at], model.vocab_size, number, engine)
                comm.barrier()
                begin = time.perf_counter()
                _step(engine, updater, rows)
                comm.barrier()
                if number:
                    times[at].append(time.perf_counter() - begin)
    return times


def run_with_replan(
    comm: TorchComm,
    *,
    job: Mapping[str, Any],
    plans: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    machine: Mapping[str, Any],
    profile: Mapping[str, Any],
    steps: int,
    signal: str,
) -> dict[str, Any]:
    """Train with one plan, and with others when they are better, if the job allows it.

    Args:
        comm: all ranks.
        job: what the run begins with.
        plans: what it may go over to.
        config: the model.
        machine: what was planned for.
        profile: what was measured of the layers.
        steps: how many.
        signal: file in which the first rank writes each step that has ended.

    Returns:
        ``seconds`` and ``losses`` of every step, ``changes``: step, microbatch and degrees of what
        the run went over to, ``moved_bytes`` and ``moved_s``.
    """
    from shoal.model.config import ModelConfig

    keep_freed_memory()
    model = ModelConfig.model_validate(config)
    now = TrainJob.model_validate(job)
    engine, updater = _built(comm, now, model)
    replanner = None
    if now.replan.enabled:
        replanner = Replanner(
            now,
            Machine.model_validate(machine),
            model.shape(),
            comm,
            profile=LayerProfile.model_validate(profile),
            plans=[TrainJob.model_validate(plan) for plan in plans],
        )
    seconds, losses = [], []
    changes: list[dict[str, Any]] = []
    for step in range(steps):
        comm.barrier()
        begin = time.perf_counter()
        loss, busy = _step(engine, updater, _rows(now, model.vocab_size, step, engine))
        total = torch.tensor([loss], dtype=torch.float64)
        comm.all_reduce(total, tag="loss").wait()
        own = time.perf_counter() - begin
        change = replanner.observe(own, busy) if replanner is not None else None
        if change is not None and replanner is not None:
            before = time.perf_counter()
            engine, updater, sent = switch_engine(engine, updater, change.job, comm)
            now = change.job
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
        losses.append(float(total) / (now.global_batch * now.seq_len))
        if comm.rank == 0:
            write_json(Path(signal), {"step": step})
    return {"seconds": seconds, "losses": losses, "changes": changes}

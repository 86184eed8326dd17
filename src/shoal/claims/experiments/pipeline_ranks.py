"""What ranks that are processes do for claims about pipelines: steps in turn, and peak memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.claims.ranks import in_turn, on_ranks, slowest
from shoal.ir.schedule import Event, Op
from shoal.machine import host
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm


class JobSteps(NamedTuple):
    """Seconds of steps by job and round, of the slowest rank; passes of the last of all ranks."""

    seconds: list[tuple[float, ...]]
    events: list[list[Event]]


def time_steps(jobs: Sequence[TrainJob], config: ModelConfig, *, pairs: int, seed: int) -> JobSteps:
    """Time steps of several jobs in turn, on the same processes, one thread each.

    A step is forward and backward passes, sums of gradients included, the optimizer not.
    """
    ranks = on_ranks(
        f"{__name__}:steps_in_turn",
        jobs[0].parallel.world,
        timeout_s=60.0 + 20.0 * pairs,
        jobs=list(jobs),
        config=config,
        pairs=pairs,
        seed=seed,
    )
    names = [str(at) for at in range(len(jobs))]
    events = [
        [
            Event(number, Op(*op), begin, end)
            for number, rank in enumerate(ranks)
            for op, begin, end in rank["events"][name]
        ]
        for name in names
    ]
    return JobSteps([slowest([rank["seconds"] for rank in ranks], name) for name in names], events)


def peak_memory(job: TrainJob, config: ModelConfig, *, steps: int = 3) -> list[int]:
    """Most bytes that the process of each rank ever had, training with this job alone."""
    target, world = f"{__name__}:peak_of_steps", job.parallel.world
    return on_ranks(target, world, timeout_s=300.0, job=job, config=config, steps=steps)


def steps_in_turn(
    comm: TorchComm, *, jobs: Sequence[TrainJob], config: ModelConfig, pairs: int, seed: int
) -> dict[str, dict[str, Any]]:
    """One rank of :func:`time_steps`: by job, seconds of its steps and its last passes."""
    from shoal.claims.lab.measure_passes import batch
    from shoal.claims.lab.session import RankSession

    keep_freed_memory()
    sessions = {str(at): RankSession(comm, job, config) for at, job in enumerate(jobs)}
    rows = {name: batch(one.job, config.vocab_size) for name, one in sessions.items()}
    seconds = in_turn(
        comm,
        {
            name: lambda name=name, one=one: one.passes(rows[name], record=True)  # type: ignore[misc]
            for name, one in sessions.items()
        },
        pairs,
        warmup=2,
        ready=lambda name: sessions[name].clear(),
        seed=seed,
    )
    events = {
        name: [(event.op, event.start, event.end) for event in one.engine.runtime.events or []]
        for name, one in sessions.items()
    }
    return {"seconds": seconds, "events": events}


def peak_of_steps(comm: TorchComm, *, job: TrainJob, config: ModelConfig, steps: int) -> int:
    """One rank of :func:`peak_memory`."""
    from shoal.claims.lab.measure_passes import batch
    from shoal.claims.lab.session import RankSession

    session, rows = RankSession(comm, job, config), batch(job, config.vocab_size)
    for _ in range(steps):
        session.clear()
        session.passes(rows, record=True)
        session.updater.step(1.0)
    return host.peak_memory()


def profile(events: Sequence[Event], *, title: str) -> str:
    """Where a rank's time goes: seconds in passes by kind, and the rest, which is waiting."""
    lines = [title]
    for rank in sorted({event.rank for event in events}):
        mine = [event for event in events if event.rank == rank]
        end = max(event.end for event in mine)
        kinds = sorted({event.op.kind for event in mine})
        spent = {k: sum(e.end - e.start for e in mine if e.op.kind == k) for k in kinds}
        parts = ", ".join(f"{kind} {1e3 * spent[kind]:.1f} ms" for kind in kinds)
        waits = end - float(np.sum(list(spent.values())))
        lines.append(f"rank {rank}: {1e3 * end:.1f} ms = {parts}, waiting {1e3 * waits:.1f} ms")
    return "\n".join(lines)

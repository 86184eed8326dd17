"""What ranks that are processes do for claims about pipelines: steps in turn, and peak memory."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal.core.parts import table
from shoal.core.random import generator
from shoal.ir import TrainJob
from shoal.ir.schedule import Event, Op
from shoal.machine import host
from shoal.parallel.comm.processes import run_processes
from shoal.parallel.legal import check_split
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shoal.model.config import ModelConfig
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.parallel.engine import ParallelEngine
    from shoal.parallel.tensor.rows import ReplicaSequences
    from shoal.train.protocols import Updater

__all__ = ["JobSteps", "peak_memory", "peak_of_steps", "profile", "steps_in_turn", "time_steps"]

_WARMUP = 2


class JobSteps(NamedTuple):
    """Steps of several jobs, taken in turn.

    Args:
        seconds: by job, of its steps by round: of the slowest rank, from a common start.
        events: by job, the passes of its last step, of all ranks.
    """

    seconds: list[tuple[float, ...]]
    events: list[list[Event]]


def time_steps(jobs: Sequence[TrainJob], config: ModelConfig, *, pairs: int, seed: int) -> JobSteps:
    """Time training steps of several jobs in turn, on the same processes, one thread each.

    A step is forward and backward passes, sums of gradients included, the optimizer not.

    Args:
        jobs: of one number of ranks.
        config: the model.
        pairs: steps of each job, in an order that changes from round to round.
        seed: of the order.
    """
    given = {
        "jobs": [job.model_dump(mode="json") for job in jobs],
        "config": config.model_dump(mode="json"),
        "pairs": pairs,
        "seed": seed,
    }
    processes = run_processes(
        f"{__name__}:steps_in_turn", jobs[0].parallel.world, given, timeout_s=60.0 + 20.0 * pairs
    )
    each = range(len(jobs))
    return JobSteps(
        [
            tuple(map(max, zip(*(rank["seconds"][at] for rank in processes), strict=True)))
            for at in each
        ],
        [
            [
                Event(number, Op(*op), begin, end)
                for number, rank in enumerate(processes)
                for op, begin, end in rank["events"][at]
            ]
            for at in each
        ],
    )


def peak_memory(job: TrainJob, config: ModelConfig, *, steps: int = 3) -> list[int]:
    """Most bytes that the process of each rank ever had in memory, training with this job alone.

    Args:
        job: whose optimizer makes the steps.
        config: the model.
        steps: how many.
    """
    given = {
        "job": job.model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
        "steps": steps,
    }
    processes = run_processes(
        f"{__name__}:peak_of_steps", job.parallel.world, given, timeout_s=300.0
    )
    return [int(nbytes) for nbytes in processes]


def steps_in_turn(
    comm: TorchComm,
    *,
    jobs: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    pairs: int,
    seed: int,
) -> dict[str, list[Any]]:
    """One rank of :func:`time_steps`: by job, seconds of its steps and its last passes."""
    keep_freed_memory()
    engines = [_engine(comm, job, config) for job in jobs]
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(-_WARMUP, pairs):
        order = generator(seed, purpose="steps in turn", step=turn + _WARMUP)
        for at in order.permutation(len(jobs)):
            engine, rows = engines[at]
            _clear(engine)
            comm.barrier()
            begin = time.perf_counter()
            _step(engine, rows)
            comm.barrier()
            if turn >= 0:
                times[at].append(time.perf_counter() - begin)
    events = [
        [(event.op, event.start, event.end) for event in engine.runtime.events or []]
        for engine, _ in engines
    ]
    return {"seconds": times, "events": events}


def peak_of_steps(
    comm: TorchComm, *, job: Mapping[str, Any], config: Mapping[str, Any], steps: int
) -> int:
    """One rank of :func:`peak_memory`."""
    engine, rows = _engine(comm, job, config)
    updater: Updater = table("optimizer").build(engine.job.optimizer).build(engine.sharded.owned())
    for _ in range(steps):
        _clear(engine)
        _step(engine, rows)
        updater.step(1.0)
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


def _engine(
    comm: TorchComm, job: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[ParallelEngine, ReplicaSequences]:
    from shoal.claims.lab.measure_passes import PlaceholderWeights, batch
    from shoal.model.config import ModelConfig
    from shoal.parallel.engine import ParallelEngine

    model = ModelConfig.model_validate(config)
    named = TrainJob.model_validate(job)
    engine = ParallelEngine(
        named, check_split(named, model.shape()), PlaceholderWeights(model), comm
    )
    return engine, batch(named, model.vocab_size)


def _clear(engine: ParallelEngine) -> None:
    for parameter in engine.local.parameters():
        parameter.grad = None


def _step(engine: ParallelEngine, rows: ReplicaSequences) -> None:
    size = engine.job.microbatch or len(rows.inputs)
    engine.backward(rows, size, rows.targets.numel(), record=True)
    engine.finish()

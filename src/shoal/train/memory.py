"""The in-memory level of a run's checkpoints: who starts it, fills it and goes on from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory.layout import coding_groups
from shoal.core.errors import ConfigError, require
from shoal.core.meter import SINKS, Meter

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.fleet import Fleet
    from shoal.checkpoint.inmemory.recovery import InMemory
    from shoal.checkpoint.inmemory.snapshot import Snapshots
    from shoal.ir import TrainJob
    from shoal.train.layout import RunDir
    from shoal.train.loop import Trainer

__all__ = ["check_memory", "memory_level", "recovered", "snapshots_of", "version_in_memory"]

_REPLICAS = ("dp", "cp")


def check_memory(job: TrainJob) -> None:
    """Refuse an in-memory level that the job's ranks cannot have.

    Raises:
        ConfigError: too few replicas for the code, or a setting that it does not go with.
    """
    choice = job.checkpoint.memory
    if choice is None:
        return
    code = MEMORY_CODES.build(choice, where="checkpoint.memory")
    for ranks in job.parallel.attention().groups(*_REPLICAS):
        for group in coding_groups(
            ranks, group=code.group, ranks_per_node=code.ranks_per_node
        ):
            code.check(len(group))
    require(
        not job.replan.enabled,
        "replan.enabled",
        True,
        expected="false with checkpoint.memory: who keeps what is fixed for a start",
    )


@contextlib.contextmanager
def memory_level(job: TrainJob, directory: RunDir) -> Iterator[Fleet | None]:
    """The snapshot processes of a run on this host while the block lasts; None without a level."""
    if job.checkpoint.memory is None:
        yield None
        return
    from shoal.checkpoint.inmemory.fleet import Fleet

    with Fleet(directory.ranks, job.parallel.world) as fleet:
        yield fleet


def recovered(level: Fleet, directory: RunDir) -> dict[str, Any]:
    """Climb the ladder after a failure; what was found becomes an event of the run.

    Raises:
        ShoalError: the snapshot processes cannot be reached or replaced.
    """
    found = level.recover()
    with Meter([SINKS.build({"name": "jsonl", "path": str(directory.events)})]) as meter:
        meter.event("recover", **found._asdict())
    return {"kind": "recover", **found._asdict()}


def snapshots_of(trainer: Trainer) -> Snapshots:
    """What takes the snapshots of this rank.

    Raises:
        ConfigError: nobody has started the snapshot processes.
        RankError: they do not answer.
    """
    from shoal.checkpoint.inmemory.snapshot import Snapshots, members

    found = members()
    choice = trainer.job.checkpoint.memory
    if found is None or choice is None:
        raise ConfigError(
            "checkpoint.memory: no snapshot processes were started for this rank; start the "
            "ranks with shoal train"
        )
    group = trainer.engine.ranks.data
    return Snapshots(
        *found,
        rank=trainer.comm.rank,
        replicas=group.ranks,
        choice=choice,
        exchange=lambda data: _exchanged(trainer, data),
    )


def _exchanged(trainer: Trainer, data: bytes) -> list[bytes]:
    """What every replica gave, of whatever length."""
    import torch

    comm = trainer.engine.ranks.data
    length = torch.tensor([len(data)], device=trainer.device)
    lengths = length.new_empty(comm.world)
    comm.all_gather(lengths, length, tag="snapshot").wait()
    sizes = [int(size) for size in lengths.tolist()]
    mine = torch.frombuffer(bytearray(data.ljust(max(sizes))), dtype=torch.uint8)
    mine = mine.to(trainer.device)
    out = mine.new_empty(comm.world * max(sizes))
    comm.all_gather(out, mine, tag="snapshot").wait()
    rows = out.view(comm.world, -1).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def version_in_memory() -> InMemory | None:
    """The version that the snapshot processes were brought to; None if there is none."""
    from shoal.checkpoint.inmemory.recovery import InMemory
    from shoal.checkpoint.inmemory.snapshot import members

    found = members()
    if found is None or found[0].restore is None:
        return None
    return InMemory(*found, found[0].restore)

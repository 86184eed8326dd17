"""A rank that saves after every step in one of three ways, in turn, for claim [62] InMemoryFT.

The ordinary worker with a loop of its own: not saved, to the snapshot processes, to the disk with
``torch.distributed.checkpoint.save``. Rank 0 writes the seconds of each.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.files import write_json
from shoal.core.janitor import leave
from shoal.ir.hooks import StepHook

if TYPE_CHECKING:
    from shoal.train.loop import RankTrainer

MODES = ("none", "memory", "disk")
# Steps until optimizer state exists, memory is mapped and threads are warm.
WARM = 6


def main() -> int:
    """Run all steps of the plan."""
    from shoal.checkpoint.inmemory.snapshot import SnapshotCost
    from shoal.train import worker
    from shoal.train.layout import RunDir
    from shoal.train.memory import snapshots_of
    from shoal.train.state import held_by

    directory = RunDir(Path(sys.argv[1]))
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    settled: list[SnapshotCost | None] = []

    class Settles(StepHook):
        kind = "saves"

        def changing(self, names: Collection[str] | None) -> None:
            settled.append(memory.settle())

    with worker.joined(directory) as rank:
        trainer = rank.trainer
        memory = snapshots_of(trainer)
        trainer.hooks.add(Settles())
        for step in range(rank.total):
            mode = MODES[step % len(MODES)]
            rank.comm.barrier()
            began = time.perf_counter()
            if mode == "memory":
                memory.begin(step, held_by(trainer.engine, trainer.updater), {"step": step})
            trainer.step(step)
            if mode == "disk":
                _to_disk(trainer, directory.root / "disk")
            rank.comm.barrier()
            if step >= WARM:
                times[mode].append(time.perf_counter() - began)
            if mode == "disk" and rank.chief:
                shutil.rmtree(directory.root / "disk")
        if rank.chief:
            done = [one._asdict() for one in settled if one is not None]
            write_json(directory.root / "times.json", {"seconds": times, "settled": done})
    return 0


def _to_disk(trainer: RankTrainer, place: Path) -> None:
    """Save everything, flushed to the disk, before the next step may begin."""
    from torch.distributed.checkpoint.state_dict_saver import save

    from shoal.train.state import held_by

    state: dict[str, Any] = {
        name: piece.tensor
        for name, pieces in held_by(trainer.engine, trainer.updater).items()
        for piece in pieces
    }
    save(state, checkpoint_id=str(place))


if __name__ == "__main__":
    leave(main())

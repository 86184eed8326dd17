"""What one recorded operation costs, for claim [81] MegaScale."""

from __future__ import annotations

import time
from typing import Any, cast

from shoal.core.scratch import scratch_directory
from shoal.train.watch.recorder import Recorder
from shoal.train.watch.watched_comm import WatchedComm

__all__ = ["operation_s"]

_TIMES = 5000
_ROUNDS = 5


class _Nothing:
    """A communicator, and a tensor, without anything behind it."""

    rank, world, ranks, ranks_per_node, device, meter, nbytes = 0, 2, (0, 1), None, "cpu", None, 4

    def all_reduce(self, x: object, *, tag: str, op: str = "sum") -> _Nothing:
        """Nothing."""
        return self

    def wait(self) -> None:
        """Nothing."""


def operation_s() -> float:
    """Seconds more that an operation takes where it is recorded, waiting included."""
    bare: Any = _Nothing()
    with scratch_directory("recorder") as folder:
        recorder = Recorder(folder / "rank-0.flight", 0, 2)
        watched = cast("Any", WatchedComm(bare, recorder))

        def once(comm: Any) -> float:
            begin = time.perf_counter()
            for _ in range(_TIMES):
                comm.all_reduce(bare, tag="probe").wait()
            return (time.perf_counter() - begin) / _TIMES

        seconds = min(once(watched) for _ in range(_ROUNDS)) - min(
            once(bare) for _ in range(_ROUNDS)
        )
        recorder.close()
    return seconds

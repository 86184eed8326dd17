"""What meetings cost ranks that share the cores of one host.

More ranks than cores take turns. A sum over them then waits not only for its bytes but for every
rank to be given a core, so it costs more than its latency and bandwidth say; how much more
depends on how long the ranks compute in between. Both are measured here as a training step has
them: ranks that each compute for a while and then sum.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal.core.errors import MachineError, MissingExtraError, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.protocols import Context
from shoal.machine.worker import Worker

__all__ = ["Crowd"]

# Seconds of computing between two meetings, on a core of its own.
_BURSTS = (2e-4, 1e-3, 5e-3)


@part
class Crowd:
    """Sums and meetings of more ranks than cores.

    Args:
        ranks: how many; 0 for twice the cores, at most 4.
        sizes: bytes of the sums.
        repeats: samples; 0 for 5 (fast) or 15.
    """

    ranks: int = 0
    sizes: tuple[int, ...] = (1024, 2**18, 2**24)
    repeats: int = 0

    def __post_init__(self) -> None:
        require(
            self.ranks == 0 or 2 <= self.ranks <= 64,
            "probe.crowd.ranks",
            self.ranks,
            expected="2 to 64, or 0 to choose",
        )
        require(
            len(self.sizes) > 0 and all(size >= 4 for size in self.sizes),
            "probe.crowd.sizes",
            self.sizes,
            expected="at least one, each 4 bytes or more",
        )
        require(self.repeats >= 0, "probe.crowd.repeats", self.repeats, expected="0 or more")

    def run(self, context: Context) -> list[Measurement]:
        """Quantities ``all_reduce`` (s, at bytes) and ``meeting`` (s, at seconds computed).

        A meeting is what a sum of 1 KiB after so much computing costs beyond the computing of
        all ranks in turns. The note of each measurement names the ranks.
        """
        repeats = self.repeats or (5 if context.fast else 15)
        world = self.ranks or min(4, 2 * len(host.cpus()))
        workers: list[Worker] = []
        try:
            first = context.worker()
            first.call("hello")
            workers = [Worker() for _ in range(world - 1)]
            everyone = [first, *workers]
            with tempfile.TemporaryDirectory(prefix="shoal-") as place:
                for rank, worker in enumerate(everyone):
                    worker.send(
                        "crowd",
                        rank=rank,
                        world=world,
                        store=str(Path(place) / "store"),
                        sizes=list(self.sizes),
                        bursts=list(_BURSTS),
                        repeats=repeats,
                    )
                answers = [worker.receive() for worker in everyone]
        except (MissingExtraError, MachineError) as cause:
            context.skip("crowd", str(cause))
            return []
        finally:
            for worker in workers:
                worker.close()
        crowding = max(1.0, world / len(host.cpus()))
        note = f"{world} ranks"
        found = []
        for size in self.sizes:
            # A collective is done when its last rank is done.
            took = _slowest(answers, f"all_reduce {size}")
            found.append(context.measured("crowd", "all_reduce", "s", took, at=size, note=note))
        for burst in _BURSTS:
            alone = [a[f"alone {burst}"][0] for a in answers]
            share = crowding * sum(alone) / len(alone)
            beyond = [max(0.0, t - share) for t in _slowest(answers, f"meeting {burst}")]
            found.append(context.measured("crowd", "meeting", "s", beyond, at=burst, note=note))
        return found


def _slowest(answers: list[dict[str, list[float]]], name: str) -> list[float]:
    return [max(all_ranks) for all_ranks in zip(*(a[name] for a in answers), strict=True)]

"""V-Half: two chunks a rank in the shape of a V, and half the activations of 1F1B.

Every micro-batch repeats one building block, a fixed place in time for each of its passes on each
rank, six unit passes after the micro-batch before. How long a block holds activations is then how
much memory a rank needs: at most ``pp + 2`` halves of a rank's layers, where 1F1B needs ``2 pp``.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024; the offsets as given by
Yeung et al., Vocabulary Parallelism, 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Schedule
from shoal.plan.schedules.blocks import PERIOD, ScheduleBlock, repeated
from shoal.plan.schedules.common import boundary_estimate, check_numbers, vee

__all__ = ["VHalf"]


@part
class VHalf:
    """Building blocks in the order of their time; idle places close up when it runs."""

    traits: ClassVar[frozenset[str]] = frozenset({"several_stages", "splits_backward"})
    chunks: ClassVar[int | None] = 2

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """Where a rank has two equal chunks, and no ranks share sequences."""
        split = work.job.parallel
        if split.cp == 1 and work.shape.num_layers % (2 * split.pp) == 0:
            yield cls(), 2

    def build(self, pp: int, microbatches: int, vpp: int = 2) -> Schedule:
        """Passes of rank r sorted by the block's offset plus six times the micro-batch."""
        check_numbers("vhalf", pp, microbatches, vpp, self.chunks)
        gap = 3 if pp % 2 == 0 else 0

        def block(rank: int) -> ScheduleBlock:
            up = 3 * pp + gap + 2 * rank - 1
            return ScheduleBlock(2 * rank, 3 * pp - rank - 2, up, 6 * pp + gap - rank - 2)

        return repeated("vhalf", pp, microbatches, block)

    def bubble(self, pp: int, microbatches: int, vpp: int = 2) -> float:
        """About ``7 pp / 2`` of the units that F, I and W take each, where 1F1B has ``6 pp``.

        With one micro-batch ``4 (pp - 1)`` are idle; further ones take one each, and with an even
        ``pp`` the wider block gives two back.
        """
        wider = 2 if pp % 2 == 0 and microbatches > 1 else 0
        idle = max(7 * (pp - 1) // 2 + wider, 4 * (pp - 1) + 1 - microbatches + wider)
        return idle / (PERIOD * microbatches)

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``pp + 2`` chunks of half a rank."""
        return min((pp + 2) / 2, float(microbatches))

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of the boundaries of both chunks; the turn of the V stays on its rank."""
        return boundary_estimate(work, machine, vee(work.job.parallel.pp))

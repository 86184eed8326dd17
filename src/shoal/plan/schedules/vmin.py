"""V-Min: two chunks a rank in the shape of a V, and a third of the activations of 1F1B.

Every pass follows its neighbour's at once, forward and backward, so a block is as short as it can
be. Where F, I and W are equally long the bubble is about two thirds of 1F1B's; it grows faster than
that of others where they are not, since nothing is in flight that could fill it.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
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

__all__ = ["VMin"]


@part
class VMin:
    """Building blocks that go down, up, down and up again without a stop."""

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
        check_numbers("vmin", pp, microbatches, vpp, self.chunks)
        gap = _gap(pp)

        def block(rank: int) -> ScheduleBlock:
            return ScheduleBlock(
                rank, 2 * pp - 1 - rank, 2 * pp + gap + rank, 4 * pp + gap - 1 - rank
            )

        return repeated("vmin", pp, microbatches, block)

    def bubble(self, pp: int, microbatches: int, vpp: int = 2) -> float:
        """``4 pp - 5`` of the units that F, I and W take each, and the gap of its blocks."""
        if pp == 1:
            return 0.0
        gap = _gap(pp) if microbatches > 1 else 0
        return (4 * pp - 5 + gap) / (PERIOD * microbatches)

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """About ``2 pp / 3`` chunks of half a rank, always an even number."""
        return float(min((pp + 4) // 3, microbatches))

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of the boundaries of both chunks; the turn of the V stays on its rank."""
        return boundary_estimate(work, machine, vee(work.job.parallel.pp))


def _gap(pp: int) -> int:
    """Units between forwards and backwards, without which two passes fall on one place."""
    return 2 if pp % 3 == 0 else 0

"""V-Min: two chunks a rank in the shape of a V, and a third of the activations of 1F1B.

Every pass follows its neighbour's at once, forward and backward, so a block is as short as it can
be. Where F, I and W are equally long the bubble is about two thirds of 1F1B's; it grows faster than
that of others where they are not, since nothing is in flight that could fill it.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024.
"""

from __future__ import annotations

from shoal.core.parts import part
from shoal.ir.schedule import Schedule
from shoal.plan.schedules.blocks import PERIOD, ScheduleBlock, repeated
from shoal.plan.schedules.common import VShaped, check_numbers


@part
class VMin(VShaped):
    """A V-shaped schedule with about a third of the activation memory of 1F1B."""

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


def _gap(pp: int) -> int:
    """Units between forwards and backwards, without which two passes fall on one place."""
    return 2 if pp % 3 == 0 else 0

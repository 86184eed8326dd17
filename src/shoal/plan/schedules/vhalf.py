"""V-Half: two chunks a rank in the shape of a V, and half the activations of 1F1B.

Every micro-batch repeats one building block, a fixed place in time for each of its passes on each
rank, six unit passes after the micro-batch before. How long a block holds activations is then how
much memory a rank needs: at most ``pp + 2`` halves of a rank's layers, where 1F1B needs ``2 pp``.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024; the offsets as given by
Yeung et al., Vocabulary Parallelism, 2024.
"""

from __future__ import annotations

from shoal.core.parts import part
from shoal.ir.schedule import Schedule
from shoal.plan.schedules.blocks import PERIOD, ScheduleBlock, repeated
from shoal.plan.schedules.common import VShaped, check_numbers


@part
class VHalf(VShaped):
    """A V-shaped schedule with about half the activation memory of 1F1B."""

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

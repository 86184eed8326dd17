"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks, 2018.
"""

from __future__ import annotations

from shoal.core.parts import part
from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules.common import OneStage, check_numbers


@part
class GPipe(OneStage):
    """All forward passes, then all backward passes; activations of all micro-batches are held."""

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Backwards go from the last micro-batch to the first."""
        check_numbers("gpipe", pp, microbatches, vpp, self.chunks)
        programs = tuple(
            tuple(Op("F", rank, mb) for mb in range(microbatches))
            + tuple(Op("B", rank, mb) for mb in reversed(range(microbatches)))
            for rank in range(pp)
        )
        return Schedule("gpipe", programs, tuple(range(pp)), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``(pp - 1) / microbatches``."""
        return (pp - 1) / microbatches

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """All of them."""
        return float(microbatches)

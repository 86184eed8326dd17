"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks, 2018.
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.ir.estimate import Estimate, Interval
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Op, Schedule

__all__ = ["GPipe"]


@part
class GPipe:
    """Every rank holds the activations of all micro-batches when the backwards begin."""

    chunks: ClassVar[int | None] = 1

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Backwards go from the last micro-batch to the first."""
        require(vpp == 1, "parallel.vpp", vpp, expected="1 with schedule gpipe", error=PlanError)
        programs = tuple(
            tuple(Op("F", rank, mb) for mb in range(microbatches))
            + tuple(Op("B", rank, mb) for mb in reversed(range(microbatches)))
            for rank in range(pp)
        )
        return Schedule("gpipe", programs, tuple(range(pp)), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``(pp - 1) / microbatches``."""
        return (pp - 1) / microbatches

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Nothing beyond the bubble and the transfers that every pipeline has."""
        return Estimate(step_s=Interval(value=0.0, low=0.0, high=0.0))

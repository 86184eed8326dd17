"""1F1B: one forward, one backward, so that a rank holds no more micro-batches than stages follow.

Source: Narayanan et al., PipeDream, 2019; the flushing form of Narayanan et al., 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from shoal.core.parts import part
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules.common import OneStage, check_numbers


@part
class OneFOneB(OneStage):
    """Warm-up forwards, one for each later stage; then forward and backward passes alternate."""

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """Of every pipeline."""
        yield cls(), 1

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Rank r runs ``pp - 1 - r`` forwards ahead."""
        check_numbers("1f1b", pp, microbatches, vpp, self.chunks)
        ops = []
        for rank in range(pp):
            ahead = min(pp - 1 - rank, microbatches)
            program = [Op("F", rank, mb) for mb in range(ahead)]
            for mb in range(microbatches):
                if mb + ahead < microbatches:
                    program.append(Op("F", rank, mb + ahead))
                program.append(Op("B", rank, mb))
            ops.append(tuple(program))
        return Schedule("1f1b", tuple(ops), tuple(range(pp)), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``(pp - 1) / microbatches``."""
        return (pp - 1) / microbatches

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """One for each rank."""
        return float(min(pp, microbatches))

"""ZB-H1: the backward in two halves, so that weight gradients fill what 1F1B leaves idle.

Only the gradient of a stage's input (``I``) is waited for by the stage before; the gradient of
its weights (``W``) may come later. Rank r puts it off by r micro-batches: every rank then holds
``pp`` micro-batches, which is what rank 0 of 1F1B holds, and two thirds of the bubble are gone.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules.common import OneStage, check_numbers, looped


@part
class ZeroBubbleH1(OneStage):
    """1F1B that computes weight gradients later, to fill the bubble at the end."""

    traits: ClassVar[frozenset[str]] = frozenset({"splits_backward"})

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """Where no ranks share sequences."""
        if work.job.parallel.cp == 1:
            yield cls(), 1

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Rank r runs ``pp - 1 - r`` forwards ahead and ``r`` weight gradients behind."""
        check_numbers("zb_h1", pp, microbatches, vpp, self.chunks)
        programs = []
        for rank in range(pp):
            ahead = min(pp - 1 - rank, microbatches)
            program = [Op("F", rank, mb) for mb in range(ahead)]
            for mb in range(microbatches):
                if mb + ahead < microbatches:
                    program.append(Op("F", rank, mb + ahead))
                program.append(Op("I", rank, mb))
                if mb >= rank:
                    program.append(Op("W", rank, mb - rank))
            behind = max(0, microbatches - rank)
            program += [Op("W", rank, mb) for mb in range(behind, microbatches)]
            programs.append(tuple(program))
        return Schedule("zb_h1", tuple(programs), looped(pp, 1), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``(pp - 1) / (3 microbatches)`` where F, I and W take equally long.

        With fewer micro-batches than ranks, ``pp - microbatches`` more thirds are idle.
        """
        return (pp - 1 + max(0, pp - microbatches)) / (3 * microbatches)

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """As 1F1B."""
        return float(min(pp, microbatches))

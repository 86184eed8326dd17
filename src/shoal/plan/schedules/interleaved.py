"""Interleaved 1F1B: several stages a rank, so that the pipeline fills in smaller steps.

Rank r has stages r, r + pp, ...: a forward wave passes a rank ``vpp`` times. The bubble shrinks
by ``vpp``; the bytes between ranks grow by it, and so do the micro-batches in flight.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import ClassVar, Self

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work
from shoal.ir.schedule import Schedule
from shoal.plan.schedules.common import boundary_estimate, check_numbers, looped, passes


@part
class InterleavedSchedule:
    """Groups of ``pp`` micro-batches pass through one chunk after another."""

    traits: ClassVar[frozenset[str]] = frozenset({"groups_of_microbatches", "several_stages"})
    chunks: ClassVar[int | None] = None

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[tuple[Self, int]]:
        """With two and four stages a rank: more have more messages and smaller products.

        No rank lacks more than a block of what the fullest has.
        """
        pp = work.job.parallel.pp
        for chunks in (2, 4):
            if -work.shape.num_layers % (pp * chunks) < pp and work.shape.num_layers >= pp * chunks:
                yield cls(), chunks

    def build(self, pp: int, microbatches: int, vpp: int = 1) -> Schedule:
        """Forward k is of chunk ``k % (g vpp) // g``, micro-batch ``k // (g vpp) g + k % g``.

        The group g is ``pp``; fewer micro-batches than ranks are one group.

        Raises:
            PlanError: ``pp`` does not divide the micro-batches, and they are more.
        """
        check_numbers("interleaved", pp, microbatches, vpp, self.chunks)
        group = min(pp, microbatches)
        require(
            microbatches % group == 0,
            "microbatches",
            microbatches,
            expected=f"a multiple of pp = {pp} with schedule interleaved, such as "
            f"{microbatches // pp * pp} or {-(-microbatches // pp) * pp}; change global_batch, "
            "microbatch or pp, or choose schedule 1f1b",
            error=PlanError,
        )
        order = range(microbatches * vpp)
        chunk = [k % (group * vpp) // group for k in order]
        mbs = [k // (group * vpp) * group + k % group for k in order]
        programs = []
        for rank in range(pp):
            mine = [c * pp + rank for c in range(vpp)]
            forward = passes("F", [mine[c] for c in chunk], mbs)
            backward = passes("B", [mine[vpp - 1 - c] for c in chunk], mbs)
            ahead = min(2 * (pp - rank - 1) + (vpp - 1) * group, len(order))
            steady = len(order) - ahead
            pairs = chain.from_iterable(zip(forward[ahead:], backward[:steady], strict=True))
            programs.append((*forward[:ahead], *pairs, *backward[steady:]))
        return Schedule("interleaved", tuple(programs), looped(pp, vpp), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``(pp - 1) / (vpp microbatches)``; with fewer micro-batches than ranks, more."""
        late = max(0, pp - microbatches) * (vpp - 1)
        return (pp - 1 + late) / (vpp * microbatches)

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """The warm-up of the first rank, in chunks of 1 / vpp."""
        return min(microbatches * vpp, 2 * (pp - 1) + (vpp - 1) * pp + 1) / vpp

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes of every chunk's boundaries: ``vpp`` times those of 1F1B."""
        parallel = work.job.parallel
        return boundary_estimate(work, machine, looped(parallel.pp, parallel.vpp))

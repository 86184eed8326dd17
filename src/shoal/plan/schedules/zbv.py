"""ZB-V: two chunks a rank in the shape of a V, and no bubble where F, I and W are equally long.

Rank 0 has the first and the last stage, rank pp - 1 the two in the middle. The micro-batch that
comes back up is at its loss on rank 0 as soon as rank 0 runs out of forwards; the memory is that
of 1F1B, ``2 pp`` halves of a rank's layers, on every rank.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from __future__ import annotations

from shoal.core.parts import part
from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules.common import VShaped, check_numbers, vee


@part
class ZeroBubbleV(VShaped):
    """A V-shaped placement of two chunks per rank; backward passes run as early as possible."""

    def build(self, pp: int, microbatches: int, vpp: int = 2) -> Schedule:
        """The order of a full pipeline, less the micro-batches that there are not."""
        check_numbers("zbv", pp, microbatches, vpp, self.chunks)
        full = max(2 * pp - 1, microbatches)
        programs = (
            tuple(op for op in _program(pp, full, rank) if op.mb < microbatches)
            for rank in range(pp)
        )
        return Schedule("zbv", tuple(programs), vee(pp), microbatches)

    def bubble(self, pp: int, microbatches: int, vpp: int = 2) -> float:
        """``(pp - 1) / (6 microbatches)`` where F, I and W take equally long.

        Too few micro-batches leave the pipeline half empty: ``4 (pp - 1)`` units are idle with
        one, and two fewer with each further one.
        """
        return max(pp - 1, 4 * (pp - 1) - 2 * (microbatches - 1)) / (6 * microbatches)

    def in_flight(self, pp: int, microbatches: int, vpp: int = 1) -> float:
        """``2 pp`` chunks of half a rank."""
        return float(min(pp, microbatches))


def _program(pp: int, microbatches: int, rank: int) -> list[Op]:
    """Passes of one rank; ``microbatches`` fill the pipeline."""
    stages = (rank, 2 * pp - 1 - rank)
    counts = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}
    program: list[Op] = []

    def do(*what: str) -> None:
        """Each ``kind + chunk`` for its next micro-batch."""
        for word in what:
            kind, chunk = word[0], int(word[1])
            program.append(Op(kind, stages[chunk], counts[kind, chunk]))
            counts[kind, chunk] += 1

    for _ in range(2 * (pp - rank) - 1):  # until the first micro-batch is back from below
        do("F0")
    for _ in range(rank):  # until its gradient is
        do("F1", "F0")
    for _ in range(pp - rank):  # until the gradient of the lower chunk comes as well
        do("F1", "I1", "W1")
    while counts["F", 1] < microbatches:
        if counts["F", 0] < microbatches:
            do("F0")
        do("I0", "W0", "F1", "I1", "W1")
    # No forwards are left: input gradients first, for others wait for them.
    for _ in range(rank):
        do("I0", "I1")
    while counts["I", 0] < microbatches:
        do("I0", "W0")
    while counts["W", 1] < microbatches:
        do("W1")
    while counts["W", 0] < microbatches:
        do("W0")
    return program

"""ByteScale's hybrid data parallelism: every sequence takes as many ranks as it needs.

A sequence of s tokens takes d(s) = ceil(s / C) ranks, any number and any of them; short ones are
computed by one rank without exchange, packed behind each other. With ``offload`` a sequence takes
fewer: the share r of its activations that the host can take while its layers compute needs no
room, so d is the smallest with (1 - r(s, d)) s / d <= C.

Sequences are distributed longest processing time first, by time and not by tokens, since attention
is quadratic: one of d ranks takes the d that are free first. So the short ones of each rank are a
bucket of equal FLOPs with what else it has to do; then they are packed.

Source: Ge et al., ByteScale, 2025, sections 4 and 5; Graham, Bounds on Multiprocessing Timing
Anomalies, 1969.

Differs: short sequences are placed one by one and packed afterwards, where the paper makes buckets
first; ranks are free when they have ended, not by the sum of their loads, since those of a group
wait for the last of them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge

from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Estimate, Machine, Work
from shoal.plan.balance.sequences.assignment import (
    Assignment,
    MicroStep,
    lengths_of,
)
from shoal.plan.balance.sequences.estimated import assigned_estimate
from shoal.plan.balance.sequences.fill import best_fit


@part
class ByteScale:
    """As many ranks as a sequence needs: choose it where few sequences are long.

    Args:
        capacity_tokens: largest number of tokens of a rank in a pass, C.
        offload: auto offloads activations of long sequences to the host, as far as computation
            hides the copies, so that they take fewer ranks.
    """

    capacity_tokens: Annotated[int, Ge(1)] = 8192
    offload: Literal["none", "auto"] = "none"

    def assign(self, lengths: Sequence[int], ranks: int, cost: SequenceCost) -> Assignment:
        capacity = self.capacity_tokens
        if self.offload == "none":
            result = lengths_of(lengths, ranks, capacity, ranks, where="assigner.bytescale")
        else:  # what fits is asked sequence by sequence
            least = max(capacity, max(lengths, default=1))
            result = lengths_of(lengths, ranks, least, ranks, where="assigner.bytescale")
        degrees = -(-result // capacity)
        if self.offload == "auto":
            for number in np.flatnonzero(degrees > 1):
                degrees[number] = self._degree(int(result[number]), ranks, cost, int(number))
        seconds = cost.compute_s(result.astype(np.float64)) / degrees
        # Groups first, while all ranks are about as free; then the slowest first.
        alone = result <= capacity
        order = np.lexsort((np.arange(len(result)), -seconds, alone)).tolist()
        free = [(0.0, rank) for rank in range(ranks)]
        steps = []
        own: list[list[int]] = [[] for _ in range(ranks)]
        for number in order:
            degree = int(degrees[number])
            if alone[number]:
                # A pass of C tokens takes gamma once, so each of them takes its share of it.
                share = cost.fixed_s * result[number] / capacity
                at, rank = free[0]
                heapq.heapreplace(free, (at + float(seconds[number]) + share, rank))
                own[rank].append(number)
                continue
            chosen = [heapq.heappop(free) for _ in range(degree)]
            group = tuple(sorted(rank for _, rank in chosen))
            size = float(result[number])
            end = chosen[-1][0]
            end += cost.sums_s(size * size, size, degree, cost.bandwidth(group), "ring")
            for rank in group:
                heapq.heappush(free, (end, rank))
            ratio = cost.offloaded(int(result[number]), degree) if self.offload == "auto" else 0.0
            steps.append(MicroStep((number,), group, ratio))
        listed = result.tolist()
        for rank, mine in enumerate(own):
            # Distributed by time, they are in falling order of length here.
            buffers = best_fit(mine, listed, capacity)
            steps += [MicroStep(tuple(buffer), (rank,)) for buffer in buffers]
        return Assignment(tuple(listed), ranks, tuple(steps))

    def _degree(self, length: int, ranks: int, cost: SequenceCost, number: int) -> int:
        """The fewest ranks that hold what does not go to the host.

        Raises:
            PlanError: all of them do not; names the smallest group that would.
        """
        capacity = self.capacity_tokens
        for degree in range(1, ranks + 1):
            if (1.0 - cost.offloaded(length, degree)) * length / degree <= capacity:
                return degree
        # The share is that of any number of ranks, which divide both computing and copying.
        share = cost.offloaded(length, ranks)
        left = math.ceil((1.0 - share) * length)
        needed = -(-left // capacity)
        raise PlanError(
            f"assigner.bytescale: sequence {number} = '{length} tokens': expected at most "
            f"{int(ranks * capacity / (1.0 - share))}, which {ranks} ranks hold with {share:.0%} "
            f"of its activations on the host; the smallest group that could has {needed} ranks of "
            f"{capacity} tokens; give {needed} ranks, or a capacity of {-(-left // ranks)} tokens"
        )

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        return assigned_estimate(self, work, machine)

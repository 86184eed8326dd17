"""The same group for every sequence: what systems with fixed degrees do, and the baseline.

Ranks form dp groups of cp neighbours. Sequences are packed into buffers of C * cp tokens, each of
which the cp ranks of a group share, so that keys and values of short sequences travel as those of
long ones do. Buffers are distributed in turn.

Source: Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3 (packing and context
parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from annotated_types import Ge

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.cost.training.sequences import Exchange, SequenceCost
from shoal.ir import Estimate, Machine, Work
from shoal.plan.balance.sequences.assignment import (
    Assignment,
    MicroStep,
    lengths_of,
)
from shoal.plan.balance.sequences.estimated import assigned_estimate
from shoal.plan.balance.sequences.fill import best_fit


@part
class PackedAssigner:
    """Static dp x cp with packing: choose it where sequences have similar lengths.

    Args:
        capacity_tokens: largest number of tokens of a rank in a pass, C.
        cp: ranks that share every buffer, a divisor of the ranks; by default the smallest that
            holds the longest sequence.
        exchange: context-parallel method of these ranks.
    """

    capacity_tokens: Annotated[int, Ge(1)] = 8192
    cp: Annotated[int, Ge(1)] | None = None
    exchange: Exchange = "ring"

    def assign(self, lengths: Sequence[int], ranks: int, cost: SequenceCost) -> Assignment:
        largest = self.cp or max(
            n for n in range(1, ranks + 1) if ranks % n == 0 and cost.legal(n, self.exchange)
        )
        require(
            ranks % largest == 0,
            "assigner.packed.cp",
            self.cp,
            expected=f"a divisor of {ranks} ranks",
            error=PlanError,
        )
        result = lengths_of(lengths, ranks, self.capacity_tokens, largest, where="assigner.packed")
        needed = -(-int(result.max()) // self.capacity_tokens)
        cp = self.cp or next(
            n for n in range(needed, ranks + 1) if ranks % n == 0 and cost.legal(n, self.exchange)
        )
        require(
            cost.legal(cp, self.exchange),
            "assigner.packed.cp",
            cp,
            expected=f"with exchange {self.exchange} a number that shares {cost.heads} heads and "
            f"{cost.kv_heads} key/value heads",
            error=PlanError,
        )
        order = np.argsort(-result, kind="stable").tolist()
        buffers = best_fit(order, result.tolist(), cp * self.capacity_tokens)
        steps = []
        for number, buffer in enumerate(buffers):
            first = number % (ranks // cp) * cp
            steps.append(MicroStep(tuple(buffer), tuple(range(first, first + cp))))
        return Assignment(tuple(result.tolist()), ranks, tuple(steps), self.exchange)

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        return assigned_estimate(self, work, machine)

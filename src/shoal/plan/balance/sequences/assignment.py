"""Which ranks compute which sequences of a batch: what an assigner promises, and what it returns.

A batch of sequences of any lengths becomes a list of *micro-steps*, in one order that all ranks
know. A micro-step is some sequences behind each other and the ranks that share them; a rank does
those that name it, in that order, so ranks of a group always meet in the same micro-step, and none
waits in a circle.

Source: Ge et al., ByteScale, 2025, section 4 (hybrid data parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.cost.training.sequences import Exchange, SequenceCost
from shoal.ir import Estimate, Machine, Work


class MicroStep(NamedTuple):
    """One pass, forward and backward.

    Args:
        sequences: numbers of the sequences, behind each other in one buffer.
        ranks: ranks that share it; the position of a rank in this list determines its slices.
        offloaded: share of the activations that is planned to be on the host meanwhile.
    """

    sequences: tuple[int, ...]
    ranks: tuple[int, ...]
    offloaded: float = 0.0


@dataclass(frozen=True)
class Assignment:
    """What every rank does in one step.

    Args:
        lengths: tokens of each sequence, by number.
        ranks: ranks of the pool.
        steps: micro-steps in the order of all ranks.
        exchange: how the ranks of a micro-step share attention.
    """

    lengths: tuple[int, ...]
    ranks: int
    steps: tuple[MicroStep, ...]
    exchange: Exchange = "ring"

    def of(self, rank: int) -> list[MicroStep]:
        """The micro-steps of one rank."""
        return [step for step in self.steps if rank in step.ranks]

    def check(self) -> None:
        """Refuse an assignment that does not compute every sequence exactly once.

        Raises:
            PlanError: names the sequence or the micro-step.
        """
        seen = [0] * len(self.lengths)
        for number, step in enumerate(self.steps):
            legal = (
                bool(step.ranks and step.sequences)
                and len(set(step.ranks)) == len(step.ranks)
                and all(0 <= rank < self.ranks for rank in step.ranks)
                and all(0 <= one < len(seen) for one in step.sequences)
            )
            require(
                legal,
                f"assignment: micro-step {number}",
                tuple(step[:2]),
                expected=f"some of {len(seen)} sequences, and different ranks below {self.ranks}",
                error=PlanError,
            )
            for one in step.sequences:
                seen[one] += 1
        wrong = next((n for n, times in enumerate(seen) if times != 1), None)
        require(
            wrong is None,
            "assignment",
            f"sequence {wrong} in {seen[wrong or 0] if seen else 0} micro-steps",
            expected="every sequence in exactly one",
            error=PlanError,
        )


class SequenceAssigner(Protocol):
    """A part of kind ``assigner``: deals the sequences of a global batch out to ranks."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one rank holds in a pass, C."""

    def assign(self, lengths: Sequence[int], ranks: int, cost: SequenceCost) -> Assignment:
        """Who computes what.

        Args:
            lengths: tokens of each sequence, at least 1.
            ranks: ranks of the pool.
            cost: of the passes.

        Raises:
            PlanError: a sequence that no group of these ranks can hold, or one without tokens.
        """

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends for shared sequences in a step, and seconds not hidden."""


def lengths_of(
    lengths: Sequence[int], ranks: int, capacity: int, largest: int, *, where: str
) -> np.ndarray:
    """The lengths int64 [n], when ``largest`` ranks together hold each of them.

    Args:
        lengths: tokens of each sequence.
        ranks: ranks of the pool.
        capacity: tokens that one rank holds.
        largest: ranks of the largest group.
        where: names the assigner in errors.

    Raises:
        PlanError: names the sequence, and the smallest group that could hold it.
    """
    require(ranks >= 1, f"{where}: ranks", ranks, expected="at least 1", error=PlanError)
    result = np.asarray(lengths, dtype=np.int64)
    require(len(result) > 0, f"{where}: sequences", 0, expected="at least 1", error=PlanError)
    empty = np.flatnonzero(result < 1)
    if len(empty):
        raise PlanError(
            f"{where}: sequence {empty[0]} has {result[empty[0]]} tokens: expected at least 1; "
            "leave it out"
        )
    longest = int(result.argmax())
    needed = -(-int(result[longest]) // capacity)
    require(
        needed <= largest,
        f"{where}: sequence {longest}",
        f"{result[longest]} tokens",
        expected=f"at most {largest * capacity}, which {largest} of {ranks} ranks hold; the "
        f"smallest group that could has {needed} ranks of {capacity} tokens",
        hint=f"give {needed} ranks, or a capacity of {-(-int(result[longest]) // largest)} tokens",
        error=PlanError,
    )
    return result

"""Seconds of a step of which parts of the contexts are attended to by other instances.

Beside what the step takes, its oldest keys and values cost nothing here and their attention there;
both go on at once, and every layer waits for the later one and for a message out and back.

Source: Lin et al., Infinite-LLM, 2024, section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import require
from shoal.ir import StepCost


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingStepCost:
    """Step time by the location of cache blocks.

    Args:
        cost: cost of a step with all contexts on this instance.
        hop_s: s of a message to a lender and its answer, in one layer.
        block_s: s to copy one block to a lender, all layers together.
    """

    cost: StepCost
    layers: int = 1
    hop_s: float = 0.0
    block_s: float = 0.0

    def __post_init__(self) -> None:
        require(self.layers >= 1, "lent.layers", self.layers, expected="1 or more")
        for name in ("hop_s", "block_s"):
            value = getattr(self, name)
            require(value >= 0, f"lent.{name}", value, expected="0 s or more")

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """See :class:`~shoal.ir.engine.StepCost`: nothing lies elsewhere."""
        return self.cost.seconds(chunks)

    def attend(self, tokens: int) -> float:
        """Seconds that one token's attention to so many others takes, and nothing else."""
        return max(0.0, self.cost.seconds([(tokens, 1)]) - self.cost.seconds([(0, 1)]))

    def spread(
        self, chunks: Sequence[tuple[int, int]], away: Sequence[Mapping[int, int]]
    ) -> tuple[float, dict[int, float]]:
        """Seconds of a step, and what it takes of each lender's time.

        Args:
            chunks: (tokens before it, tokens in it), all tokens counted wherever they lie.
            away: of each chunk, lender -> tokens that lie there.
        """
        gone = [sum(one.values()) for one in away]
        here = self.cost.seconds(
            [(start - far, length) for (start, length), far in zip(chunks, gone, strict=True)]
        )
        if not any(gone):
            return here, {}
        there: dict[int, float] = {}
        for (_, length), parts in zip(chunks, away, strict=True):
            for lender, tokens in parts.items():
                there[lender] = there.get(lender, 0.0) + length * self.attend(tokens)
        nothing = self.cost.seconds([(0, length) for _, length in chunks])
        slowest = max(max(there.values()), here - nothing)
        return nothing + slowest + self.layers * self.hop_s, there

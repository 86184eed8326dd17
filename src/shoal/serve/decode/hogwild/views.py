"""Views: what a worker sees, as blocks in an order that ends in the block it writes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.core.errors import ServeError, require
from shoal.serve.decode.hogwild.blocks import HogwildBlock


@dataclass(frozen=True, slots=True)
class HogwildView:
    """Blocks one behind the other; positions in a view follow from what stands before.

    Args:
        blocks: in order; the last is the writer's own.
        writer: whose view it is.

    Raises:
        ServeError: the writer's own block does not come last, or a block comes twice.
    """

    blocks: tuple[HogwildBlock, ...]
    writer: str | None

    def __post_init__(self) -> None:
        # Views are made in every step: what would be said is put together where it is.
        if not self.blocks or self.blocks[-1].writer != self.writer:
            self._refuse(
                [block.writer for block in self.blocks], "blocks that end in the one it writes to"
            )
        numbers = [block.number for block in self.blocks]
        if len({*numbers}) < len(numbers):
            self._refuse(numbers, "each block once: their positions would overlap")

    def _refuse(self, value: object, expected: str) -> None:
        require(False, f"view of {self.writer}", value, expected=expected, error=ServeError)

    @property
    def own(self) -> HogwildBlock:
        """Where new tokens go."""
        return self.blocks[-1]

    def __len__(self) -> int:
        return sum(map(len, self.blocks))

    def placed(self) -> Iterator[tuple[HogwildBlock, int]]:
        """Blocks that hold something, with the position of their first token."""
        offset = 0
        for block in self.blocks:
            if len(block):
                yield block, offset
                offset += len(block)

    def text(self) -> list[int]:
        """The tokens in order: what a model without blocks would be given."""
        return [token for block in self.blocks for token in block.tokens]


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that a step appends to the own block of a view and computes.

    Args:
        view: what they see, and their own block.
        tokens: one or more.
        yields: scores behind the last of them are wanted.
    """

    view: HogwildView
    tokens: Sequence[int]
    yields: bool = True

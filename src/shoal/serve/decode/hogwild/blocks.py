"""Blocks: the pieces that the contexts of workers are made of.

A block holds tokens that one writer put down in a row. Its keys are rotated as if its first token
stood at position 0, so it can stand anywhere in a context, and at different places in those of
different readers, with nothing computed again.

A block is a row of slot numbers: to give it another place is to name it elsewhere, and to join two
is to join the rows and turn the keys of the second.

Source: Rodionov et al., Hogwild! Inference, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.kernel.kv.common import writer
from shoal.kernel.paged.views import turned
from shoal.model.rope import tables_at
from shoal.model.transformer import Transformer
from shoal.serve.cache.paged import PagedCache


@dataclass(slots=True, eq=False)
class HogwildBlock:
    """Tokens of one writer, whose keys have their own positions.

    Args:
        number: its row in the table of its store.
        writer: who may put tokens down here; None once it is closed.
        tokens: what it holds.
    """

    number: int
    writer: str | None
    tokens: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class BlockStore:
    """The keys and values of blocks, in slots of one token each.

    Args:
        capacity: tokens of all blocks.
        longest: most tokens of a block, and of a context.
        num_blocks: most blocks.

    Raises:
        ServeError: the model's positions are not rotations, or there is no memory.
    """

    def __init__(
        self, model: Transformer, capacity: int, *, longest: int, num_blocks: int = 256
    ) -> None:
        rotation = getattr(model, "unstretched", None)
        require(
            rotation is not None,
            "model",
            type(model).__name__,
            expected="a model with rotary positions",
            hint="blocks change their places, and absolute positions are in every key for good",
            error=ServeError,
        )
        require(
            longest <= model.config.max_position,
            "max_position",
            longest,
            expected=f"at most {model.config.max_position}, the positions of the model",
            error=ServeError,
        )
        weight = model.weight
        self.cache = PagedCache(model.config, capacity, 1, dtype=weight.dtype, device=weight.device)
        self._put = writer(self.cache.device)
        self.capacity, self.longest = capacity, longest
        wide = torch.promote_types(weight.dtype, torch.float32)
        place = torch.arange(longest, device=weight.device)
        # A factor on the rotation is in keys and queries already, once.
        frequencies, _ = model.unstretched
        cos, sin = tables_at(place, frequencies, 1.0, wide)
        self.tables: tuple[Tensor, Tensor] = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        # The slots of each block's tokens, where kernels read them.
        self.slots = np.zeros((num_blocks, longest), dtype=np.int32)
        self._free = list(range(capacity - 1, -1, -1))
        self._numbers = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Tokens that there is room for."""
        return len(self._free)

    def open(self, writer: str | None) -> HogwildBlock:
        """An empty block.

        Raises:
            ServeError: there are too many.
        """
        if not self._numbers:
            raise ServeError(f"{len(self.slots)} blocks are open; close some first")
        return HogwildBlock(self._numbers.pop(), writer)

    def append(self, block: HogwildBlock, tokens: Sequence[int], writer: str | None) -> np.ndarray:
        """Put tokens down; their keys and values go to the slots that are returned.

        Raises:
            ServeError: the block is another's, or there is no room.
        """
        require(
            block.writer == writer,
            f"block {block.number}: writer",
            writer,
            expected=f"{block.writer}, whose block it is",
            hint="give every worker a block of its own",
            error=ServeError,
        )
        start, stop = len(block), len(block) + len(tokens)
        if stop > self.longest or len(tokens) > len(self._free):
            raise ServeError(
                f"block {block.number} of {start} tokens and {len(tokens)} more: expected at most "
                f"{self.longest}, and {len(self._free)} slots are free"
            )
        given = self.slots[block.number, start:stop]
        given[:] = [self._free.pop() for _ in tokens]
        block.tokens += tokens
        return given

    def close(self, block: HogwildBlock) -> None:
        """Give its slots back."""
        self._free += self.slots[block.number, : len(block)].tolist()
        self._numbers.append(block.number)
        block.tokens, block.writer = [], None

    def join(self, first: HogwildBlock, second: HogwildBlock) -> None:
        """Let a block go on with another, which is gone then; nothing is computed by the model."""
        start, stop = len(first), len(first) + len(second)
        moved = self.slots[second.number, : len(second)]
        slots_N = torch.from_numpy(moved.astype(np.int64)).to(self.cache.device)
        by_N = torch.full_like(slots_N, start)
        for layer in range(len(self.cache.stores[0])):
            keys = self.cache.sides(layer)[0][0]
            self._put(keys, slots_N, turned(keys, slots_N, by_N, self.tables))
        self.slots[first.number, start:stop] = moved
        first.tokens += second.tokens
        first.writer = None
        self._numbers.append(second.number)
        second.tokens, second.writer = [], None

    def table(self) -> Tensor:
        """The slots of all blocks [blocks, longest], int32; it stays where it is."""
        return torch.from_numpy(self.slots)

"""The tensors of the paged cache; who holds which block is a :class:`KVManager`'s affair.

Shapes: L layers, S slots, K key/value heads, d head_dim. A slot holds the key and the
value of one token: ``slot = block * block_size + offset``.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.core.sizes import human_bytes
from shoal.ir import Copy
from shoal.kernel.kv.common import writer
from shoal.kernel.kv.plain import Plain
from shoal.kernel.pages import populate
from shoal.kernel.protocols import KVFormat
from shoal.kernel.tensors import name_of
from shoal.model.config import ModelConfig

# Shape, type and device of a tensor -> the tensor, all zeros.
Zeros = Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]

_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def token_bytes(config: ModelConfig, dtype: torch.dtype, form: KVFormat | None = None) -> int:
    """Bytes that one token takes in the cache, over all layers."""
    one = (form or Plain()).token_bytes(config.head_dim, dtype_bytes=dtype.itemsize)
    return math.ceil(config.num_layers * 2 * config.num_kv_heads * one)


class PagedCache:
    """Keys and values [L, 2, S, K, d] in blocks that any request can hold.

    Args:
        dtype: of the keys and values, as the model computes them.
        device: where they live.
        form: how they are kept; as they are, if not given.
        zeros: makes the tensors (of this shape, type and device) in memory of its own.
        slot_blocks: blocks of a slot, where each request lies in one slot; such requests can be
            read where they are. 0 where blocks lie anywhere.

    Raises:
        ServeError: there is no memory for it.
        KernelError: the format cannot hold heads of this size.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        form: KVFormat | None = None,
        zeros: Zeros | None = None,
        slot_blocks: int = 0,
    ) -> None:
        require(
            num_blocks > 0 and block_size > 0,
            "cache",
            (num_blocks, block_size),
            expected="at least one block of at least one token",
            hint="give the cache more memory, or use smaller blocks",
            error=ServeError,
        )
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.dtype, self.device = dtype, torch.device(device)
        self.form: KVFormat = form or Plain()
        self.put = writer(self.device)
        # Tokens in another format are decoded on the way, so they cannot be read in place.
        self.slot_blocks = slot_blocks if isinstance(self.form, Plain) else 0
        slots, heads = num_blocks * block_size, config.num_kv_heads
        # One tensor [L, 2, S, K, numbers] for each that the format stores of a token.
        zeros = zeros or _zeros
        self.stores = [
            zeros((config.num_layers, 2, slots, heads, numbers), _TYPES[kind], self.device)
            for numbers, kind in self.form.layout(config.head_dim, name_of(dtype))
        ]
        self._sides = [
            tuple(tuple(store[layer, side] for store in self.stores) for side in (0, 1))
            for layer in range(config.num_layers)
        ]
        # The same memory by blocks [L, 2, blocks, ...], one row each: whole blocks are copied
        # fastest.
        self.blocks = [store.view(config.num_layers, 2, num_blocks, -1) for store in self.stores]

    def sized(self, num_blocks: int) -> PagedCache:
        """An empty one like this with so many blocks, wherever requests lie in it."""
        return PagedCache(
            self.config, num_blocks, self.block_size,
            dtype=self.dtype, device=self.device, form=self.form,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(store.numel() * store.element_size() for store in self.stores)

    def populate(self, nbytes: int) -> None:
        """Have memory behind the first so many bytes before they are needed, in the background.

        A tensor whose first write must wait for its pages holds up a whole step.
        """
        if self.device.type == "cpu":
            sides = [
                store[layer, side]
                for store in self.stores
                for layer in range(len(store))
                for side in (0, 1)
            ]
            self._populating = populate(sides, nbytes // len(sides))

    def sides(self, layer: int) -> tuple[tuple[Tensor, ...], ...]:
        """Keys and values of all slots of a layer, each the tensors [S, K, ...] of the format."""
        return self._sides[layer]

    def write(self, layer: int, slots_N: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> None:
        """Store new tokens of one layer."""
        for side, new in zip(self._sides[layer], (k_NKd, v_NKd), strict=True):
            for store, coded in zip(side, self.form.encode(new), strict=True):
                self.put(store, slots_N, coded)

    def keep(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy tokens from slots to slots in all layers; all are read before any is written."""
        if not sources:
            return
        source, target = (torch.tensor(one, device=self.device) for one in (sources, targets))
        for store in self.stores:
            store.index_copy_(2, target, store.index_select(2, source))

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to zero in all layers."""
        if not blocks:
            return
        place = torch.tensor(list(blocks), device=self.device)
        for one in self.blocks:
            one.index_fill_(2, place, 0)

    def move(self, copies: Iterable[Copy]) -> None:
        """Copy runs of blocks in all layers; none of them is both read and written."""
        for copy in copies:
            for blocks in self.blocks:
                used = blocks[:, :, copy.source : copy.source + copy.num_blocks]
                blocks[:, :, copy.target : copy.target + copy.num_blocks].copy_(used)

    def slots(self, layer: int, first: int, count: int, longest: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``count`` slots from ``first`` on, each [count, longest, K, d].

        They are views: nothing is copied.
        """
        length = self.slot_blocks * self.block_size
        keys, values = (
            side[0].view(-1, length, *side[0].shape[1:])[first : first + count, :longest]
            for side in self._sides[layer]
        )
        return keys, values

    def gather(self, layer: int, blocks_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens in these blocks, each [B, W * block_size, K, d]."""
        batch, width = blocks_BW.shape
        places = blocks_BW.reshape(-1)
        results = [
            blocks[layer].index_select(1, places).view(2, batch, -1, *store.shape[3:])
            for blocks, store in zip(self.blocks, self.stores, strict=True)
        ]
        if isinstance(self.form, Plain):
            return results[0][0], results[0][1]
        keys, values = (
            self.form.decode(*(tensor[side].flatten(0, 1) for tensor in results)).to(self.dtype)
            for side in (0, 1)
        )
        shape = (batch, width * self.block_size, *keys.shape[1:])
        return keys.view(shape), values.view(shape)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU no page is touched before it is used.

    They must be finite: attention gives padding a weight of 0, and 0 * NaN is NaN.
    """
    try:
        if device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        raw = np.zeros((*size[:-1], size[-1] * dtype.itemsize), dtype=np.uint8)
        return torch.from_numpy(raw).view(dtype)
    except (MemoryError, RuntimeError) as cause:
        total = int(np.prod(size, dtype=np.int64)) * dtype.itemsize
        raise ServeError(
            f"the cache needs {human_bytes(total)}, and {device} has no such room; give a "
            "smaller kv_tokens"
        ) from cause

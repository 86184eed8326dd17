"""The tensors of the paged cache; who holds which block is a :class:`KVManager`'s affair.

Shapes: L layers, S slots, K key/value heads, d head_dim. A slot holds the key and the
value of one token: ``slot = block * block_size + offset``.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.model.config import ModelConfig

__all__ = ["PagedCache", "token_bytes"]


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the cache, over all layers."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


class PagedCache:
    """Keys and values [L, 2, S, K, d] in blocks that any request can hold.

    Args:
        config: the model.
        num_blocks: blocks.
        block_size: tokens of one block.
        dtype: of the keys and values, as the model computes them.
        device: where they live.

    Raises:
        ServeError: there is no memory for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        require(
            num_blocks > 0 and block_size > 0,
            "cache",
            (num_blocks, block_size),
            expected="at least one block of at least one token",
            hint="give the cache more memory, or use smaller blocks",
            error=ServeError,
        )
        self.num_blocks, self.block_size = num_blocks, block_size
        self.dtype, self.device = dtype, torch.device(device)
        size = (
            config.num_layers,
            2,
            num_blocks * block_size,
            config.num_kv_heads,
            config.head_dim,
        )
        self.store = _zeros(size, dtype, self.device)
        # The same memory by blocks, one row each: whole blocks are copied fastest.
        width = block_size * config.num_kv_heads * config.head_dim
        self._blocks = self.store.view(config.num_layers, 2, num_blocks, width)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.store.numel() * self.store.element_size()

    def write(self, layer: int, slots_N: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> None:
        """Store new tokens of one layer."""
        keys, values = self.store[layer]
        keys.index_copy_(0, slots_N, k_NKd)
        values.index_copy_(0, slots_N, v_NKd)

    def gather(self, layer: int, blocks_BW: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens in these blocks, each [B, W * block_size, K, d]."""
        batch, width = blocks_BW.shape
        found = self._blocks[layer].index_select(1, blocks_BW.reshape(-1))
        keys, values = found.view(2, batch, width * self.block_size, *self.store.shape[3:])
        return keys, values


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
            f"the cache needs {total / 2**20:,.0f} MiB, and {device} has no such room; give a "
            "smaller kv_tokens"
        ) from cause

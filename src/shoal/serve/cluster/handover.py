"""Keys and values from one engine's cache to another's, on one host.

The cache of an engine that hands requests over lies in files that the others map into their
memory. The engine that takes a request over copies the slots of its prompt from there into its own
cache, layer by layer, and no other acts: the first engine computes on meanwhile.
Just the tokens of the prompt are copied, so what moves is ``2 L n_kv d dtype`` bytes times their
number.

Shapes: L layers, S slots, K key/value heads, n numbers of a slot, N tokens.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.core.sizes import human_bytes
from shoal.serve.cache.paged import PagedCache


class KVTransfer(Protocol):
    """How the keys and values of a prompt come to this engine."""

    def fetch(
        self, source: int, blocks: Sequence[int], own_blocks: Sequence[int], n_tokens: int
    ) -> int:
        """Copy the first ``n_tokens`` of a request; they are there when it returns.

        Args:
            source: the engine that holds them.
            blocks: where they lie in its cache.
            own_blocks: where they go.
            n_tokens: how many.

        Returns:
            The bytes that were moved.
        """


@dataclass(frozen=True)
class StoreFile:
    """A tensor of a cache, as a file that others can map.

    Args:
        shape: ``[L, 2, S, K, n]``.
        dtype: its type, as numpy spells an unsigned integer or a float of that size.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str

    def pack(self) -> dict[str, Any]:
        """As plain values."""
        return {"path": self.path, "shape": list(self.shape), "dtype": self.dtype}


class SharedStores:
    """Makes the tensors of a cache in files below a directory.

    Args:
        name: what the files start with.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self.files: list[StoreFile] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See :data:`~shoal.serve.cache.paged.Zeros`.

        Raises:
            ServeError: the cache is not in memory that processes can share, or there is no room.
        """
        require(
            device.type == "cpu",
            "disagg",
            str(device),
            expected="a model on CPUs: caches are handed over through memory that processes share",
            hint="serve with one engine, or on CPUs",
            error=ServeError,
        )
        size = math.prod(shape) * dtype.itemsize
        free = shutil.disk_usage(self._directory).free
        # A page that finds no room when it is first written to would kill the process.
        require(
            size < free,
            "kv_tokens: a shared cache",
            human_bytes(size),
            expected=f"less than the {human_bytes(free)} that are free in {self._directory}",
            hint="give a smaller kv_tokens",
            error=ServeError,
        )
        path = self._directory / f"{self._name}.{len(self.files)}"
        file = StoreFile(str(path), shape, str(dtype).removeprefix("torch."))
        self.files.append(file)
        return _mapped(file, "w+")


class MappedCaches:
    """Fetches from the caches of other processes of this host; see :class:`KVTransfer`.

    Args:
        own: where everything goes.
        others: the files of each other engine's cache, and the tokens of its blocks.

    Raises:
        ServeError: a cache that is not of the same model and format.
    """

    def __init__(self, own: PagedCache, others: Sequence[tuple[Sequence[StoreFile], int]]) -> None:
        self._own = own
        self._others: list[tuple[list[Tensor], int]] = []
        mine = [_form(store.shape, store.dtype) for store in own.stores]
        for number, (files, block_size) in enumerate(others):
            theirs = [_form(file.shape, getattr(torch, file.dtype)) for file in files]
            require(
                theirs == mine,
                f"cache of prefill instance {number}",
                theirs,
                expected=f"the form of this one, {mine}",
                hint="give all instances the same model, precision and kv_format",
                error=ServeError,
            )
            self._others.append(([_mapped(file, "r+") for file in files], block_size))

    def fetch(
        self, source: int, blocks: Sequence[int], own_blocks: Sequence[int], n_tokens: int
    ) -> int:
        stores, block_size = self._others[source]
        there_N = _slots(blocks, block_size, n_tokens)
        here_N = _slots(own_blocks, self._own.block_size, n_tokens)
        moved = 0
        with torch.inference_mode():
            for own, other in zip(self._own.stores, stores, strict=True):
                for layer in range(own.shape[0]):
                    for side in (0, 1):
                        rows = other[layer, side].index_select(0, there_N)
                        own[layer, side].index_copy_(0, here_N, rows)
                        moved += rows.numel() * rows.element_size()
        return moved


def _form(shape: Sequence[int], dtype: torch.dtype) -> tuple[tuple[int, ...], str]:
    """Shape and type of a store, the number of its slots left out."""
    return (*shape[:2], *shape[3:]), str(dtype)


def _slots(blocks: Sequence[int], block_size: int, n_tokens: int) -> Tensor:
    starts = np.asarray(blocks, dtype=np.int64)[:, None] * block_size
    slots = (starts + np.arange(block_size)).reshape(-1)[:n_tokens]
    require(
        len(slots) == n_tokens,
        "blocks to fetch",
        len(blocks),
        expected=f"enough for {n_tokens} tokens at {block_size} a block",
        error=ServeError,
    )
    return torch.from_numpy(slots)


def _mapped(file: StoreFile, mode: Any) -> Tensor:
    dtype = getattr(torch, file.dtype)
    # numpy has no bfloat16: the bytes are mapped, and torch is given their type.
    shape = (*file.shape[:-1], file.shape[-1] * dtype.itemsize)
    try:
        raw = np.memmap(file.path, dtype=np.uint8, mode=mode, shape=shape)
    except OSError as cause:
        raise ServeError(
            f"the shared cache {file.path} cannot be mapped ({cause}); give a smaller kv_tokens, "
            "or make room there"
        ) from cause
    return torch.from_numpy(np.asarray(raw)).view(dtype)

"""The windows of several requests side by side, and their attention over what is cached.

Shapes: B requests, N tokens of all windows, S tokens and masks of a request, H query heads, K
key/value heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.model.attention import attend
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.diffusion.protocols import Window


class WindowRow(NamedTuple):
    """A request in a step.

    Args:
        slot: where its tokens lie.
        block: that is worked on.
        length: its tokens and masks together, S.
        window: places that are computed.
        blocks: of the cache, that hold it.
    """

    slot: int
    block: Window
    length: int
    window: Window
    blocks: tuple[int, ...]


class _Group(NamedTuple):
    """Requests whose windows and lengths are equal, so that they are computed at once."""

    rows: slice
    requests: int
    length: int
    whole: bool
    blocks: Tensor


class Windows:
    """What stays the same while the same windows are computed: places, and attention over them.

    Args:
        rows: the requests, those of equal windows next to each other.
        cache: holds all their keys and values.
        longest: tokens that a slot has room for.
    """

    def __init__(self, rows: Sequence[WindowRow], cache: PagedCache, longest: int) -> None:
        self._cache = cache
        size, device = cache.block_size, cache.device
        places, slots, cells = [], [], []
        self._groups: list[_Group] = []
        width = max(row.block[1] - row.block[0] for row in rows)
        block_rows, begin, last = [], 0, None
        for row in rows:
            first, stop = row.window
            place = torch.arange(first, stop)
            places.append(place)
            slots.append(place + row.slot * longest)
            held = torch.tensor(row.blocks)
            cells.append(held[place // size] * size + place % size)
            # A shorter block is filled up with its last place.
            wanted = torch.arange(width).clamp(max=row.block[1] - row.block[0] - 1)
            block_rows.append(begin + row.block[0] - first + wanted)
            kind = (stop - first, row.length)
            if last == kind:
                old = self._groups[-1]
                self._groups[-1] = old._replace(
                    rows=slice(old.rows.start, begin + len(place)),
                    requests=old.requests + 1,
                    blocks=torch.cat([old.blocks, self._pages(held, row.length)]),
                )
            else:
                self._groups.append(
                    _Group(
                        slice(begin, begin + len(place)),
                        1,
                        row.length,
                        kind[0] == row.length,
                        self._pages(held, row.length),
                    )
                )
            last = kind
            begin += len(place)
        self.num_tokens = begin
        self.place_N = torch.cat(places).to(device)
        self.token_N = torch.cat(slots).to(device)
        self._cell_N = torch.cat(cells).to(device)
        self.block_rows = torch.cat(block_rows).to(device)
        self.width = width

    def _pages(self, held: Tensor, length: int) -> Tensor:
        count = -(-length // self._cache.block_size)
        return held[None, :count].to(self._cache.device)

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """See :class:`~shoal.model.attention.Mixer`: new keys and values take the old ones' place.

        A window that is the whole request sees what was computed just now, and no cache.
        """
        self._cache.write(layer, self._cell_N, k_NKd, v_NKd)
        parts = []
        for rows, count, length, whole, blocks_BW in self._groups:
            shape = (count, -1, *k_NKd.shape[1:])
            if whole:
                keys, values = k_NKd[rows].view(shape), v_NKd[rows].view(shape)
            else:
                keys, values = self._cache.gather(layer, blocks_BW)
                keys, values = keys[:, :length], values[:, :length]
            queries = q_NHd[rows].view(count, -1, *q_NHd.shape[1:])
            out = attend(
                queries.transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                None,
                causal=False,
            )
            parts.append(out.transpose(1, 2).reshape(-1, *q_NHd.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

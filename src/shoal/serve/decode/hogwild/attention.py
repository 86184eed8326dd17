"""Attention of workers over the blocks of their views.

By queries (the default), each query is turned once for every block it sees, to stand as far behind
the block's first token as it does in its view, and its scores over all of them are one softmax: in
one call of a kernel, or block by block where there is none. By keys, the keys of a view are turned
to their places instead: the definition, and slower, for every reader turns every key.

Shapes: N tokens of a step, P pairs, M most blocks of a token, S tokens of a view, H query heads,
K key/value heads, d head_dim.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3 and appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ServeError, require
from shoal.kernel.paged.partial import attend_part
from shoal.kernel.paged.views import Attend, merged, turned
from shoal.model.attention import Mixer, attend
from shoal.serve.decode.hogwild.blocks import BlockStore
from shoal.serve.decode.hogwild.views import Feed

Realise = Literal["queries", "keys"]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Attention of a step: pairs of a token and a block, grouped by block.

    Args:
        tokens: [4, N]: the token, its place in its own block, its slot, and the position of its
            own block in its view.
        pairs: [4, P]: the row of the token, the block, how many of its tokens are seen, and how
            many places the block lies before the token's own block.
        parts: [N, M], the pairs of each token; -1 for none.
        rows: tokens behind which scores are wanted.
    """

    tokens: np.ndarray
    pairs: np.ndarray
    parts: np.ndarray
    rows: list[int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """N, P and M."""
        return len(self.parts), self.pairs.shape[1], self.parts.shape[1]


def pairs_of(store: BlockStore, feeds: Sequence[Feed]) -> Pairs:
    """Put the tokens of a step down in their blocks; then all workers see them.

    Raises:
        ServeError: a block is another's, or a view would be longer than the model's positions.
    """
    slots = [store.append(feed.view.own, feed.tokens, feed.view.writer) for feed in feeds]
    tokens: list[tuple[int, int, int, int]] = []
    seen: dict[int, list[tuple[int, int, int, int]]] = {}
    rows: list[int] = []
    for feed, given in zip(feeds, slots, strict=True):
        own, length = feed.view.own, len(feed.view)
        require(
            length <= store.longest,
            f"view of {feed.view.writer}",
            length,
            expected=f"at most {store.longest} tokens, the positions of the model",
            hint="ask for fewer tokens or fewer workers",
            error=ServeError,
        )
        start, base = len(own) - len(given), length - len(own)
        first = len(tokens)
        for place, (token, slot) in enumerate(zip(feed.tokens, given.tolist(), strict=True), start):
            tokens.append((token, place, slot, base))
        for block, offset in feed.view.placed():
            whole, mine = len(block), block is own
            seen.setdefault(block.number, []).extend(
                (row, block.number, start + row - first + 1 if mine else whole, base - offset)
                for row in range(first, len(tokens))
            )
        if feed.yields:
            rows.append(len(tokens) - 1)
    listed = [pair for block in sorted(seen) for pair in seen[block]]
    parts: list[list[int]] = [[] for _ in tokens]
    for number, pair in enumerate(listed):
        parts[pair[0]].append(number)
    most = max(map(len, parts))
    return Pairs(
        np.array(tokens, dtype=np.int64).T.copy(),
        np.array(listed, dtype=np.int64).T.copy(),
        np.array([one + [-1] * (most - len(one)) for one in parts], dtype=np.int64),
        rows,
    )


class QueryRotatingMixer:
    """A :class:`~shoal.model.attention.Mixer` that turns queries.

    Args:
        store: of the blocks.
        tokens: as :class:`Pairs` has them, where the model computes.
        pairs: the same.
        parts: the same.
        kernel: for all blocks at once; they are taken one by one without.
    """

    def __init__(
        self,
        store: BlockStore,
        tokens: Tensor,
        pairs: Tensor,
        parts: Tensor,
        kernel: Attend | None = None,
    ) -> None:
        self._store, self._kernel = store, kernel
        self._slots_N, self._parts_NM, self._pairs = tokens[2], parts, pairs
        self._table = store.table()
        self._each = [] if kernel is not None else list(self._blocks())

    def _blocks(self) -> list[tuple[slice, Tensor, Tensor]]:
        """Pairs of each block, the slots of its tokens, and what of them is not seen."""
        blocks = []
        _, block_P, seen_P, _ = self._pairs
        numbers, counts = torch.unique_consecutive(block_P, return_counts=True)
        first = 0
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            pairs = slice(first, first + count)
            first += count
            seen_p = seen_P[pairs]
            slots_S = self._table[number, : int(seen_p.max())].long().to(self._slots_N.device)
            place_S = torch.arange(len(slots_S), device=slots_S.device)
            blocks.append((pairs, slots_S, place_S >= seen_p.unsqueeze(1)))
        return blocks

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """Store the new keys and values; what the queries see [N, H, d]."""
        cache = self._store.cache
        cache.write(layer, self._slots_N, k_NKd, v_NKd)
        (keys,), (values,) = cache.sides(layer)
        if self._kernel is not None:
            return self._kernel(q_NHd, keys, values, self._table, self._pairs, self._parts_NM)
        q_PHd = turned(q_NHd, self._pairs[0], self._pairs[3], self._store.tables)
        records = torch.cat(
            [
                attend_part(q_PHd[pairs], keys[slots_S], values[slots_S], hidden)
                for pairs, slots_S, hidden in self._each
            ]
        )
        return merged(records, self._parts_NM, q_NHd.dtype)


class KeyRotatingMixer:
    """A :class:`~shoal.model.attention.Mixer` that turns keys, view by view.

    Args:
        store: of the blocks.
    """

    def __init__(self, store: BlockStore, tokens: Tensor, pairs: Tensor, parts: Tensor) -> None:
        self._store = store
        self._slots_N, self._base_N = tokens[2], tokens[3]
        self._row_N = torch.arange(len(parts), device=parts.device)
        table = store.table()
        self._views = []
        for row, base in enumerate(self._base_N.tolist()):
            mine = [pairs[:, part].tolist() for part in parts[row].tolist() if part >= 0]
            slots_S = torch.cat([table[block, :seen] for _, block, seen, _ in mine]).long()
            by_S = torch.cat([torch.full((seen,), base - back) for _, _, seen, back in mine])
            self._views.append((slots_S.to(parts.device), by_S.to(parts.device)))

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """Store the new keys and values; what the queries see [N, H, d]."""
        cache, tables = self._store.cache, self._store.tables
        cache.write(layer, self._slots_N, k_NKd, v_NKd)
        (keys,), (values,) = cache.sides(layer)
        q_NHd = turned(q_NHd, self._row_N, self._base_N, tables)
        out = torch.empty_like(q_NHd)
        for row, (slots_S, by_S) in enumerate(self._views):
            k_SKd = turned(keys, slots_S, by_S, tables)
            q, k, v = (x.transpose(0, 1) for x in (q_NHd[row : row + 1], k_SKd, values[slots_S]))
            out[row] = attend(q[None], k[None], v[None], None, causal=False)[0, :, 0]
        return out


def mixer(
    realise: Realise, store: BlockStore, pairs: Pairs, kernel: Attend | None
) -> tuple[Tensor, Mixer]:
    """The tokens of a step [4, N], and what mixes them."""
    device = store.cache.device
    tokens, listed, parts = (
        torch.from_numpy(x).to(device) for x in (pairs.tokens, pairs.pairs, pairs.parts)
    )
    if realise == "keys":
        return tokens, KeyRotatingMixer(store, tokens, listed, parts)
    return tokens, QueryRotatingMixer(store, tokens, listed, parts, kernel)

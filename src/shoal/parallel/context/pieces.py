"""Which parts of a block of attention have to be computed, from the masks alone.

Torch-free and a function of masks and positions only, so both ends of a message know, without
asking, whether there is anything in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from shoal.ir.mask import Mask

# Cells of one piece that are written out as a mask; larger ones are cut.
_MAX_CELLS = 2**22

# Pieces of a mask by positions: a mask lives as long as its micro-batch, in which every
# layer and both passes ask for the same.
_CACHE: WeakKeyDictionary[Mask, dict[tuple[bytes, bytes], tuple[AttentionPiece, ...]]] = (
    WeakKeyDictionary()
)


class AttentionPiece(NamedTuple):
    """A rectangle of a block whose seen cells are computed by one kernel call.

    Args:
        q: queries of the block.
        k: keys of the block.
        cells: bool [queries, keys]; None if all are seen, or if ``causal``.
        causal: a query sees the keys up to its own place.
    """

    rows: slice
    q: slice
    k: slice
    cells: np.ndarray | None = None
    causal: bool = False


def block_pieces(
    masks: Sequence[Mask], batch: int, q_positions: np.ndarray, k_positions: np.ndarray
) -> tuple[AttentionPiece, ...]:
    """The pieces of a block; empty if nothing in it is seen.

    Args:
        masks: one for all rows, or one a row.
        batch: rows B.
        q_positions: rising or in a few rising runs, [n].
        k_positions: the same, [m].
    """
    if len(masks) == 1 or all(mask == masks[0] for mask in masks):
        return tuple(
            piece._replace(rows=slice(0, batch))
            for piece in _pieces(masks[0], q_positions, k_positions)
        )
    return tuple(
        piece._replace(rows=slice(row, row + 1))
        for row, mask in enumerate(masks)
        for piece in _pieces(mask, q_positions, k_positions)
    )


def _pieces(
    mask: Mask, q_positions: np.ndarray, k_positions: np.ndarray
) -> tuple[AttentionPiece, ...]:
    known = _CACHE.setdefault(mask, {})
    key = (q_positions.tobytes(), k_positions.tobytes())
    if key not in known:
        pieces: list[AttentionPiece] = []
        _cut(mask, q_positions, k_positions, 0, 0, pieces)
        known[key] = tuple(pieces)
    return known[key]


def _cut(
    mask: Mask,
    queries: np.ndarray,
    keys: np.ndarray,
    q_start: int,
    k_start: int,
    found: list[AttentionPiece],
) -> None:
    """Append the pieces of the block that begins at ``q_start``, ``k_start``."""
    rows = slice(0, 1)
    q, k = slice(q_start, q_start + len(queries)), slice(k_start, k_start + len(keys))
    seen = mask.kind(queries, keys)
    if seen == "nothing":
        return
    if seen == "everything":
        found.append(AttentionPiece(rows, q, k))
    elif mask.is_causal and np.array_equal(queries, keys) and bool(np.all(np.diff(queries) > 0)):
        found.append(AttentionPiece(rows, q, k, causal=True))
    elif len(queries) * len(keys) > _MAX_CELLS:
        halves_q, halves_k = _halves(queries), _halves(keys)
        if len(queries) >= len(keys):
            halves_k = [keys]
        else:
            halves_q = [queries]
        q_next = q_start
        for half_q in halves_q:
            k_next = k_start
            for half_k in halves_k:
                _cut(mask, half_q, half_k, q_next, k_next, found)
                k_next += len(half_k)
            q_next += len(half_q)
    else:
        cells = mask.dense(queries, keys)
        used_q, used_k = np.flatnonzero(cells.any(1)), np.flatnonzero(cells.any(0))
        q_low, q_high = int(used_q[0]), int(used_q[-1]) + 1
        k_low, k_high = int(used_k[0]), int(used_k[-1]) + 1
        trimmed = np.ascontiguousarray(cells[q_low:q_high, k_low:k_high])
        found.append(
            AttentionPiece(
                rows,
                slice(q_start + q_low, q_start + q_high),
                slice(k_start + k_low, k_start + k_high),
                None if trimmed.all() else trimmed,
            )
        )


def _halves(positions: np.ndarray) -> list[np.ndarray]:
    middle = len(positions) // 2
    return [positions[:middle], positions[middle:]]

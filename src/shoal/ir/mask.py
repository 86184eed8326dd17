"""Which query sees which key: a typed description of attention masks.

A mask of [T_q, T_k] cells is a set of rectangles, each wholly seen or cut along diagonals,
and of block-sparse maps. They never overlap, so the number of seen cells, from which exact
FLOPs follow, is a sum; and any sub-grid of positions can be asked for, so ranks that hold
scattered pieces of a sequence never build the whole.

Of the range (q0, q1, k0, k1), a cell (q, k) inside it is seen where

- ``full``: always;
- ``causal``: k - q <= k1 - q1, the diagonal through the last corner;
- ``inv_causal``: k - q >= k0 - q0, the diagonal through the first corner;
- ``bicausal``: both.

Source: Long-Context Attention Benchmark, 2025 (the patterns); MagiAttention, 2025 (ranges with
four kinds); Wang et al., FlashMask, 2024 (shared question, causal blockwise).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

import numpy as np

from shoal.core.errors import require
from shoal.core.random import generator

RangeKind = Literal["full", "causal", "inv_causal", "bicausal"]
Seen = Literal["nothing", "everything", "mixed"]

_KINDS = ("full", "causal", "inv_causal", "bicausal")


class MaskRange(NamedTuple):
    """Queries q0 to q1 and keys k0 to k1, ends not included."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: RangeKind = "full"


class BlockMap(NamedTuple):
    """Queries q0 to q1 and keys k0 to k1 in square blocks, each wholly seen or not at all.

    Args:
        q0: first query.
        q1: end of the queries; q1 - q0 is a multiple of ``block``.
        k0: first key.
        k1: end of the keys; k1 - k0 is a multiple of ``block``.
        block: edge of a block.
        seen: one bit a block, row by row, as by ``numpy.packbits``.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    block: int
    seen: bytes

    def table(self) -> np.ndarray:
        """The map as bool [blocks of queries, blocks of keys]."""
        rows, columns = (self.q1 - self.q0) // self.block, (self.k1 - self.k0) // self.block
        bits = np.unpackbits(np.frombuffer(self.seen, dtype=np.uint8), count=rows * columns)
        return bits.reshape(rows, columns).astype(bool)


@dataclass(frozen=True)
class Mask:
    """What each of T_q queries sees of T_k keys.

    Args:
        num_queries: T_q.
        num_keys: T_k.
        ranges: rectangles that do not share a seen cell.
        blocks: block-sparse maps, whose rectangles share nothing with any other.
    """

    num_queries: int
    num_keys: int
    ranges: tuple[MaskRange, ...] = ()
    blocks: tuple[BlockMap, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_queries", "num_keys"):
            size = getattr(self, name)
            require(size >= 1, f"mask.{name}", size, expected="at least 1")
        pieces: list[MaskRange | BlockMap] = [*self.ranges, *self.blocks]
        for piece in pieces:
            require(
                0 <= piece.q0 < piece.q1 <= self.num_queries
                and 0 <= piece.k0 < piece.k1 <= self.num_keys,
                "mask range (q0, q1, k0, k1)",
                tuple(piece[:4]),
                expected=f"rising and inside [{self.num_queries}, {self.num_keys}]",
            )
        for result in self.ranges:
            require(
                result.kind in _KINDS,
                "mask range kind",
                result.kind,
                expected=f"one of {', '.join(_KINDS)}",
            )
        for sparse in self.blocks:
            _check_multiple("mask.blocks queries", sparse.q1 - sparse.q0, sparse.block)
            _check_multiple("mask.blocks keys", sparse.k1 - sparse.k0, sparse.block)
            count = (
                (sparse.q1 - sparse.q0) // sparse.block * ((sparse.k1 - sparse.k0) // sparse.block)
            )
            require(
                len(sparse.seen) == -(-count // 8),
                "mask.blocks seen",
                f"{len(sparse.seen)} bytes",
                expected=f"{-(-count // 8)} bytes, one bit for each of {count} blocks",
            )
        self._check_disjoint()

    def __hash__(self) -> int:
        return self._hash

    # ------------------------------------------------------------------ patterns

    @classmethod
    def full(cls, length: int, keys: int | None = None) -> Self:
        """Every query sees every key."""
        return cls(length, keys or length, (MaskRange(0, length, 0, keys or length),))

    @classmethod
    def causal(cls, length: int) -> Self:
        """A query sees its own position and those before."""
        return cls(length, length, (MaskRange(0, length, 0, length, "causal"),))

    @classmethod
    def document(cls, ids: np.ndarray, *, causal: bool = True) -> Self:
        """A query sees its own document alone.

        Args:
            ids: integers [T], equal for the tokens of one document, which may be in several
                pieces; tokens with a negative id are padding: they see and are seen by nothing.
            causal: only what came before.
        """
        ids = np.asarray(ids)
        require(
            ids.ndim == 1 and len(ids) > 0 and ids.dtype.kind in "iu",
            "mask.document ids",
            f"{ids.dtype} {list(ids.shape)}",
            expected="integers [T]",
        )
        cuts = np.flatnonzero(np.diff(ids)) + 1
        starts = [0, *cuts.tolist()]
        stops = [*cuts.tolist(), len(ids)]
        kind: RangeKind = "causal" if causal else "full"
        earlier: dict[int, list[tuple[int, int]]] = {}
        ranges = []
        for start, stop in zip(starts, stops, strict=True):
            name = int(ids[start])
            if name < 0:
                continue
            for first, last in earlier.setdefault(name, []):
                ranges.append(MaskRange(start, stop, first, last))
                if not causal:
                    ranges.append(MaskRange(first, last, start, stop))
            ranges.append(MaskRange(start, stop, start, stop, kind))
            earlier[name].append((start, stop))
        return cls(len(ids), len(ids), tuple(ranges))

    @classmethod
    def padded(cls, length: int, valid: int, *, causal: bool = True) -> Self:
        """``valid`` tokens, then padding that sees and is seen by nothing."""
        require(0 <= valid <= length, "mask.padded valid", valid, expected=f"0 to {length}")
        kind: RangeKind = "causal" if causal else "full"
        return cls(length, length, (MaskRange(0, valid, 0, valid, kind),) if valid else ())

    @classmethod
    def sliding(cls, length: int, window: int, *, causal: bool = True) -> Self:
        """A query sees the keys less than ``window`` away, itself included."""
        require(window >= 1, "mask.sliding window", window, expected="at least 1")
        return cls(length, length, tuple(_band(0, length, length, window, causal, 0)))

    @classmethod
    def prefix(cls, length: int, prefix: int) -> Self:
        """The first ``prefix`` tokens are seen by all; the rest is causal."""
        require(0 <= prefix <= length, "mask.prefix", prefix, expected=f"0 to {length}")
        ranges = [MaskRange(0, prefix, 0, prefix)] if prefix else []
        if prefix < length:
            ranges.append(MaskRange(prefix, length, 0, length, "causal"))
        return cls(length, length, tuple(ranges))

    @classmethod
    def shared_question(cls, documents: Sequence[Sequence[int]]) -> Self:
        """Causal documents of a question and answers that do not see each other.

        Args:
            documents: of each the length of the question, then those of its answers.
        """
        ranges, start = [], 0
        for document in documents:
            require(
                len(document) >= 1 and all(piece >= 1 for piece in document),
                "mask.shared_question document",
                list(document),
                expected="lengths of a question and its answers, each at least 1",
            )
            question, stop = (start, start + document[0]), start
            for piece in document:
                start, stop = stop, stop + piece
                ranges.append(MaskRange(start, stop, start, stop, "causal"))
                if start >= question[1]:
                    ranges.append(MaskRange(start, stop, *question))
            start = stop
        require(start > 0, "mask.shared_question", list(documents), expected="a document or more")
        return cls(start, start, tuple(ranges))

    @classmethod
    def global_sliding(
        cls, length: int, window: int, num_global: int, *, causal: bool = False
    ) -> Self:
        """A sliding window; the first ``num_global`` tokens are seen by all and see all."""
        require(
            0 <= num_global <= length,
            "mask.global_sliding num_global",
            num_global,
            expected=f"0 to {length}",
        )
        require(window >= 1, "mask.global_sliding window", window, expected="at least 1")
        ranges = []
        if num_global:
            if causal:
                ranges.append(MaskRange(0, num_global, 0, num_global, "causal"))
            else:
                ranges.append(MaskRange(0, num_global, 0, length))
        if 0 < num_global < length:
            ranges.append(MaskRange(num_global, length, 0, num_global))
        ranges += _band(num_global, length, length, window, causal, num_global)
        return cls(length, length, tuple(ranges))

    @classmethod
    def block_causal(cls, length: int, block: int) -> Self:
        """A query sees its whole block and all blocks before.

        Raises:
            ConfigError: the length is not a multiple of the block.
        """
        _check_multiple("mask.block_causal length", length, block)
        return cls(
            length,
            length,
            tuple(MaskRange(q, q + block, 0, q + block) for q in range(0, length, block)),
        )

    @classmethod
    def causal_blockwise(cls, lengths: Sequence[int]) -> Self:
        """Causal pieces that do not see each other; the last piece sees all that came before.

        Args:
            lengths: of the pieces, such as demonstrations and then the question.
        """
        require(
            len(lengths) >= 1 and all(piece >= 1 for piece in lengths),
            "mask.causal_blockwise lengths",
            list(lengths),
            expected="one or more lengths, each at least 1",
        )
        length, start, ranges = sum(lengths), 0, []
        for piece in lengths[:-1]:
            ranges.append(MaskRange(start, start + piece, start, start + piece, "causal"))
            start += piece
        ranges.append(MaskRange(start, length, 0, length, "causal"))
        return cls(length, length, tuple(ranges))

    @classmethod
    def block_sparse(cls, seen: np.ndarray, block: int) -> Self:
        """Blocks that are seen by a table of bool [T_q / block, T_k / block]."""
        seen = np.asarray(seen)
        require(
            seen.ndim == 2 and seen.size > 0 and seen.dtype == np.bool_,
            "mask.block_sparse seen",
            f"{seen.dtype} {list(seen.shape)}",
            expected="bool [blocks of queries, blocks of keys]",
        )
        require(block >= 1, "mask.block_sparse block", block, expected="at least 1")
        queries, keys = (int(count) * block for count in seen.shape)
        bits = np.packbits(seen).tobytes()
        return cls(queries, keys, (), (BlockMap(0, queries, 0, keys, block, bits),))

    @classmethod
    def random_blocks(cls, length: int, block: int, density: float, seed: int) -> Self:
        """A share ``density`` of all blocks, drawn at random.

        Raises:
            ConfigError: the length is not a multiple of the block, or no such share.
        """
        _check_multiple("mask.random_blocks length", length, block)
        require(0 <= density <= 1, "mask.random_blocks density", density, expected="0 to 1")
        edge = length // block
        order = generator(seed, purpose="mask", index=edge).permutation(edge * edge)
        seen = np.zeros(edge * edge, dtype=bool)
        seen[order[: round(density * edge * edge)]] = True
        return cls.block_sparse(seen.reshape(edge, edge), block)

    # ------------------------------------------------------------------ questions

    @property
    def is_causal(self) -> bool:
        """Exactly the causal mask of a square."""
        length = self.num_queries
        return self.ranges == (MaskRange(0, length, 0, length, "causal"),) and not self.blocks

    def dense(
        self, q_positions: np.ndarray | None = None, k_positions: np.ndarray | None = None
    ) -> np.ndarray:
        """The cells of some positions as bool [queries, keys]; of all positions if not given."""
        queries, q_order = self._positions(q_positions, self.num_queries)
        keys, k_order = self._positions(k_positions, self.num_keys)
        rows, lows, highs = self._intervals(queries)
        # An interval of seen keys is a rise and a fall, and none overlaps another.
        edges = np.zeros((len(queries), len(keys) + 1), dtype=np.int8)
        np.add.at(edges, (rows, np.searchsorted(keys, lows)), 1)
        np.subtract.at(edges, (rows, np.searchsorted(keys, highs)), 1)
        values = np.cumsum(edges[:, :-1], axis=1, dtype=np.int8).astype(bool)
        for sparse in self.blocks:
            inside_q, block_q = _blocks_of(queries, sparse.q0, sparse.q1, sparse.block)
            inside_k, block_k = _blocks_of(keys, sparse.k0, sparse.k1, sparse.block)
            values[np.ix_(inside_q, inside_k)] |= sparse.table()[np.ix_(block_q, block_k)]
        if q_order is not None:
            values[q_order] = values.copy()
        if k_order is not None:
            values[:, k_order] = values.copy()
        return values

    def area(
        self, q_positions: np.ndarray | None = None, k_positions: np.ndarray | None = None
    ) -> int:
        """Number of seen cells, exactly, without building them."""
        queries, _ = self._positions(q_positions, self.num_queries)
        keys, _ = self._positions(k_positions, self.num_keys)
        _, lows, highs = self._intervals(queries)
        count = int((np.searchsorted(keys, highs) - np.searchsorted(keys, lows)).sum())
        for sparse in self.blocks:
            table = sparse.table()
            _, block_q = _blocks_of(queries, sparse.q0, sparse.q1, sparse.block)
            _, block_k = _blocks_of(keys, sparse.k0, sparse.k1, sparse.block)
            heights = np.bincount(block_q, minlength=table.shape[0])
            widths = np.bincount(block_k, minlength=table.shape[1])
            count += int(heights @ table.astype(np.int64) @ widths)
        return count

    def kind(
        self, q_positions: np.ndarray | None = None, k_positions: np.ndarray | None = None
    ) -> Seen:
        """Whether these queries see nothing of these keys, all, or some."""
        count = self.area(q_positions, k_positions)
        if count == 0:
            return "nothing"
        rows = self.num_queries if q_positions is None else len(q_positions)
        columns = self.num_keys if k_positions is None else len(k_positions)
        return "everything" if count == rows * columns else "mixed"

    # ------------------------------------------------------------------ inside

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.num_queries, self.num_keys, self.ranges, self.blocks))

    @functools.cached_property
    def _columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the ranges: corners [R, 4], and by how much their ends move with the query [R]."""
        corners = np.array([found[:4] for found in self.ranges], dtype=np.int64).reshape(-1, 4)
        kinds = [found.kind for found in self.ranges]
        low = np.array([kind in ("inv_causal", "bicausal") for kind in kinds], dtype=np.int64)
        high = np.array([kind in ("causal", "bicausal") for kind in kinds], dtype=np.int64)
        return corners, low, high

    def _intervals(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row, first key, end of keys) of every range that a query is in; queries sorted."""
        corners, low_moves, high_moves = self._columns
        q0, q1, k0, k1 = corners.T
        starts = np.searchsorted(queries, q0)
        counts = np.searchsorted(queries, q1) - starts
        which = np.repeat(np.arange(len(corners)), counts)
        ahead = np.cumsum(counts) - counts
        rows = np.arange(len(which)) - np.repeat(ahead - starts, counts)
        q = queries[rows]
        lows = k0[which] + low_moves[which] * (q - q0[which])
        highs = k1[which] - high_moves[which] * (q1[which] - 1 - q)
        lows = np.minimum(lows, k1[which])
        return rows, lows, np.maximum(highs, lows)

    def _positions(
        self, positions: np.ndarray | None, length: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Sorted positions, and where each of them was if they were not sorted."""
        if positions is None:
            return np.arange(length), None
        order = None
        if len(positions) > 1 and not bool(np.all(positions[1:] >= positions[:-1])):
            order = np.argsort(positions, kind="stable")
            positions = positions[order]
        require(
            len(positions) == 0 or (positions[0] >= 0 and positions[-1] < length),
            "mask positions",
            f"{positions[:1]} to {positions[-1:]}",
            expected=f"0 to {length - 1}",
        )
        return positions, order

    def _check_disjoint(self) -> None:
        pieces: list[MaskRange | BlockMap] = [*self.ranges, *self.blocks]
        pieces.sort(key=lambda piece: piece.q0)
        if all(a.q1 <= b.q0 for a, b in itertools.pairwise(pieces)):
            return
        corners = np.array([piece[:4] for piece in pieces], dtype=np.int64)
        q0, q1, k0, k1 = corners.T
        # Sorted by first query: only those up to where the first query passes q1 can meet.
        for i, stop in enumerate(np.searchsorted(q0, q1).tolist()):
            near = slice(i + 1, stop)
            meet = (k0[near] < k1[i]) & (k0[i] < k1[near])
            for j in (np.flatnonzero(meet) + i + 1).tolist():
                require(
                    not _share(pieces[i], pieces[j]),
                    "mask ranges",
                    [tuple(pieces[i])[:5], tuple(pieces[j])[:5]],
                    expected="ranges that do not overlap",
                )


def _check_multiple(where: str, length: int, block: int) -> None:
    require(block >= 1, "mask block", block, expected="at least 1")
    below = length // block * block
    require(
        length >= 1 and length % block == 0,
        where,
        length,
        expected=f"a multiple of the block of {block}",
        hint=f"use {below} or {below + block}" if below else f"use {block}",
    )


def _share(a: MaskRange | BlockMap, b: MaskRange | BlockMap) -> bool:
    """Whether two rectangles that meet have a cell that both see; a map counts as its whole."""
    if isinstance(a, BlockMap) or isinstance(b, BlockMap):
        return True
    rows = np.arange(max(a.q0, b.q0), min(a.q1, b.q1))
    (low_a, high_a), (low_b, high_b) = (_ends(found, rows) for found in (a, b))
    return bool(np.any(np.maximum(low_a, low_b) < np.minimum(high_a, high_b)))


def _ends(found: MaskRange, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First key and end of the keys that each row of a range sees."""
    low, high = np.full_like(rows, found.k0), np.full_like(rows, found.k1)
    if found.kind in ("inv_causal", "bicausal"):
        low = found.k0 + rows - found.q0
    if found.kind in ("causal", "bicausal"):
        high = found.k1 - (found.q1 - 1 - rows)
    return low, high


def _band(
    first: int, stop: int, length: int, window: int, causal: bool, low: int
) -> Iterable[MaskRange]:
    """Queries ``first`` to ``stop`` that see the keys from ``low`` less than ``window`` away."""
    reach = 1 if causal else window
    # Beyond the first cut the window leaves the first key; beyond the second it meets the last.
    cuts = sorted(
        {first, stop}
        | {cut for cut in (low + window - 1, length - reach + 1) if first < cut < stop}
    )
    for q0, q1 in itertools.pairwise(cuts):
        leaves, meets = q0 >= low + window - 1, q1 > length - reach + 1
        k0 = q0 - window + 1 if leaves else low
        k1 = length if meets else q1 + reach - 1
        kinds: dict[tuple[bool, bool], RangeKind] = {
            (False, False): "causal",
            (False, True): "full",
            (True, False): "bicausal",
            (True, True): "inv_causal",
        }
        yield MaskRange(q0, q1, k0, k1, kinds[leaves, meets])


def _blocks_of(
    positions: np.ndarray, start: int, stop: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which positions lie in the rectangle's side, and the number of each one's block."""
    inside = np.flatnonzero((positions >= start) & (positions < stop))
    return inside, (positions[inside] - start) // block

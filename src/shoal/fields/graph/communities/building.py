"""Signatures of vertices' sets of neighbours, from edges in any order and from many shards."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shoal.core.errors import require
from shoal.fields.data.minhash import MinHasher
from shoal.fields.graph.communities.protocols import CommunityError
from shoal.machine.host import memory_available

EMPTY = np.uint32(0xFFFFFFFF)
# Entries and rows that a thread works on at once.
_ENTRIES, _ROWS = 1 << 21, 1 << 13


def folded(keys: np.ndarray) -> np.ndarray:
    """Members as 32-bit hashes, uint64: a number below 2^32 is its own, so that none coincide."""
    if keys.dtype == np.int32:  # rows of a graph
        return keys.astype(np.uint64)
    whole = keys.astype(np.int64, copy=False).view(np.uint64)
    mixed = whole ^ ((whole >> np.uint64(32)) * np.uint64(0x9E3779B1))
    return mixed & np.uint64(0xFFFFFFFF)


def check_room(rows: int, hashes: int) -> None:
    """Refuse signatures that do not fit in memory.

    Raises:
        CommunityError: they do not.
    """
    needed, free = 4 * rows * hashes, memory_available()
    require(
        needed <= free, "hashes", hashes, error=CommunityError,
        expected=f"at most {max(free // (4 * max(rows, 1)), 0)}: {rows:,} signatures need "
        f"{needed:,} bytes, and {free:,} are free",
        hint="or sign fewer vertices, by a higher least_degree",
    )  # fmt: skip


def lower_rows(
    hasher: MinHasher,
    signatures: np.ndarray,
    rows: np.ndarray,
    ends: np.ndarray,
    members: np.ndarray,
    threads: int = 1,
) -> None:
    """Put members into the sets of some rows; the result does not depend on the threads.

    Args:
        hasher: of the signatures.
        signatures: uint32 [N, K], changed in place.
        rows: int64 [n], different.
        ends: int64 [n + 1]; the members of rows[i] are ``members[ends[i]:ends[i + 1]]``.
        members: keys, int64.
        threads: that work.
    """
    in_order = bool((np.diff(rows) == 1).all())

    def lower(piece: slice) -> None:
        begin, end = ends[piece.start], ends[piece.stop]
        hashes = folded(members[begin:end])
        some = slice(rows[piece.start], rows[piece.stop - 1] + 1) if in_order else rows[piece]
        block = signatures[some]  # of rows in order a view, else a copy
        hasher.lower(block, hashes, ends[piece.start : piece.stop + 1] - begin)
        if not in_order:
            signatures[some] = block

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lower, _pieces(ends)))


def _pieces(ends: np.ndarray) -> Iterator[slice]:
    begin, last = 0, len(ends) - 1
    while begin < last:
        most = int(np.searchsorted(ends, ends[begin] + _ENTRIES, "right")) - 1
        end = min(max(most, begin + 1), begin + _ROWS, last)
        yield slice(begin, end)
        begin = end


class SignatureBuilder:
    """Signatures that grow by edges.

    Args:
        hashes: slots of a signature.
        seed: of the hash functions.
        threads: that work.

    Attributes:
        ids: int64 [n], vertices that have a set so far, ascending.
        signatures: uint32 [n, hashes].
        degrees: int64 [n], members that were put into each, repetitions included.
    """

    def __init__(self, hashes: int, *, seed: int = 1, threads: int = 1) -> None:
        self.hasher = MinHasher(hashes, seed=seed)
        self.threads = threads
        self._arrived = np.zeros(0, np.int64)
        self._order = np.zeros(0, np.int64)
        self._rows = np.empty((0, hashes), np.uint32)
        self._degrees = np.zeros(0, np.int64)

    def add(self, vertices: np.ndarray, members: np.ndarray) -> None:
        """Put a member into the set of each of some vertices.

        Args:
            vertices: int64 [E], 0 or more.
            members: int64 [E].

        Raises:
            CommunityError: they do not fit in memory.
        """
        order = np.argsort(vertices, kind="stable")
        grouped = vertices[order]
        begins = np.flatnonzero(np.diff(grouped, prepend=-1))
        ends = np.append(begins, len(grouped))
        self.put(grouped[begins], ends, members[order])

    def put(self, vertices: np.ndarray, ends: np.ndarray, members: np.ndarray) -> None:
        """Put members into the sets of different vertices, as :func:`lower_rows` takes them."""
        rows = self._rows_of(vertices)
        self._degrees[rows] += np.diff(ends)
        lower_rows(self.hasher, self._rows, rows, ends, members, self.threads)

    def merge(self, other: SignatureBuilder) -> None:
        """Add what another shard has; it must have the same hash functions.

        Raises:
            CommunityError: it has others.
        """
        same = np.array_equal(self.hasher.a, other.hasher.a)
        require(
            same and np.array_equal(self.hasher.b, other.hasher.b), "shard",
            f"{other.hasher.num_perm} hashes", expected=f"the {self.hasher.num_perm} of this one, "
            "with the same seed", error=CommunityError,
        )  # fmt: skip
        rows = self._rows_of(other._arrived)
        count = len(rows)
        self._rows[rows] = np.minimum(self._rows[rows], other._rows[:count])
        self._degrees[rows] += other._degrees[:count]

    @property
    def ids(self) -> np.ndarray:
        """Vertices, ascending."""
        return self._arrived[self._order]

    @property
    def signatures(self) -> np.ndarray:
        """In the order of :attr:`ids`; a copy unless they came in it."""
        count = len(self._order)
        ordered = bool((self._order == np.arange(count)).all())
        return self._rows[:count] if ordered else self._rows[self._order]

    @property
    def degrees(self) -> np.ndarray:
        """In the order of :attr:`ids`."""
        return self._degrees[self._order]

    def _rows_of(self, vertices: np.ndarray) -> np.ndarray:
        """Rows of different vertices; those that are new get one."""
        known = self._arrived[self._order]
        place = np.minimum(np.searchsorted(known, vertices), max(len(known) - 1, 0))
        new = known[place] != vertices if len(known) else np.ones(len(vertices), bool)
        rows = np.empty(len(vertices), np.int64)
        rows[~new] = self._order[place[~new]]
        if new.any():
            count = len(known)
            rows[new] = np.arange(count, count + int(new.sum()))
            self._arrived = np.concatenate([self._arrived, vertices[new]])
            self._order = np.argsort(self._arrived, kind="stable")
            self._grow(len(self._arrived))
        return rows

    def _grow(self, count: int) -> None:
        if count > len(self._rows):
            # Exactly as many as come first, as all of a graph do; then twice as many each time.
            room = count if not len(self._rows) else max(count, 2 * len(self._rows))
            check_room(room, self.hasher.num_perm)
            grown = np.full((room, self.hasher.num_perm), EMPTY, np.uint32)
            grown[: len(self._rows)] = self._rows
            self._rows = grown
            self._degrees = np.concatenate(
                [self._degrees, np.zeros(room - len(self._degrees), np.int64)]
            )

"""Equal documents: the words in lower case decide, not spaces and punctuation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np

from shoal.core.parts import part
from shoal.fields.data.dedupe.costs import row_estimate
from shoal.fields.data.dedupe.passes import kept_rows, row_keys
from shoal.fields.data.dedupe.protocols import Compared, DedupeProblem, DedupeWork, Deduplication
from shoal.fields.data.minhash.hasher import text_digests
from shoal.fields.data.minhash.lsh import KeyedRows, RowClusters, sorted_runs
from shoal.ir import Estimate, Machine

# Bytes that sorting may use.
_SORT_BYTES = 2.0**31


@part
class ExactText:
    """Keep one of the documents that have the same words in the same order.

    Words are compared in lower case, by 16 bytes of SHA-1; spaces and punctuation do not count. An
    empty document is a duplicate of the first empty one.
    """

    compared: ClassVar[Compared] = "rows"

    def estimate(self, work: DedupeWork, machine: Machine) -> Estimate:
        """Reading twice, hashing the text, sorting once, writing."""
        return row_estimate(
            work, machine, compute_s=work.size / work.rates.digest, bands=1, key_bytes=16.0
        )

    def finds(self, work: DedupeWork) -> float:
        """All of equal documents; none that only resemble each other."""
        return float(work.threshold >= 1)

    def candidates(self, work: DedupeWork, machine: Machine) -> Iterator[Self]:
        """Always: it is quick."""
        yield self

    def dedupe(self, problem: DedupeProblem) -> Deduplication:
        """Unite documents of equal digests."""
        keys = row_keys(problem, _keys, None, until=0.5)
        clusters = RowClusters(keys.n)
        # Sorted by one half of the digest; the other half decides among equal ones.
        halves = [KeyedRows(piece.keys[:1], piece.rows) for piece in keys.pieces]
        rest = np.concatenate([piece.keys[1] for piece in keys.pieces] or [np.empty(0, np.uint64)])
        for done, some, rows in sorted_runs(halves, _SORT_BYTES):
            order = np.lexsort((rest[rows], some))
            both = _numbered(some[order], rest[rows][order])
            clusters.unite_equal(both, rows[order])
            problem.tick(0.5 + 0.25 * done, "clusters")
        return kept_rows(problem, keys, clusters, {})


def _keys(texts: Any, options: None) -> tuple[Any, Any]:
    digests = text_digests(texts)
    return np.ascontiguousarray(digests.T), np.ones(len(digests), np.bool_)


def _numbered(first: Any, second: Any) -> Any:
    """Uint64: a number for each run of equal pairs."""
    new = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return np.concatenate([[0], np.cumsum(new)]).astype(np.uint64)[: len(first)]

"""Which sequences a batch of rows has, and which of their tokens a rank of a group holds.

Torch-free. Nothing is padded: shares differ by a token or two where lengths do not divide, and a
rank may have none of a sequence that is shorter than its group is large.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.cost.training.sequences import Exchange


class SequenceSegment(NamedTuple):
    """One sequence: consecutive tokens of one row.

    Args:
        row: number in the batch.
    """

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


def segments(documents: np.ndarray | None, rows: int, length: int) -> list[SequenceSegment]:
    """The sequences of a batch, row by row: runs of one document, or whole rows.

    Args:
        documents: ids [rows, length], below 0 for padding, which is in no sequence; or None.
        rows: rows B.
        length: tokens of a row T.
    """
    if documents is None:
        return [SequenceSegment(row, 0, length) for row in range(rows)]
    segments = []
    for row, ids in enumerate(documents):
        cuts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), length]
        segments += [
            SequenceSegment(row, start, stop)
            for start, stop in itertools.pairwise(cuts)
            if ids[start] >= 0
        ]
    return segments


def shares(tokens: int, degree: int, exchange: Exchange) -> list[np.ndarray]:
    """Places in a buffer of ``tokens`` that each of ``degree`` ranks holds, rising.

    Of a ring rank i has chunks i and 2 d - 1 - i of 2 d, so that causal work is balanced; ranks
    that swap heads for sequence have one piece each, the last ones shorter.
    """
    places = np.arange(tokens, dtype=np.int64)
    if exchange == "ulysses":
        each = -(-tokens // degree)
        return [places[rank * each : (rank + 1) * each] for rank in range(degree)]
    ends = [number * tokens // (2 * degree) for number in range(2 * degree + 1)]
    chunks = [places[start:stop] for start, stop in itertools.pairwise(ends)]
    return [np.concatenate([chunks[n], chunks[-1 - n]]) for n in range(degree)]


def cuts(lengths: Sequence[int]) -> list[int]:
    """Where each sequence of a buffer begins, and the end of the last."""
    return [0, *np.cumsum(np.asarray(lengths, dtype=np.int64)).tolist()]

"""Whole documents in each window, as many as fit, so that none loses its beginning.

Source: Ding et al., Fewer Truncations Improve Language Modeling, 2024, section 3 (best-fit
packing).
Shapes: N windows of T + 1 tokens.

Differs: a document longer than a window is cut at its end; the paper goes on with it in others.
"""

from __future__ import annotations

import bisect
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np

from shoal.core.parts import part
from shoal.corpora.protocols import WindowTokens, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

# Tokens -> seq_len -> the documents of each window; every batch asks again.
_PACKED: WeakKeyDictionary[WindowTokens, dict[int, list[list[int]]]] = WeakKeyDictionary()


@part
class BestFit:
    """Windows of whole documents; attention and loss stay inside each document.

    Best-fit decreasing: the longest documents are placed first, each in the window with the least
    remaining space. The rest is padded with ends of text, which are masked in loss and attention.
    Documents longer than a window are truncated to T + 1 tokens. Every epoch has the same windows
    in another order.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"keeps_beginnings", "separates_documents"})

    def num_windows(self, split: WindowTokens, seq_len: int) -> int:
        """Windows of one epoch."""
        return len(_packed(split, seq_len))

    def fill(
        self, split: WindowTokens, windows_N: np.ndarray, *, seq_len: int, seed: int, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [N, T+1] and document ids int32 [N, T+1]."""
        windows = _packed(split, seq_len)
        width = seq_len + 1
        tokens = np.full((len(windows_N), width), split.end_of_text, dtype=np.int64)
        ids = np.empty((len(windows_N), width), dtype=np.int32)
        for row, window in enumerate(windows_N.tolist()):
            done = 0
            for number, document in enumerate(windows[window]):
                begin, end = int(split.offsets[document]), int(split.offsets[document + 1])
                take = min(end - begin, width)
                split.read(begin, tokens[row, done : done + take])
                ids[row, done : done + take] = number
                done += take
            # Each token of padding is a document of its own, so that none has a target.
            ids[row, done:] = len(windows[window]) + np.arange(width - done)
        return tokens, ids

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Each token is read as 2 to 4 bytes and written as 8, its document id as 4."""
        # Those of windows that are cut anywhere, with a loop over documents as theirs.
        return data_time(work, machine, bytes_per_token=14, row_s=1.5e-5, fixed_s=1.5e-4)


def _packed(split: WindowTokens, seq_len: int) -> list[list[int]]:
    """The documents of each window."""
    known = _PACKED.setdefault(split, {})
    if seq_len not in known:
        lengths = np.minimum(np.diff(split.offsets), seq_len + 1)
        known[seq_len] = _best_fit(lengths, seq_len + 1)
    return known[seq_len]


def _best_fit(lengths: np.ndarray, width: int) -> list[list[int]]:
    """Best fit, longest first; windows with as much room are taken last in, first out."""
    windows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those of which there is a window, in order
    # A document without text is its end alone, of which nothing is learned.
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        if length < 2:
            break
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            window = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        else:
            room, window = width, len(windows)
            windows.append([])
        windows[window].append(document)
        left = room - length
        if left >= 2:
            if not with_room.setdefault(left, []):
                bisect.insort(rooms, left)
            with_room[left].append(window)
    return windows

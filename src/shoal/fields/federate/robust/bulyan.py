"""Bulyan: updates chosen by Krum, then in every coordinate the numbers around their median.

Source: El Mhamdi, Guerraoui, Rouault, The Hidden Vulnerability of Distributed Learning in
Byzantium, 2018, section 4.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived
from shoal.fields.federate.robust.updates import (
    Attackers,
    assumed,
    blocks,
    distances,
    krum_best,
    sort_columns,
    usable,
)


@part
class Bulyan:
    """Choose n - 2 f updates by Krum, then the n - 4 f numbers nearest to each median.

    Args:
        f: wrong updates that are assumed; ``auto`` for just under a quarter.
    """

    f: Attackers = "auto"

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """As many as are assumed; n >= 4 f + 3."""
        return assumed(self.f, count, (count - 3) // 4, "bulyan", "4 f + 3")

    def combine(self, arrived: Arrived) -> np.ndarray:
        """One Gram matrix for all choices, and a window of sorted numbers."""
        given = usable(arrived)
        f = self.covers(len(given))
        chosen = _choose(distances(given.deltas), f)
        arrived.report["chosen"] = sorted(given.clients[at] for at in chosen)
        keep = len(chosen) - 2 * f
        factor = np.float32(given.scale / keep)
        parts = [
            _around_median(np.stack(sort_columns(block)), keep) * factor
            for block in blocks(given.only(chosen).deltas)
        ]
        return np.concatenate(parts)


def _choose(apart: np.ndarray, f: int) -> list[int]:
    """Choose n - 2 f updates: the winner of Krum among those that are left, again and again."""
    left, chosen = list(range(len(apart))), []
    for _ in range(len(apart) - 2 * f):
        best = krum_best(apart[np.ix_(left, left)], f)
        chosen.append(left.pop(best))
    return sorted(chosen)


def _around_median(ordered: np.ndarray, keep: int) -> np.ndarray:
    """Sum of the ``keep`` numbers nearest to the median, [B], of sorted columns [n, B]."""
    count, width = ordered.shape
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    columns = np.arange(width)
    # Sorted numbers that are nearest to one of them are neighbours: a window, found by dropping
    # the farther of its two ends.
    low = np.zeros(width, np.intp)
    for dropped in range(count - keep):
        below = middle - ordered[low, columns]
        above = ordered[low + (count - 1 - dropped), columns] - middle
        low += below > above
    total = ordered[low, columns]
    for at in range(1, keep):
        total += ordered[low + at, columns]
    return total

"""Knees of a latency curve: piecewise-constant segmentation of log latency.

Source: optimal partitioning by dynamic programming, Jackson et al., 2005.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import MachineError, require


@dataclass(frozen=True)
class Plateau:
    """One plateau of the curve.

    Args:
        latency_s: median latency on the plateau.
        first_bytes: smallest footprint on it.
        last_bytes: largest footprint on it.
        next_bytes: smallest footprint of the next plateau; None for the last level.
    """

    latency_s: float
    first_bytes: int
    last_bytes: int
    next_bytes: int | None

    @property
    def capacity_bytes(self) -> int | None:
        """The knee: geometric mean of the footprints to both sides; None for the last."""
        if self.next_bytes is None:
            return None
        return round(math.sqrt(self.last_bytes * self.next_bytes))


def segment(values: Sequence[float], penalty: float) -> list[tuple[int, int]]:
    """Split a series into constant pieces: least squares plus ``penalty`` for each piece.

    Returns:
        Half-open ranges of indexes, in order.
    """
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    sums = np.concatenate(([0.0], np.cumsum(x)))
    squares = np.concatenate(([0.0], np.cumsum(x * x)))
    best = np.zeros(n + 1)
    cut = np.zeros(n + 1, dtype=np.int64)
    for end in range(1, n + 1):
        starts = np.arange(end)
        lengths = end - starts
        error = squares[end] - squares[:end] - (sums[end] - sums[:end]) ** 2 / lengths
        total = best[:end] + np.maximum(error, 0.0) + penalty
        cut[end] = int(np.argmin(total))
        best[end] = total[cut[end]]
    pieces = []
    end = n
    while end > 0:
        pieces.append((int(cut[end]), end))
        end = int(cut[end])
    return pieces[::-1]


def levels(
    footprints: Sequence[int],
    latencies_s: Sequence[float],
    *,
    penalty: float = 0.08,
    step: float = 1.5,
    shortest: int = 3,
    most: int | None = None,
) -> list[Plateau]:
    """The levels of memory behind a latency curve.

    Pieces that differ by less than a factor of ``step`` are one level. A piece of fewer
    than ``shortest`` points between two others is a transition, of no level. If more than
    ``most`` levels remain, those that differ least are one: a large shared cache has no
    flat latency.

    Raises:
        MachineError: fewer than 4 points, sizes that do not rise, or latencies that are
            not positive.
    """
    require(
        len(footprints) == len(latencies_s) and len(footprints) >= 4,
        "latency curve",
        f"{len(footprints)} footprints, {len(latencies_s)} latencies",
        expected="at least 4 points, a latency for each footprint",
        error=MachineError,
    )
    require(
        all(a < b for a, b in itertools.pairwise(footprints)),
        "latency curve footprints",
        list(footprints),
        expected="rising sizes",
        error=MachineError,
    )
    require(
        min(latencies_s) > 0,
        "latency curve",
        min(latencies_s),
        expected="latencies above zero",
        error=MachineError,
    )
    logs = np.log(np.asarray(latencies_s, dtype=np.float64))
    pieces = segment(list(logs), penalty)
    merged = _merge(pieces, logs, np.log(step), None)
    # A transition between two levels is short and lies between them.
    kept = [
        piece
        for i, piece in enumerate(merged)
        if piece[1] - piece[0] >= shortest or i in (0, len(merged) - 1)
    ]
    kept = _merge(kept, logs, np.log(step), most)
    levels = []
    for i, (start, end) in enumerate(kept):
        following = kept[i + 1][0] if i + 1 < len(kept) else None
        levels.append(
            Plateau(
                latency_s=float(np.exp(np.median(logs[start:end]))),
                first_bytes=int(footprints[start]),
                last_bytes=int(footprints[end - 1]),
                next_bytes=None if following is None else int(footprints[following]),
            )
        )
    return levels


def _merge(
    pieces: list[tuple[int, int]], logs: np.ndarray, least: float, most: int | None
) -> list[tuple[int, int]]:
    """Join neighbours, the closest first, until all differ enough and are few enough."""
    pieces = list(pieces)
    while len(pieces) > 1:
        middles = [float(np.median(logs[start:end])) for start, end in pieces]
        steps = [b - a for a, b in itertools.pairwise(middles)]
        i = int(np.argmin(steps))
        if steps[i] >= least and (most is None or len(pieces) <= most):
            break
        pieces[i : i + 2] = [(pieces[i][0], pieces[i + 1][1])]
    return pieces

"""Layers for stages of different speeds: Holmes's rule, and the exact cut.

Source: Yang et al., Holmes, 2023, section 3.3 (self-adapting pipeline partition).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from shoal.core.errors import PlanError, require


def _check(speeds: Sequence[float], layers: int) -> None:
    require(
        1 <= len(speeds) <= layers,
        "stages",
        len(speeds),
        expected=f"1 to {layers}, the number of layers",
        error=PlanError,
    )
    for stage, speed in enumerate(speeds):
        require(
            math.isfinite(speed) and speed > 0,
            f"speed of stage {stage}",
            speed,
            expected="a number above 0",
            error=PlanError,
        )


def adaptive(speeds: Sequence[float], layers: int, *, alpha: float = 1.05) -> tuple[int, ...]:
    """Layers of each stage in proportion to its speed, with somewhat more for the faster ones.

    Stage i gets the whole part of ``alpha * S_i / sum(S) * layers``, alpha being 1 for stages that
    are not faster than the mean, and at least one. What is left over goes, layer by layer, to the
    stage that has done with it first; what is too much is taken from the one that ends last.

    Args:
        speeds: S, of each stage in any unit.
        layers: N.
        alpha: 1 or more.

    Raises:
        PlanError: more stages than layers, or a speed that is none.
    """
    _check(speeds, layers)
    require(1 <= alpha <= 2, "alpha", alpha, expected="1 to 2", error=PlanError)
    # In exact arithmetic, so that a share of 21 layers is 21 and not 20.99...
    exactly, more = [Fraction(speed) for speed in speeds], Fraction(str(alpha))
    total = sum(exactly, Fraction(0))
    results = [
        max(1, math.floor((more if speed * len(speeds) > total else 1) * speed / total * layers))
        for speed in exactly
    ]
    while sum(results) != layers:
        if sum(results) < layers:
            stage = min(range(len(results)), key=lambda i: ((results[i] + 1) / speeds[i], i))
            results[stage] += 1
        else:
            stage = max(
                (i for i in range(len(results)) if results[i] > 1),
                key=lambda i: (results[i] / speeds[i], i),
            )
            results[stage] -= 1
    return tuple(results)


def slowest(given: Sequence[int], speeds: Sequence[float], costs: Sequence[float]) -> float:
    """Time of the slowest stage, in cost over speed."""
    best, start = 0.0, 0
    for own, speed in zip(given, speeds, strict=True):
        best = max(best, math.fsum(costs[start : start + own]) / speed)
        start += own
    return best


def exact(speeds: Sequence[float], costs: Sequence[float]) -> tuple[int, ...]:
    """Layers of each stage, in order, such that the slowest stage is as fast as it can be.

    By dynamic programming over stages and layers, in exact arithmetic; of equal cuts the one whose
    first stages have more layers.

    Raises:
        PlanError: more stages than layers, or a speed that is none.
    """
    layers = len(costs)
    _check(speeds, layers)
    sums = [Fraction(0)]
    for cost in costs:
        sums.append(sums[-1] + Fraction(cost))
    # best[n]: the last n layers on the stages from here on; (time, layers of the first of them).
    best: list[tuple[Fraction, int] | None] = [(Fraction(0), 0)] + [None] * layers
    table: list[list[tuple[Fraction, int] | None]] = []
    for behind, speed in enumerate(reversed(speeds)):
        row: list[tuple[Fraction, int] | None] = [None] * (layers + 1)
        ahead = len(speeds) - behind - 1  # stages before this one need a layer each
        for n in range(behind + 1, layers - ahead + 1):
            start = layers - n
            for own in range(n - behind, 0, -1):
                rest = best[n - own]
                if rest is None:
                    continue
                time = max(rest[0], (sums[start + own] - sums[start]) / Fraction(speed))
                result = row[n]
                if result is None or time < result[0]:
                    row[n] = time, own
        table.append(row)
        best = row
    given, left = [], layers
    for row in reversed(table):
        chosen = row[left]
        assert chosen is not None  # there are at least as many layers as stages
        given.append(chosen[1])
        left -= chosen[1]
    return tuple(given)

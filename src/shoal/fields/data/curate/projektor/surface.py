"""From scores at two sizes to the score of any mixture at any size.

Source: Kang et al., Performance Scaling via Optimal Transport: Enabling Data Selection from
Partially Revealed Sources, 2023.

Shapes: G mixtures that were probed, K sources, C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

Floats = npt.NDArray[np.float64]

_RIDGE = 1e-6


@dataclass(frozen=True)
class ScoreSurface:
    """Stage 1: the value at one size, by the mixture and its distance from validation data.

    Shares have sum 1, so the last source's linear column, and all constants but one, are left out.

    Args:
        weights: float64 [C], of the columns of the distance, and of those without it.
        unit: of the distance.
    """

    weights: Floats
    unit: float

    @classmethod
    def fit(cls, mixtures_GK: Floats, distances_G: Floats, values_G: Floats) -> ScoreSurface:
        """Least squares with a ridge of 1e-6.

        Args:
            mixtures_GK: that were probed, at least as many as there are columns, 4 K.
            distances_G: of them from the validation data.
            values_G: of their probes.
        """
        unit = float(distances_G.mean()) or 1.0
        columns_GC = _columns(mixtures_GK, distances_G / unit)
        ridge = _RIDGE * np.eye(columns_GC.shape[1])
        weights = np.linalg.solve(columns_GC.T @ columns_GC + ridge, columns_GC.T @ values_G)
        return cls(np.asarray(weights, np.float64), unit)

    def values(self, mixtures_GK: Floats, distances_G: Floats) -> Floats:
        """Float64 [G]: predicted values."""
        return np.asarray(_columns(mixtures_GK, distances_G / self.unit) @ self.weights)

    def gradient(self, mixture_K: Floats, distance: float, change_K: Floats) -> Floats:
        """Float64 [K]: how the value changes with each share, but for a constant.

        Args:
            mixture_K: shares.
            distance: of the mixture.
            change_K: how the distance changes with each share, but for a constant.
        """
        factor, rest = np.split(self.weights, 2)
        k = len(mixture_K)

        def slope(part: Floats) -> Floats:
            return np.asarray(2 * part[:k] * mixture_K + np.append(part[k : 2 * k - 1], 0.0))

        level = float(polynomials(mixture_K[None])[0] @ factor)
        return (slope(factor) * distance + level * change_K) / self.unit + slope(rest)


def projected(low: Floats, high: Floats, sizes: tuple[int, int], size: float) -> Floats:
    """Stage 2: values at any size, on lines in the logarithm of the size through two of them.

    Args:
        low: values at the smaller size.
        high: at the larger.
        sizes: smaller and larger.
        size: rows.
    """
    below, above = sizes
    total = math.log(above / below)
    line = (math.log(size / below) * high - math.log(size / above) * low) / total
    return np.asarray(line)


def lattice(sources: int, least: int) -> Floats:
    """Float64 [G, K]: mixtures in equal steps, with a step that makes at least so many.

    Args:
        sources: K, two or more.
        least: mixtures.
    """
    steps = 2
    while math.comb(steps + sources - 1, sources - 1) < least:
        steps += 1

    def shares(left: int, parts: int) -> list[tuple[int, ...]]:
        if parts == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left, -1, -1) for rest in shares(left - n, parts - 1)]

    return np.array(shares(steps, sources)) / steps


def on_simplex(point_K: Floats, most_K: Floats) -> Floats:
    """Float64 [K]: the nearest mixture with no share above its limit.

    Args:
        point_K: any numbers.
        most_K: limits, with a sum of 1 or more.
    """

    def shares(down: float) -> Floats:
        return np.asarray(np.clip(point_K - down, 0.0, most_K))

    low, high = float(point_K.min()) - 1.0, float(point_K.max())
    down = brentq(lambda at: float(shares(at).sum()) - 1.0, low, high, xtol=1e-14)
    nearest_K = shares(down)
    return np.asarray(nearest_K / nearest_K.sum())


def polynomials(mixtures_GK: Floats) -> Floats:
    """Float64 [G, 2 K]: squares, all linear terms but the last, and one."""
    ones_G1 = np.ones((len(mixtures_GK), 1))
    return np.concatenate([mixtures_GK**2, mixtures_GK[:, :-1], ones_G1], axis=1)


def _columns(mixtures_GK: Floats, distances_G: Floats) -> Floats:
    without = polynomials(mixtures_GK)
    return np.concatenate([distances_G[:, None] * without, without], axis=1)

"""Annealing: temperature, noise on the components, and how many points are left out.

Each is piecewise linear in the share of the iterations that is done.

Source: Exarchakis et al., ProSper: A Python Library for Probabilistic Sparse Coding with
Non-Standard Priors and Superpositions, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le
from pydantic import field_validator

from shoal.core.config import Value, parse

Points = tuple[tuple[Annotated[float, Ge(0), Le(1)], Annotated[float, Ge(0)]], ...]
"""(share of the iterations, value); flat before the first and after the last."""

# Dimensions beyond which likelihoods are so sharp that learning begins hotter.
_MANY = 500


class AnnealSchedule(Value):
    """How learning is annealed; the shares of the iterations run from 0 to 1.

    Args:
        temperature: of the posterior; 1 is the model's own.
        noise: standard deviation of what is added to the components, as a share of that of the
            data.
        cut: how far the points that gamma causes cannot explain are left out: 0 not at all, 1 all.
    """

    temperature: Points = ((0.0, 2.0), (0.7, 1.0))
    noise: Points = ((0.0, 0.1), (0.9, 0.0))
    cut: Points = ((0.0, 0.0), (2 / 3, 1.0))

    @field_validator("temperature", "noise", "cut")
    @classmethod
    def _ascending(cls, points: Points) -> Points:
        shares = [share for share, _ in points]
        if not points or sorted(set(shares)) != shares:
            raise ValueError("expected pairs (share, value) with ascending shares")
        return points

    @field_validator("temperature")
    @classmethod
    def _warm(cls, points: Points) -> Points:
        if min(value for _, value in points) < 1:
            raise ValueError("expected temperatures of at least 1")
        return points

    @field_validator("cut")
    @classmethod
    def _share(cls, points: Points) -> Points:
        if max(value for _, value in points) > 1:
            raise ValueError("expected shares of at most 1")
        return points

    @classmethod
    def usual(
        cls, dim: int, given: AnnealSchedule | Mapping[str, Any] | None = None, *, hot: float = 2.0
    ) -> AnnealSchedule:
        """The default for points of so many numbers, with what the user gave in its place.

        Args:
            dim: numbers of a point.
            given: a schedule, or some fields of one.
            hot: the first temperature for points of few numbers.

        Raises:
            ConfigError: there is no such schedule, or a point of it is out of range.
        """
        if isinstance(given, AnnealSchedule):
            return given
        first = hot * max(1.0, dim / _MANY)
        raw: dict[str, Any] = {"temperature": ((0.0, first), (0.7, 1.0)), **(given or {})}
        return parse(cls, raw, where="schedule")

    @property
    def settled(self) -> float:
        """Share of the iterations from which on nothing changes."""
        return max(points[-1][0] for points in (self.temperature, self.noise, self.cut))

    def at(self, share: float) -> tuple[float, float, float]:
        """Temperature, noise and cut when this share of the iterations is done."""
        temperature, noise, cut = (
            np.interp(share, [at for at, _ in points], [value for _, value in points])
            for points in (self.temperature, self.noise, self.cut)
        )
        return float(temperature), float(noise), float(cut)

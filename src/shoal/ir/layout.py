"""Which rank does what: the world of ranks as a grid of named axes.

Pure integers: no process group and no torch, so the groups of twelve thousand ranks are
listed in milliseconds. The same ranks carry two grids, one for attention (``pp``, ``dp``,
``cp``, ``tp``) and one for experts (``pp``, ``edp``, ``ep``, ``etp``), with the same stages.

Source: Narayanan et al., Megatron-LM, 2021 (order of the axes); Liu et al., MoE Parallel
Folding, 2025 (two grids over the same ranks).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import PlanError, require


@dataclass(frozen=True)
class Layout:
    """A mixed-radix grid: rank = coordinates, the last axis counting fastest.

    Args:
        axes: (name, size) from slowest to fastest.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        require(
            len(set(names)) == len(names),
            "layout.axes",
            "-".join(names),
            expected="every axis once",
            error=PlanError,
        )
        for name, size in self.axes:
            require(size >= 1, f"layout.{name}", size, expected="at least 1", error=PlanError)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``; 1 for an axis that the grid does not have."""
        return dict(self.axes).get(axis, 1)

    def coord(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of ``rank``.

        Raises:
            PlanError: there is no such rank.
        """
        require(
            0 <= rank < self.world,
            "rank",
            rank,
            expected=f"0 to {self.world - 1}",
            error=PlanError,
        )
        numbers: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, numbers[name] = divmod(rank, size)
        return {name: numbers[name] for name, _ in self.axes}

    def rank(self, coord: Mapping[str, int]) -> int:
        """The rank at ``coord``; axes that are not named are at 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coord.get(name, 0)
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Ranks that differ in ``axes`` alone, one tuple a group, each in rank order of the axes.

        Raises:
            PlanError: the grid has no such axis.
        """
        names = [name for name, _ in self.axes]
        for axis in axes:
            require(
                axis in names,
                "axis",
                axis,
                expected=f"one of {', '.join(names)}",
                error=PlanError,
            )
        inside = [names.index(name) for name in names if name in axes]
        outside = [i for i in range(len(names)) if i not in inside]
        grid = np.arange(self.world).reshape([size for _, size in self.axes])
        members = math.prod(self.axes[i][1] for i in inside)
        table = grid.transpose(*outside, *inside).reshape(-1, members)
        return list(map(tuple, table.tolist()))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of ``rank`` along ``axes``, without listing the others."""
        here = self.coord(rank)
        ranks = [rank]
        for name, size in self.axes:
            if name in axes:
                stride = self.rank({name: 1}) if size > 1 else 0
                ranks = [r + (i - here[name]) * stride for r in ranks for i in range(size)]
        return tuple(ranks)

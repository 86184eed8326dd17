"""Choosing among scored examples: the hardest, the easiest, with a floor for each class.

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022, section 4: every class keeps at least half of what it would have if all were pruned alike.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.cost.scaling.pruning import PruneAdvisor
from shoal.fields.data.prune.protocols import PruneError, RowIds, Scores


@part
class KeepHardest:
    """The examples with the highest scores, whatever their classes."""

    def select(
        self, scores: Scores, budget: int, *, groups: RowIds | None = None, dim: int = 1
    ) -> RowIds:
        """Of equal scores, those that come first."""
        return _best(-scores, budget)


@part
class KeepEasiest:
    """The examples with the lowest scores, whatever their classes."""

    def select(
        self, scores: Scores, budget: int, *, groups: RowIds | None = None, dim: int = 1
    ) -> RowIds:
        """Of equal scores, those that come first."""
        return _best(scores, budget)


@part
class KeepBalanced:
    """The hardest or the easiest examples, with a floor for each class.

    Args:
        side: ``hard``, ``easy``, or ``advised``: what the theory of pruning says for so many
            examples of such a dimension.
        floor: share of a class's proportional part of the budget that it keeps at least.
        at_least: rows that each class keeps at least.
    """

    side: Literal["advised", "hard", "easy"] = "advised"
    floor: Annotated[float, Ge(0), Le(1)] = 0.5
    at_least: Annotated[int, Ge(0)] = 0

    def select(
        self, scores: Scores, budget: int, *, groups: RowIds | None = None, dim: int = 1
    ) -> RowIds:
        """The floor of each class first, then the best of the others."""
        n = len(scores)
        side = self.side
        if side == "advised":
            side = PruneAdvisor(n, dim).advise(budget / n).side
        ranked = -scores if side == "hard" else scores
        if groups is None:
            return _best(ranked, budget)
        floors = self.floors(np.bincount(groups), budget)
        chosen = np.zeros(n, bool)
        for number, count in enumerate(floors):
            mine = np.flatnonzero(groups == number)
            chosen[mine[_best(ranked[mine], count)]] = True
        others = np.flatnonzero(~chosen)
        chosen[others[_best(ranked[others], budget - int(chosen.sum()))]] = True
        return np.flatnonzero(chosen)

    def floors(self, sizes: RowIds, budget: int) -> list[int]:
        """How many rows each class keeps at least.

        Args:
            sizes: int64 [classes], rows of each.
            budget: rows that are kept in all.

        Raises:
            PruneError: a class is smaller than its floor, or the floors are more than the budget.
        """
        total = int(sizes.sum())
        floors = []
        for number, size in enumerate(sizes.tolist()):
            # Rounded first, so that an exact share such as 7 is not 7.000000001 and kept as 8.
            floor = math.ceil(round(self.floor * budget * size / total, 9))
            floor = max(floor, self.at_least if size else 0)
            if floor > size:
                raise PruneError(
                    f"class {number} has {size} rows, and at_least = {self.at_least} are to be "
                    "kept of each; ask for fewer"
                )
            floors.append(floor)
        if sum(floors) > budget:
            raise PruneError(
                f"{len(floors)} classes keep {sum(floors)} rows at least, and {budget} are kept in "
                "all; keep more, or lower floor and at_least"
            )
        return floors


def _best(ranked: Scores, count: int) -> RowIds:
    """Sorted int64: the lowest, of equal ones those that come first."""
    return np.sort(np.argsort(ranked, kind="stable")[:count])

"""Boxing: what it costs to bring a tensor from one placement into another.

Total bytes that travel, where T is the bytes of the tensor:

======================  ===============  ===========================
from, to                same p ranks     other ranks: from p1 to p2
======================  ===============  ===========================
S(i) to S(j)            (p - 1) / p T    T
S to B                  (p - 1) T        p2 T
P to S                  (p - 1) T        p1 T
P to B                  2 (p - 1) T      (p1 + p2 - 1) T
S to P, B to S, B to P  0                T
no change               0                T (S), p2 T (B), p1 T (P)
======================  ===============  ===========================

With several axes a *step* changes one axis, in groups of ranks that differ in that axis
alone, or exchanges pieces between all ranks where nothing partial changes. Where sizes are
uneven the bytes of an exchange are those of the pieces that a rank has not got.
A transition is the cheapest sequence of steps, found by Dijkstra's algorithm over
placements: some have to pass through another one, as (S(0),S(0)) to (P,S(0)).

Source: Yuan et al., OneFlow, 2021, table 2.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import dijkstra

from shoal.core.errors import PlanError, require
from shoal.ir.placement import (
    Broadcast,
    Mesh,
    Partial,
    Placement,
    Reduction,
    Split,
    coordinates,
    every_placement,
    local_box,
    show_placement,
)

# Among ways of equal bytes the one with fewest steps is taken: elements weigh most, then steps
# that send, of which an exchange between all ranks is worth one on each axis and between.
_WEIGHT = 4096
_SENDS = 64


class BoxingStep(NamedTuple):
    """One collective, or one local change, of a transition.

    Args:
        source: placement before.
        target: placement after.
        elements: elements sent between ranks, in total.
    """

    source: Placement
    target: Placement
    elements: int

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that change."""
        pairs = zip(self.source, self.target, strict=True)
        return tuple(a for a, (old, new) in enumerate(pairs) if old != new)

    @property
    def name(self) -> str:
        """Usual name of what happens."""
        if is_view(self.source, self.target):
            return "slice"
        if len(self.axes) != 1:
            return "exchange"
        old, new = self.source[self.axes[0]], self.target[self.axes[0]]
        if isinstance(old, Partial):
            return "all_reduce" if isinstance(new, Broadcast) else "reduce_scatter"
        if isinstance(new, Partial):
            return "fill"
        if isinstance(old, Broadcast):
            return "exchange"
        return "all_gather" if isinstance(new, Broadcast) else "all_to_all"


def step_weight(source: Placement, target: Placement, elements: float) -> float:
    """What a step adds to the weight of a way; see ``Boxing.elements`` and ``Boxing.sends``."""
    steps = 2 * len(BoxingStep(source, target, 0).axes) - 1
    return elements * _WEIGHT + (steps * _SENDS if elements else 1)


def weighed(weight: float) -> tuple[int, int]:
    """(elements, steps that send) of the weight of a way."""
    elements, steps = divmod(int(weight), _WEIGHT)
    return elements, steps // _SENDS


def step_elements(
    shape: tuple[int, ...], mesh: Mesh, source: Placement, target: Placement
) -> int | None:
    """Elements sent by a single step; None if one step is not enough."""
    step = BoxingStep(source, target, 0)
    axes = step.axes
    if not axes:
        return 0
    changed = [*(source[a] for a in axes), *(target[a] for a in axes)]
    if not any(isinstance(axis, Partial) for axis in changed):
        total = 0
        for coord in coordinates(mesh):
            wanted = local_box(shape, target, mesh, coord)
            common = wanted.intersect(local_box(shape, source, mesh, coord))
            total += wanted.volume - (common.volume if common else 0)
        return total
    return _partial_step(shape, mesh, source, target)


def _partial_step(
    shape: tuple[int, ...], mesh: Mesh, source: Placement, target: Placement
) -> int | None:
    axes = BoxingStep(source, target, 0).axes
    if len(axes) != 1:
        return None
    axis = axes[0]
    old, new = source[axis], target[axis]
    split = [entry.dim for entry in (old, new) if isinstance(entry, Split)]
    if any(isinstance(inner, Split) and inner.dim in split for inner in source[axis + 1 :]):
        # The ranks of the group hold pieces that do not make one box together.
        return None
    if not isinstance(old, Partial):
        return 0
    if isinstance(new, Partial):
        return None
    # Every group holds its own part of the tensor, or a copy of it.
    copies = math.prod(
        size for b, size in enumerate(mesh) if b != axis and not isinstance(source[b], Split)
    )
    once = (mesh[axis] - 1) * copies * math.prod(shape)
    return 2 * once if isinstance(new, Broadcast) else once


class Boxing:
    """Every transition between placements of one tensor; :func:`boxing` makes and keeps them.

    Args:
        shape: of the tensor.
        mesh: ranks of each axis.
        reductions: which partial results are considered.
    """

    def __init__(
        self, shape: tuple[int, ...], mesh: Mesh, reductions: tuple[Reduction, ...]
    ) -> None:
        self.shape = shape
        self.mesh = mesh
        self.placements = every_placement(len(shape), len(mesh), reductions)
        self.index = {placement: i for i, placement in enumerate(self.placements)}
        self._direct = self._steps()
        result = dijkstra(self._direct, return_predecessors=True)
        self._cost: NDArray[np.float64] = result[0]
        self._before: NDArray[np.int32] = result[1]
        self.elements: NDArray[np.float64] = np.floor(self._cost / _WEIGHT)
        """[n, n]: elements that travel from placement i to j, all ranks together."""
        self.sends: NDArray[np.float64] = np.floor(self._cost % _WEIGHT / _SENDS)
        """[n, n]: collectives on the way, one after the other."""

    def cost(self, source: Placement, target: Placement) -> int:
        """Number of elements sent.

        Raises:
            PlanError: one of them is no placement of this tensor.
        """
        return int(self.elements[self._at(source), self._at(target)])

    def route(self, source: Placement, target: Placement) -> tuple[BoxingStep, ...]:
        """The steps of the cheapest way, in order; none where nothing changes.

        Raises:
            PlanError: one of them is no placement of this tensor.
        """
        first, here = self._at(source), self._at(target)
        steps: list[BoxingStep] = []
        while here != first:
            before = int(self._before[first, here])
            moved = int(self._direct[before, here] // _WEIGHT)
            steps.append(BoxingStep(self.placements[before], self.placements[here], moved))
            here = before
        return tuple(reversed(steps))

    def _at(self, placement: Placement) -> int:
        require(
            placement in self.index,
            "placement",
            show_placement(placement),
            expected=f"one for a tensor of shape {list(self.shape)} on a mesh of "
            f"{'x'.join(map(str, self.mesh))}",
            error=PlanError,
        )
        return self.index[placement]

    def _steps(self) -> NDArray[np.float64]:
        """[n, n]: weight of going from i to j in one step; infinite where one cannot."""
        n = len(self.placements)
        weights = np.full((n, n), np.inf)
        exchanged = self._exchanged()
        for i, source in enumerate(self.placements):
            for j, target in enumerate(self.placements):
                if i == j:
                    continue
                axes = BoxingStep(source, target, 0).axes
                changed = [*(source[a] for a in axes), *(target[a] for a in axes)]
                moved: float | None
                if any(isinstance(entry, Partial) for entry in changed):
                    moved = _partial_step(self.shape, self.mesh, source, target)
                else:
                    moved = exchanged[i, j]
                if moved is not None:
                    weights[i, j] = step_weight(source, target, moved)
        return weights

    def _exchanged(self) -> NDArray[np.float64]:
        """[n, n]: elements that ranks with placement i lack of j, all ranks together."""
        n, world, dims = len(self.placements), math.prod(self.mesh), len(self.shape)
        first = np.zeros((n, world, dims))
        last = np.zeros((n, world, dims))
        for i, placement in enumerate(self.placements):
            for rank, coord in enumerate(coordinates(self.mesh)):
                box = local_box(self.shape, placement, self.mesh, coord)
                first[i, rank], last[i, rank] = box.offset, box.stop
        volume = (last - first).prod(axis=2)
        missing = np.empty((n, n))
        for i in range(n):
            low = np.maximum(first[i], first)
            common = np.clip(np.minimum(last[i], last) - low, 0, None).prod(axis=2)
            missing[i] = (volume - common).sum(axis=1)
        return missing


@functools.lru_cache(maxsize=512)
def boxing(
    shape: tuple[int, ...], mesh: Mesh, reductions: tuple[Reduction, ...] = ("sum", "max")
) -> Boxing:
    """The transitions of a tensor of ``shape`` on ``mesh``."""
    return Boxing(shape, mesh, reductions)


def is_view(source: Placement, target: Placement) -> bool:
    """Whether ``target`` is nothing but slices of what a rank with ``source`` holds.

    An outer axis that would split a dimension which an inner axis splits already takes other
    pieces, so it is not.
    """
    for axis, (old, new) in enumerate(zip(source, target, strict=True)):
        if old == new:
            continue
        if not (isinstance(old, Broadcast) and isinstance(new, Split)):
            return False
        if new in source[axis + 1 :]:
            return False
    return True

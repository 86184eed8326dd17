"""Where a tensor lies on a mesh of ranks: split, whole or as partial results, axis by axis.

A *placement* has one entry for each axis of the mesh, slowest first:

``S(d)``
    split: the ranks of the axis hold consecutive pieces of dimension d, each of
    ceil(size / ranks) and the last ones of what is left, which may be nothing.
``B``
    broadcast: every rank of the axis holds the same.
``P(sum)``, ``P(max)``
    partial: the tensor is the sum, or the maximum, of what the ranks of the axis hold.

Two axes may split one dimension; the outer (first) axis splits first. A placement sums or
takes maxima, never both, since the one does not distribute over the other.

Source: Yuan et al., OneFlow, 2021 (split, broadcast, partial-value).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.core.boxes import Box
from shoal.core.errors import PlanError, require

Reduction: TypeAlias = Literal["sum", "max"]
Mesh: TypeAlias = tuple[int, ...]
"""Ranks of each axis, slowest first."""


@dataclass(frozen=True, slots=True)
class Split:
    """Consecutive pieces of dimension ``dim``."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """The same on every rank."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """What the ranks hold must be reduced by ``op`` to give the tensor."""

    op: Reduction = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


Axis: TypeAlias = Split | Broadcast | Partial
Placement: TypeAlias = tuple[Axis, ...]

_ENTRY = re.compile(r"S\((-?\d+)\)|S(\d+)|B|P(?:\((\w+)\))?", re.IGNORECASE)
_MESH = re.compile(r"\d+(x\d+)*")


def parse_mesh(text: str) -> Mesh:
    """A mesh such as ``2x4``: ranks of each axis, slowest first.

    Raises:
        PlanError: not such a text.
    """
    good = bool(_MESH.fullmatch(text.strip())) and all(int(n) > 0 for n in text.split("x"))
    require(good, "mesh", text, expected="ranks of each axis, such as 4 or 2x4", error=PlanError)
    return tuple(int(n) for n in text.split("x"))


def parse_placement(text: str, *, where: str = "placement") -> Placement:
    """Read ``S(0),B`` or ``P(sum)``; ``S0`` and ``P`` are read as well.

    Raises:
        PlanError: an entry is none of these; names it.
    """
    placement: list[Axis] = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        reduction = (match.group(3) or "sum").lower() if match else ""
        if match is None or reduction not in ("sum", "max"):
            raise PlanError(
                f"{where} = {text!r}: cannot read {entry.strip()!r}; expected one entry for "
                "each axis of the mesh, of S(dim), B, P(sum) and P(max), such as 'S(0),B'"
            )
        kind = entry.strip()[0].upper()
        if kind == "S":
            placement.append(Split(int(match.group(1) or match.group(2))))
        else:
            partial = Partial("max" if reduction == "max" else "sum")
            placement.append(Broadcast() if kind == "B" else partial)
    return tuple(placement)


def show_placement(placement: Placement) -> str:
    """``S(0),B``: what :func:`parse_placement` reads."""
    return ",".join(str(axis) for axis in placement)


def check_placement(
    placement: Placement, shape: Sequence[int], mesh: Mesh, *, where: str = "placement"
) -> Placement:
    """The placement, negative dimensions counted from the last.

    Raises:
        PlanError: another number of axes than the mesh has, a dimension that the tensor does
            not have, or sums beside maxima.
    """
    shown = show_placement(placement)
    require(
        len(placement) == len(mesh),
        where,
        shown,
        expected=f"{len(mesh)} entries, one for each axis of the mesh {'x'.join(map(str, mesh))}",
        error=PlanError,
    )
    axes: list[Axis] = []
    for axis in placement:
        if isinstance(axis, Split):
            require(
                -len(shape) <= axis.dim < len(shape),
                where,
                shown,
                expected=f"dimensions that a tensor of shape {list(shape)} has"
                + (f": 0 to {len(shape) - 1}" if shape else ", which is none; use B"),
                error=PlanError,
            )
            axis = Split(axis.dim % len(shape))
        axes.append(axis)
    require(
        len(_reductions(placement)) <= 1,
        where,
        shown,
        expected="sums or maxima, not both: the one does not distribute over the other",
        error=PlanError,
    )
    return tuple(axes)


def _reductions(placement: Placement) -> set[str]:
    return {axis.op for axis in placement if isinstance(axis, Partial)}


def every_placement(
    dims: int, axes: int, reductions: Sequence[Reduction] = ("sum",)
) -> list[Placement]:
    """All placements of a tensor of ``dims`` dimensions on a mesh of ``axes`` axes."""
    entries: list[Axis] = [
        *(Split(dim) for dim in range(dims)),
        Broadcast(),
        *(Partial(op) for op in reductions),
    ]
    made = itertools.product(entries, repeat=axes)
    return [placement for placement in made if len(_reductions(placement)) <= 1]


def coordinates(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """Coordinates of every rank, in rank order: the last axis counts fastest."""
    return itertools.product(*(range(size) for size in mesh))


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """(first, number) of piece ``index`` of ``parts`` of the range [start, start + size)."""
    width = -(-size // parts)
    first = min(index * width, size)
    return start + first, min(width, size - first)


def local_box(shape: Sequence[int], placement: Placement, mesh: Mesh, coord: Sequence[int]) -> Box:
    """What the rank at ``coord`` holds of a tensor of ``shape``.

    The rank at 0, 0, ... holds the largest box.
    """
    offset, size = [0] * len(shape), list(shape)
    for axis, parts, index in zip(placement, mesh, coord, strict=True):
        if isinstance(axis, Split):
            dim = axis.dim
            offset[dim], size[dim] = chunk(offset[dim], size[dim], parts, index)
    return Box(tuple(offset), tuple(size))


def largest_part(shape: Sequence[int], placement: Placement, mesh: Mesh) -> int:
    """Elements of the rank that holds most."""
    return math.prod(local_box(shape, placement, mesh, (0,) * len(mesh)).shape)

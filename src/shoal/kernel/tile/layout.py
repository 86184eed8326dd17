"""Which thread holds which element of a tile: layouts and their algebra.

A layout is a map from (thread, place within the thread) to an index of the tile. Each dimension
of the tile is cut in *modes*; every mode is spatial (its digit is one of the thread's number) or
local (of the place). A negative entry among the spatial modes means that so many threads hold
the same. Small layouts multiply to large ones::

    local(2, 1) * spatial(8, 4) * local(1, 2)     # a result of the GPU's m16n8k16 product

The product ``f * g`` puts a whole g where f has an element: of index i, f sees i ÷ shape(g) and g
sees i mod shape(g); ``thread = t_f T_g + t_g`` and ``place = l_f L_g + l_g``. It is associative and
does not commute. ``h / g`` is the f with ``f * g == h``.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025, section 4.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from shoal.core.errors import KernelError


@dataclass(frozen=True, slots=True)
class TileLayout:
    """A map from (thread, place) to an index.

    Args:
        shape: of the tile.
        mode_shape: sizes of the modes, dimension by dimension, from outer to inner; the product
            of those of a dimension is its size. No mode has size 1.
        spatial_modes: modes that make the number of the thread, most significant first; -r for r
            threads that hold the same.
        local_modes: modes that make the place within the thread, most significant first.
    """

    shape: tuple[int, ...]
    mode_shape: tuple[int, ...]
    spatial_modes: tuple[int, ...]
    local_modes: tuple[int, ...]

    def __post_init__(self) -> None:
        modes = sorted([*(m for m in self.spatial_modes if m >= 0), *self.local_modes])
        if (
            modes != list(range(len(self.mode_shape)))
            or any(size < 2 for size in self.mode_shape)
            or any(mode == -1 for mode in self.spatial_modes)
            or any(size < 1 for size in self.shape)
            or math.prod(self.mode_shape) != math.prod(self.shape)
        ):
            _bad(self, "every mode larger than 1 and named once, their product the tile's size")
        self.dims()

    def dims(self) -> tuple[int, ...]:
        """The dimension that each mode belongs to."""
        return _dims(self)

    @property
    def num_threads(self) -> int:
        """Threads that hold the tile."""
        return math.prod(self.mode_shape[m] if m >= 0 else -m for m in self.spatial_modes)

    @property
    def num_local(self) -> int:
        """Elements that each thread holds."""
        return math.prod(self.mode_shape[m] for m in self.local_modes)

    def table(self) -> np.ndarray:
        """The index of every (thread, place): int64 [T, L, rank]."""
        return _table(self)

    def index(self, thread: int, place: int) -> tuple[int, ...]:
        """Index of one element that a thread holds."""
        return tuple(int(x) for x in _table(self)[thread, place])

    def holders(self, index: Sequence[int]) -> list[tuple[int, int]]:
        """Every (thread, place) that holds an index."""
        result = np.argwhere((_table(self) == np.asarray(index)).all(-1))
        return [(int(thread), int(place)) for thread, place in result]

    def canonical(self) -> TileLayout:
        """The same map with as few modes as possible; equal maps have equal canonical forms."""
        return _canonical(self)

    def same(self, other: TileLayout) -> bool:
        """Whether both are the same map."""
        return self.shape == other.shape and _canonical(self) == _canonical(other)

    def __mul__(self, inner: TileLayout) -> TileLayout:
        """Every element of this one becomes a whole ``inner``.

        Raises:
            KernelError: they have different numbers of dimensions.
        """
        if len(self.shape) != len(inner.shape):
            raise KernelError(
                f"layouts of {len(self.shape)} and {len(inner.shape)} dimensions cannot be "
                f"multiplied: {self.shape} * {inner.shape}; give both the same number"
            )
        parts: list[int] = []
        place_f: dict[int, int] = {}
        place_g: dict[int, int] = {}
        for dim in range(len(self.shape)):
            for layout, places in ((self, place_f), (inner, place_g)):
                for mode, of in enumerate(layout.dims()):
                    if of == dim:
                        places[mode] = len(parts)
                        parts.append(layout.mode_shape[mode])

        def renamed(modes: Iterable[int], places: dict[int, int]) -> tuple[int, ...]:
            return tuple(places[m] if m >= 0 else m for m in modes)

        return TileLayout(
            tuple(a * b for a, b in zip(self.shape, inner.shape, strict=True)),
            tuple(parts),
            renamed(self.spatial_modes, place_f) + renamed(inner.spatial_modes, place_g),
            renamed(self.local_modes, place_f) + renamed(inner.local_modes, place_g),
        )

    def __truediv__(self, inner: TileLayout) -> TileLayout:
        """The f with ``f * inner`` the same map as this.

        Raises:
            KernelError: there is none.
        """
        return _divide(self, inner)

    def __str__(self) -> str:
        return (
            f"layout{list(self.shape)}(modes={list(self.mode_shape)}, "
            f"spatial={list(self.spatial_modes)}, local={list(self.local_modes)})"
        )


def _bad(layout: TileLayout, expected: str) -> NoReturn:
    raise KernelError(
        f"layout of shape {layout.shape}, modes {layout.mode_shape}, spatial "
        f"{layout.spatial_modes}, local {layout.local_modes}: expected {expected}"
    )


@functools.cache
def _dims(layout: TileLayout) -> tuple[int, ...]:
    dims: list[int] = []
    left = list(layout.mode_shape)
    for dim, size in enumerate(layout.shape):
        have = 1
        while have < size and left:
            have *= left.pop(0)
            dims.append(dim)
        if have != size:
            _bad(layout, f"the modes of dimension {dim} to have the product {size}")
    return tuple(dims)


@functools.lru_cache(maxsize=512)
def _table(layout: TileLayout) -> np.ndarray:
    shape = layout.mode_shape
    threads, places = np.arange(layout.num_threads), np.arange(layout.num_local)
    digits: dict[int, np.ndarray] = {}
    rest = threads
    for mode in reversed(layout.spatial_modes):
        size = shape[mode] if mode >= 0 else -mode
        if mode >= 0:
            digits[mode] = (rest % size)[:, None]
        rest = rest // size
    rest = places
    for mode in reversed(layout.local_modes):
        digits[mode] = (rest % shape[mode])[None, :]
        rest = rest // shape[mode]
    out = np.zeros((len(threads), len(places), len(layout.shape)), dtype=np.int64)
    for mode, dim in enumerate(layout.dims()):
        out[..., dim] = out[..., dim] * shape[mode] + digits[mode]
    out.setflags(write=False)
    return out


def _renumber(
    shape: tuple[int, ...],
    parts: Sequence[tuple[int, Sequence[int]]],
    layout: TileLayout,
) -> TileLayout:
    """A layout whose mode m is cut in (or, with its follower, merged to) ``parts[m]``."""
    sizes: list[int] = []
    names: dict[int, list[int]] = {}
    for mode, pieces in parts:
        names[mode] = list(range(len(sizes), len(sizes) + len(pieces)))
        sizes.extend(pieces)
    flat = itertools.chain.from_iterable
    return TileLayout(
        shape,
        tuple(sizes),
        tuple(flat(names.get(m, []) if m >= 0 else [m] for m in layout.spatial_modes)),
        tuple(flat(names.get(m, []) for m in layout.local_modes)),
    )


@functools.lru_cache(maxsize=1024)
def _canonical(layout: TileLayout) -> TileLayout:
    dims = layout.dims()

    def follows(a: int, b: int) -> bool:
        """Mode b is the next digit after mode a, both in the index and in its list."""
        return any(
            a in modes and modes[modes.index(a) + 1 : modes.index(a) + 2] == (b,)
            for modes in (layout.spatial_modes, layout.local_modes)
        )

    parts: list[tuple[int, list[int]]] = []
    for mode, size in enumerate(layout.mode_shape):
        if mode and dims[mode] == dims[mode - 1] and follows(mode - 1, mode):
            parts[-1][1][0] *= size
        else:
            parts.append((mode, [size]))
    out = _renumber(layout.shape, parts, layout)
    spatial_modes: list[int] = []
    for mode in out.spatial_modes:
        if mode < 0 and spatial_modes and spatial_modes[-1] < 0:
            spatial_modes[-1] *= -mode
        else:
            spatial_modes.append(mode)
    return TileLayout(out.shape, out.mode_shape, tuple(spatial_modes), out.local_modes)


def suffixes(layout: TileLayout) -> list[int]:
    """Product of the sizes of the modes that are inside each, within its dimension."""
    dims, out = layout.dims(), [1] * len(layout.mode_shape)
    for mode in range(len(out) - 2, -1, -1):
        if dims[mode] == dims[mode + 1]:
            out[mode] = out[mode + 1] * layout.mode_shape[mode + 1]
    return out


def _refined(layout: TileLayout, cuts: Sequence[set[int]]) -> TileLayout | None:
    """Modes cut where the index has these weights; None where they do not divide."""
    parts = []
    for mode, inside in enumerate(suffixes(layout)):
        end = inside * layout.mode_shape[mode]
        at = [inside, *sorted(c for c in cuts[layout.dims()[mode]] if inside < c < end), end]
        if any(b % a for a, b in itertools.pairwise(at)):
            return None
        parts.append((mode, [b // a for a, b in itertools.pairwise(at)][::-1]))
    return _renumber(layout.shape, parts, layout)


def _divide(outer: TileLayout, inner: TileLayout) -> TileLayout:
    def fail() -> NoReturn:
        raise KernelError(f"{outer} / {inner}: no layout times the second is the first")

    if len(outer.shape) != len(inner.shape) or any(
        a % b for a, b in zip(outer.shape, inner.shape, strict=True)
    ):
        fail()
    cuts = [
        {size}
        | {
            s
            for layout in (outer.canonical(), inner.canonical())
            for s, of in zip(suffixes(layout), layout.dims(), strict=True)
            if of == dim and s < size
        }
        for dim, size in enumerate(inner.shape)
    ]
    h, g = _refined(outer.canonical(), cuts), _refined(inner.canonical(), cuts)
    if h is None or g is None:
        fail()
    # The modes of h inside the shape of g, in the order of g's.
    weights, dims = suffixes(h), h.dims()
    inside = [m for m in range(len(weights)) if weights[m] < inner.shape[dims[m]]]
    if [h.mode_shape[m] for m in inside] != list(g.mode_shape):
        fail()
    spatial_modes, local_modes = list(h.spatial_modes), list(h.local_modes)
    for wanted, have in ((g.spatial_modes, spatial_modes), (g.local_modes, local_modes)):
        for mode in reversed(wanted):
            last = have.pop() if have else None
            if mode < 0 and last is not None and last < 0 and last % mode == 0:
                if last != mode:
                    have.append(-(last // mode))
            elif last is None or mode < 0 or last != inside[mode]:
                fail()
    if set(inside) & {*spatial_modes, *local_modes}:
        fail()
    rest = [m for m in range(len(weights)) if m not in inside]
    names = {m: new for new, m in enumerate(rest)}
    return TileLayout(
        tuple(a // b for a, b in zip(outer.shape, inner.shape, strict=True)),
        tuple(h.mode_shape[m] for m in rest),
        tuple(names[m] if m >= 0 else m for m in spatial_modes),
        tuple(names[m] for m in local_modes),
    )


def _primitive(
    shape: tuple[int, ...], order: Callable[[list[int]], list[int]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not shape or any(size < 1 for size in shape):
        raise KernelError(f"layout of shape {shape}: expected sizes of at least 1")
    modes = tuple(size for size in shape if size > 1)
    return modes, tuple(order(list(range(len(modes)))))


def local(*shape: int) -> TileLayout:
    """One thread that holds all, row after row."""
    modes, order = _primitive(shape, lambda m: m)
    return TileLayout(shape, modes, (), order)


def column_local(*shape: int) -> TileLayout:
    """One thread that holds all, column after column."""
    modes, order = _primitive(shape, lambda m: m[::-1])
    return TileLayout(shape, modes, (), order)


def spatial(*shape: int) -> TileLayout:
    """A thread for each element, row after row."""
    modes, order = _primitive(shape, lambda m: m)
    return TileLayout(shape, modes, order, ())


def column_spatial(*shape: int) -> TileLayout:
    """A thread for each element, column after column."""
    modes, order = _primitive(shape, lambda m: m[::-1])
    return TileLayout(shape, modes, order, ())


def replicate(threads: int, rank: int) -> TileLayout:
    """So many threads that hold the same one element."""
    if threads < 1 or rank < 1:
        raise KernelError(f"replicate({threads}, {rank}): expected at least 1 and 1")
    return TileLayout((1,) * rank, (), (-threads,) if threads > 1 else (), ())


def reduce(layout: TileLayout, dims: Iterable[int]) -> TileLayout:
    """The layout of a tile of which dimensions have shrunk to size 1.

    Threads that differed only in these hold the same; places that did fall together.
    """
    gone = {dim % len(layout.shape) for dim in dims}
    of = layout.dims()
    kept = [m for m in range(len(of)) if of[m] not in gone]
    names = {m: new for new, m in enumerate(kept)}
    return TileLayout(
        tuple(1 if dim in gone else size for dim, size in enumerate(layout.shape)),
        tuple(layout.mode_shape[m] for m in kept),
        tuple(m if m < 0 else names.get(m, -layout.mode_shape[m]) for m in layout.spatial_modes),
        tuple(names[m] for m in layout.local_modes if m in names),
    )


def row_strides(shape: Sequence[int]) -> list[int]:
    """Elements from one to the next along each dimension, row after row."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def show(layout: TileLayout, limit: int = 32) -> str:
    """A picture: for every element ``thread:place``, and ``a,b:place`` where several hold it.

    Args:
        layout: of one or two dimensions; leading ones of more are shown at 0.
        limit: rows and columns of the picture.
    """
    rows, columns = (1, *layout.shape)[-2:]
    holders: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for thread, places in enumerate(layout.table()):
        for place, index in enumerate(places):
            holders.setdefault(tuple(int(i) for i in index), []).append((thread, place))

    def cell(row: int, column: int) -> str:
        index = (0,) * (len(layout.shape) - 2) + (row, column)
        held = holders[index[-len(layout.shape) :]]
        threads = [str(thread) for thread, _ in held]
        if len(threads) > 4:
            threads = [*threads[:2], "..", threads[-1]]
        return f"{','.join(threads)}:{held[0][1]}"

    grid = [[cell(r, c) for c in range(min(columns, limit))] for r in range(min(rows, limit))]
    width = max(len(text) for line in grid for text in line)
    lines = [" ".join(text.rjust(width) for text in line) for line in grid]
    if columns > limit:
        lines = [f"{line} .." for line in lines]
    if rows > limit:
        lines.append("..")
    head = f"{layout}: {layout.num_threads} threads, {layout.num_local} elements each"
    return "\n".join([head, *lines])

"""Kernel tables: seconds of products, attention, experts and collectives as measured on a device.

A table is distilled to regular grids over the logarithms of its sizes (``scripts/kernel-tables``):
one file a device in the folder ``tables`` beside this module, with its source, version, licence
and the error of the distillation. Nothing in a file is executed: arrays of numbers, and JSON.

Source: NVIDIA, AIConfigurator 0.12.0 (Apache-2.0), measured kernel times; modified.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import zipfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError

VERSION = 1
"""Version of the files that this module reads."""


class Grid:
    """Seconds over a regular grid of sizes, interpolated on logarithms.

    Below its first size a kernel takes as long as there; beyond its last one its time grows with a
    power of the size, axis by axis.

    Args:
        axes: sizes, ascending, by axis.
        log2_us: logarithms of microseconds, one dimension an axis.
        powers: exponents of the time beyond the last size of an axis; 1 by default.
    """

    def __init__(
        self,
        axes: Sequence[Sequence[float]],
        log2_us: NDArray[np.floating[Any]],
        powers: Sequence[float] = (),
    ) -> None:
        if log2_us.shape != tuple(map(len, axes)):
            raise ValueError(f"times of shape {log2_us.shape} on axes of {[*map(len, axes)]} sizes")
        self._axes = [[math.log2(size) for size in axis] for axis in axes]
        self._powers = powers or (1.0,) * len(axes)
        self._values: list[float] = log2_us.astype(float).ravel().tolist()
        steps = [*itertools.accumulate(reversed(log2_us.shape[1:]), initial=1, func=int.__mul__)]
        self._steps = steps[::-1]
        # Sizes of a batch come again and again with other lengths.
        self._leading = functools.lru_cache(4096)(self._corners)

    @property
    def finite(self) -> bool:
        """Every place has a time."""
        return all(map(math.isfinite, self._values))

    def seconds(self, *sizes: float) -> float:
        """Seconds of the kernel at these sizes, one an axis."""
        corners, beyond = self._leading(sizes[:-1])
        axis, values, exponent = self._axes[-1], self._values, 0.0
        value = math.log2(max(sizes[-1], 1e-9))
        if axis[0] < value < axis[-1]:
            place = bisect_right(axis, value) - 1
            up = (value - axis[place]) / (axis[place + 1] - axis[place])
            down = 1.0 - up
            for at, weight in corners:
                exponent += weight * down * values[at + place]
                exponent += weight * up * values[at + place + 1]
        else:
            end = 0
            if value >= axis[-1]:
                end = len(axis) - 1
                beyond += self._powers[-1] * (value - axis[-1])
            for at, weight in corners:
                exponent += weight * values[at + end]
        result: float = 2.0 ** (exponent + beyond)
        return result * 1e-6

    def _corners(self, sizes: tuple[float, ...]) -> tuple[list[tuple[int, float]], float]:
        """(places of the neighbours on all axes but the last, weights), and what lies beyond."""
        corners, beyond = [(0, 1.0)], 0.0
        for axis, step, power, size in zip(
            self._axes[:-1], self._steps[:-1], self._powers[:-1], sizes, strict=True
        ):
            value = math.log2(max(size, 1e-9))
            if value >= axis[-1]:
                beyond += power * (value - axis[-1])
                corners = [(at + (len(axis) - 1) * step, weight) for at, weight in corners]
            elif value <= axis[0]:
                continue
            else:
                low = bisect_right(axis, value) - 1
                up = (value - axis[low]) / (axis[low + 1] - axis[low])
                corners = [
                    (at + (low + place) * step, weight * share)
                    for at, weight in corners
                    for place, share in ((0, 1.0 - up), (1, up))
                    if share
                ]
        return corners, beyond


@dataclass(frozen=True, eq=False)
class ExpertTable:
    """How far the experts of a mixture layer are from their bound, by shape and tokens.

    Args:
        shapes: hidden size, width of an expert on a rank, experts a token takes, experts, and
            ranks that the experts are divided over: [S, 5].
        tokens: of all ranks, ascending.
        log2_over_bound: logarithms of seconds over :func:`bound` at every number of tokens: [S, N].
    """

    shapes: NDArray[np.float64]
    tokens: Sequence[float]
    log2_over_bound: NDArray[np.float64]

    @functools.cached_property
    def _features(self) -> NDArray[np.float64]:
        return _features(self.shapes)

    @functools.cached_property
    def _curves(self) -> dict[tuple[float, ...], NDArray[np.float64]]:
        return {}

    def _curve(self, shape: tuple[float, ...]) -> NDArray[np.float64]:
        """Of a shape: its own, or the mean of the three nearest ones."""
        if shape not in self._curves:
            self._curves[shape] = self._near(shape)
        return self._curves[shape]

    def _near(self, shape: tuple[float, ...]) -> NDArray[np.float64]:
        away = np.abs(self._features - _features(np.array([shape]))).sum(1)
        nearest = np.argsort(away)[:3]
        if away[nearest[0]] < 1e-6:
            nearest = nearest[:1]
        weight = 1.0 / (away[nearest] + 0.1)
        curve: NDArray[np.float64] = weight @ self.log2_over_bound[nearest] / weight.sum()
        return curve

    def over_bound(self, tokens: float, *shape: float) -> float:
        """Seconds over the bound of experts of this shape."""
        at = math.log2(max(tokens, 1.0))
        return float(2.0 ** np.interp(at, np.log2(self.tokens), self._curve(shape)))


def _features(shapes: NDArray[np.float64]) -> NDArray[np.float64]:
    hidden, inner, top_k, experts, parts = np.log2(shapes).T
    return np.stack([hidden, inner, top_k, experts - parts, experts], axis=1)


@dataclass(frozen=True, eq=False)
class KernelTable:
    """Measurements of one device.

    Args:
        device: name of the file.
        flops: bf16 FLOP/s of its data sheet.
        stream: byte/s of its memory.
        inside: byte/s to the devices of its node, in one direction.
        source: where the times come from, with version and licence.
        grids: family, or family and format, such as ``gemm/fp8`` -> its grid.
        experts: format -> experts of mixture layers.
        errors: grid -> median relative error of the distillation.
        header: all that the file says beside its arrays.
    """

    device: str
    flops: float
    stream: float
    inside: float
    source: str
    grids: Mapping[str, Grid]
    experts: Mapping[str, ExpertTable]
    errors: Mapping[str, float]
    header: Mapping[str, Any]


def read_table(path: Traversable, *, writer: str = "scripts/kernel-tables") -> KernelTable:
    """Read one file.

    Raises:
        ConfigError: it is no kernel table, or one of another version; names the file.
    """
    where = f"kernel table {path.name}"
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header.get("version") != VERSION:
                raise ConfigError(
                    f"{where}: version {header.get('version')}; this release reads {VERSION}; "
                    f"write it again with {writer}"
                )
            axes, powers = header["axes"], header["powers"]
            family = {name: name.split("/")[0] for name in arrays.files}
            return KernelTable(
                device=header["device"],
                flops=header["flops"],
                stream=header["stream"],
                inside=header["inside"],
                source=header["source"],
                grids={
                    name: Grid(axes.get(name, axes.get(kind)), arrays[name], powers.get(kind, ()))
                    for name, kind in family.items()
                    if kind not in ("header", "experts", "shapes")
                },
                experts={
                    name.split("/")[1]: ExpertTable(
                        arrays[f"shapes/{name.split('/')[1]}"].astype(float),
                        axes["experts"],
                        arrays[name].astype(float),
                    )
                    for name, kind in family.items()
                    if kind == "experts"
                },
                errors=header["errors"],
                header=header,
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{where}: no kernel table ({error}); expected a file that {writer} wrote"
        ) from error


@functools.cache
def shipped(device: str) -> KernelTable:
    """The shipped table of a device, such as ``h100_sxm``."""
    return read_table(resources.files("shoal.cost.kernels") / "tables" / f"{device}.npz")

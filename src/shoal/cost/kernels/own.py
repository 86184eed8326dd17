"""Kernel tables of the user's own card: measured by ``shoal probe gpu``, kept in Shoal's home.

The files are those of the shipped tables (:mod:`shoal.cost.kernels.tables`); they also say which
card, driver and torch measured them and when, and keep every measured point, so that a sweep goes
on where it stopped.
"""

from __future__ import annotations

import datetime
import functools
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, MachineError
from shoal.core.files import shoal_home, write_atomic
from shoal.cost.kernels.distil import AXES, POWERS, distil
from shoal.cost.kernels.tables import VERSION, KernelTable, read_table
from shoal.machine.probes.kernel_sweep import (
    KernelPoint,
    coarse_to_fine,
    device_facts,
    measured_kernels,
)
from shoal.machine.protocols import ProbeContext
from shoal.machine.shorthand import device_key

GRIDS: dict[str, Sequence[Sequence[int]]] = {
    "gemm/bf16": AXES["gemm"],
    "gemm/fp8": AXES["gemm"],
    **{
        f"{family}/bf16/{width}": AXES[family]
        for family in ("decode", "prompt")
        for width in (64, 128)
    },
}
"""Grids that a sweep measures -> their axes."""
_WRITER = "shoal probe gpu, after the file was moved away"
_FACTS = ("name", "driver", "torch")


class SweepResult(NamedTuple):
    """What a sweep has until now.

    Args:
        done: places of the grids that are known.
        facts: name, driver and torch.
        grids: grid -> (measured, what the device cannot).
    """

    path: Path
    done: int
    total: int
    facts: Mapping[str, str]
    grids: Mapping[str, tuple[int, int]]


def own_path(device: str) -> Path:
    """Where the table of a device of this name is kept, however the name is written."""
    return shoal_home() / "kernels" / f"{device_key(device) or 'device'}.npz"


def own_table(device: str) -> tuple[KernelTable | None, str]:
    """The table of the user's own card of this name, and what is wrong with its file."""
    path = own_path(device)
    try:
        stat = path.stat()
    except OSError:
        return None, ""
    return _stored(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(maxsize=8)
def _stored(path: Path, stamp: tuple[int, ...]) -> tuple[KernelTable | None, str]:
    del stamp  # of the file, so that a new one is read
    try:
        table, _ = read_own(path)
    except ConfigError as cause:
        return None, f"the shipped kernel table is taken: {cause}"
    return (table, "") if table.grids else (None, "")


def read_own(path: Path) -> tuple[KernelTable, list[KernelPoint]]:
    """A table of one's own and its measured points.

    Raises:
        ConfigError: it is none, is of another version, or has impossible numbers; names the file.
    """
    table = read_table(path, writer=_WRITER)
    try:
        points = [
            KernelPoint(name, tuple(sizes), seconds)
            for name, rows in table.header["points"].items()
            for *sizes, seconds in rows
        ]
        missing = [name for name in _FACTS if name not in table.header["measured_by"]]
        if missing:
            raise ValueError(f"it does not say its {', '.join(missing)}")
        for point in points:
            good = all(isinstance(size, int) and size > 0 for size in point.sizes)
            seconds = point.seconds
            if not good or (seconds is not None and not 0 < seconds < math.inf):
                raise ValueError(f"{point.name} {point.sizes}: {seconds} s")
        for name, grid in table.grids.items():
            if not grid.finite:
                raise ValueError(f"{name} is not finite")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{path}: no kernel table of one's own ({error}); write it again with {_WRITER}"
        ) from error
    return table, points


def sweep_kernels(
    context: ProbeContext,
    *,
    budget_s: float,
    device: str = "cuda",
    path: Path | None = None,
    grids: Mapping[str, Sequence[Sequence[int]]] | None = None,
    progress: Callable[[float, float, str], None] | None = None,
) -> SweepResult:
    """Measure kernels of this host's card until the budget is over; goes on where it stopped.

    Args:
        context: with the measuring process.
        budget_s: seconds.
        device: of torch.
        path: the table; :func:`own_path` of the card if not given.
        grids: what to measure; :data:`GRIDS` if not given.
        progress: called with (kernels done, kernels to do, what happens now).

    Raises:
        MachineError: torch sees no such device, or the table is of another card, driver or torch.
        ConfigError: the file is damaged or of another version.
        MissingExtraError: torch is not installed.
    """
    facts = device_facts(context, device)
    path = path or own_path(facts["name"])
    grids = GRIDS if grids is None else grids
    points: list[KernelPoint] = []
    if path.exists():
        table, points = read_own(path)
        before = table.header["measured_by"]
        other = [name for name in _FACTS if before[name] != facts[name]]
        if other:
            was = "; ".join(f"{n} was {before[n]!r} and is {facts[n]!r}" for n in other)
            raise MachineError(
                f"{path}: these kernels were measured elsewhere ({was}); give another file with "
                "--out, or move this one away"
            )
    known = {point[:2] for point in points}
    wanted = [point for point in coarse_to_fine(grids) if point[:2] not in known]
    size = 2**28 if device == "cuda" else 2**20
    times = context.worker().call("elementwise", bytes_=size, threads=1, repeats=5, device=device)
    stream = 3 * size / sorted(times)[2]
    for fresh in measured_kernels(
        context,
        wanted,
        device=device,
        memory_bytes=float(facts["memory_bytes"]),
        budget_s=budget_s,
        works={point.name for point in points if point.seconds is not None},
        progress=progress,
    ):
        points += fresh
        write_atomic(path, _packed(points, grids, facts, stream))
    count = {name: [p.seconds is not None for p in points if p.name == name] for name in grids}
    return SweepResult(
        path=path,
        done=len(points),
        total=len(known) + len(wanted),
        facts={name: facts[name] for name in _FACTS},
        grids={name: (sum(own), len(own) - sum(own)) for name, own in count.items()},
    )


def _packed(
    points: Sequence[KernelPoint],
    grids: Mapping[str, Sequence[Sequence[int]]],
    facts: Mapping[str, str],
    stream: float,
) -> bytes:
    """The file of these points: a grid where its coarse places are known, and the points."""
    arrays: dict[str, Any] = {}
    rows: dict[str, list[list[float | None]]] = {}
    for name, axes in grids.items():
        own = [point for point in points if point.name == name]
        rows[name] = [[*point.sizes, point.seconds] for point in own]
        known = [point for point in own if point.seconds is not None]
        asked = {point.sizes for point in own}
        # The first fineness is whole, so every axis has places to interpolate between.
        coarse = math.prod(len({*axis[::8], axis[-1]}) for axis in axes)
        if len(asked) >= coarse and len(known) >= 2 ** len(axes):
            sizes = [np.array([p.sizes[i] for p in known], float) for i in range(len(axes))]
            ms = np.array([1e3 * p.seconds for p in known if p.seconds is not None])
            arrays[name] = distil([list(axis) for axis in axes], sizes, ms)[0].astype(np.float32)
    rates = [
        2.0 * math.prod(p.sizes) / p.seconds
        for p in points
        if p.name == "gemm/bf16" and p.seconds is not None
    ]
    today = datetime.date.today().isoformat()
    header = {
        "version": VERSION,
        "device": facts["name"],
        "flops": max(rates, default=0.0),
        "stream": stream,
        "inside": 0.0,
        "source": f"measured by shoal probe gpu, {today}, driver {facts['driver'] or 'unknown'}, "
        f"torch {facts['torch']}",
        "axes": {name: [list(axis) for axis in axes] for name, axes in grids.items()},
        "powers": POWERS,
        "errors": {},
        "measured_by": {**{name: facts[name] for name in _FACTS}, "date": today},
        "points": rows,
    }
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()

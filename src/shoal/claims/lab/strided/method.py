"""How bytes with holes travel fastest: four ways, and the sum of what each one takes.

- ``oneshot``: pack into memory of the host, send that, unpack;
- ``device``: pack on the device, send from there;
- ``staged``: pack on the device, copy to the host, send, copy back, unpack;
- ``blocks``: send every block as it lies, receive every one into its place.

What the parts take was measured once, on a grid; between its points the logarithm of the time
is bilinear in the logarithms of the sizes, and beyond them it goes on as it ended.

Source: Pearson et al., TEMPI, 2021, section 5.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, Self

from pydantic import model_validator

from shoal.core.config import Value
from shoal.core.errors import KernelError, require
from shoal.kernel.strided.canonical import Layout, StridedBlock

Method = Literal["oneshot", "device", "staged", "blocks"]
METHODS: tuple[Method, ...] = ("oneshot", "device", "staged", "blocks")

MESSAGES = 4096
"""Blocks beyond which one message a block is not used."""


class TimeGrid(Value):
    """Seconds at every pair of two sizes; of one size, where ``columns`` is one number."""

    rows: tuple[float, ...]
    columns: tuple[float, ...] = (1.0,)
    seconds: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        shape = [len(row) for row in self.seconds]
        require(
            len(self.rows) >= 1 and shape == [len(self.columns)] * len(self.rows),
            "strided grid",
            f"rows of {shape} seconds",
            expected=f"{len(self.rows)} rows of {len(self.columns)}",
            error=KernelError,
        )
        for sizes in (self.rows, self.columns):
            require(
                sizes[0] > 0 and all(a < b for a, b in pairwise(sizes)),
                "strided grid sizes",
                sizes,
                expected="positive and rising",
                error=KernelError,
            )
        require(
            all(0 < s < math.inf for row in self.seconds for s in row),
            "strided grid seconds",
            "0, less or no number",
            expected="more than 0",
            error=KernelError,
        )
        return self

    def at(self, row: float, column: float = 1.0) -> float:
        """Seconds at two sizes."""
        i, across = _between(self.rows, row)
        j, along = _between(self.columns, column)
        total = 0.0
        for di, share in ((0, 1 - across), (1, across)):
            for dj, part in ((0, 1 - along), (1, along)):
                if share and part:
                    total += share * part * math.log(self.seconds[i + di][j + dj])
        return math.exp(total)


def _between(sizes: Sequence[float], size: float) -> tuple[int, float]:
    """The point before a size, and how far it is to the next one; beyond 0 .. 1 outside."""
    if len(sizes) == 1:
        return 0, 0.0
    index = min(max(bisect_right(sizes, size) - 1, 0), len(sizes) - 2)
    low, high = math.log(sizes[index]), math.log(sizes[index + 1])
    return index, (math.log(max(size, 1e-9)) - low) / (high - low)


class LocalityTimes(Value):
    """What was measured between two ranks of one locality.

    Args:
        pack: seconds by packed bytes and bytes of a block, into the host's memory.
        unpack: the same, out of it.
        send: seconds of one message, by bytes, from the host to the host.
        blocks: seconds of many messages behind each other, by their number and their bytes.
        copy_out: device to host, by bytes; None where there is no device.
        copy_in: host to device.
        device_pack: as ``pack``, into the device's memory.
        device_unpack: as ``unpack``, out of it.
        device_send: one message from device to device.
    """

    pack: TimeGrid
    unpack: TimeGrid
    send: TimeGrid
    blocks: TimeGrid
    copy_out: TimeGrid | None = None
    copy_in: TimeGrid | None = None
    device_pack: TimeGrid | None = None
    device_unpack: TimeGrid | None = None
    device_send: TimeGrid | None = None


class MethodModel:
    """Predicts the methods' times and remembers what it chose.

    Both ends of a message must hold the same tables: share one rank's with
    :func:`shoal.claims.lab.strided.messages.agreed`.

    Args:
        parts: locality of a peer (``node``: on this node; ``far``: on another) -> tables.
    """

    def __init__(self, parts: Mapping[str, LocalityTimes]) -> None:
        require(
            bool(parts), "strided tables", [], expected="at least one locality", error=KernelError
        )
        self.parts = dict(parts)
        self._chosen: dict[tuple[Layout, str], Method] = {}

    def seconds(self, layout: Layout, locality: str = "node") -> dict[Method, float]:
        """Method -> predicted seconds, of those that are possible.

        Raises:
            KernelError: nothing was measured for this locality.
        """
        require(
            locality in self.parts,
            "strided locality",
            locality,
            expected=f"one of {', '.join(self.parts)}",
            error=KernelError,
        )
        parts = self.parts[locality]
        size = max(1, layout.size)
        block = max(1.0, layout.size / max(1, layout.runs))
        packing = parts.pack.at(size, block) + parts.unpack.at(size, block)
        seconds: dict[Method, float] = {"oneshot": packing + parts.send.at(size)}
        if parts.device_pack and parts.device_unpack:
            on_device = parts.device_pack.at(size, block) + parts.device_unpack.at(size, block)
            if parts.device_send:
                seconds["device"] = on_device + parts.device_send.at(size)
        else:
            on_device = packing
        if parts.copy_out and parts.copy_in:
            copies = parts.copy_out.at(size) + parts.copy_in.at(size)
            seconds["staged"] = on_device + copies + parts.send.at(size)
        if isinstance(layout, StridedBlock) and layout.size and layout.runs <= MESSAGES:
            seconds["blocks"] = parts.blocks.at(layout.runs, layout.counts[0])
        return seconds

    def choose(self, layout: Layout, locality: str = "node") -> Method:
        """The method that is predicted to be fastest; asked once a layout and locality."""
        key = (layout, locality)
        if key not in self._chosen:
            times = self.seconds(layout, locality)
            self._chosen[key] = min(times, key=lambda method: times[method])
        return self._chosen[key]


def measure_packing(
    *,
    largest: int = 2**24,
    repeats: int = 5,
    pitch: int = 512,
    clock: Callable[[], float] | None = None,
) -> tuple[TimeGrid, TimeGrid]:
    """Tables of pack and unpack on this host: bytes 2^(2i+6), blocks of 2^j bytes.

    Args:
        largest: packed bytes of the last row.
        repeats: runs of which the median counts.
        pitch: bytes from block to block, at least; longer blocks lie twice their length apart.
        clock: seconds.
    """
    import statistics
    import time

    import torch

    from shoal.claims.lab.strided.api import pack, unpack
    from shoal.kernel.strided.datatype import hvector, named

    now = clock or time.perf_counter
    sizes = [2.0**k for k in range(6, largest.bit_length(), 2)]
    blocks = [2.0**k for k in range(0, largest.bit_length(), 2)]
    tables: tuple[list[list[float]], list[list[float]]] = ([], [])
    for size in sizes:
        rows: tuple[list[float], list[float]] = ([], [])
        for block in blocks:
            # A block larger than the whole is the whole.
            length = int(min(block, size))
            stride = max(pitch, 2 * length)
            datatype = hvector(int(size) // length, 1, stride, named(length))
            buffer = torch.zeros(datatype.extent, dtype=torch.uint8)
            packed = torch.zeros(int(size), dtype=torch.uint8)
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats + 1):
                begin = now()
                pack(buffer, datatype, out=packed)
                middle = now()
                unpack(packed, buffer, datatype)
                times[0].append(middle - begin)
                times[1].append(now() - middle)
            for row, taken in zip(rows, times, strict=True):
                row.append(max(1e-9, statistics.median(taken[1:])))
        for table, row in zip(tables, rows, strict=True):
            table.append(row)
    results = [
        TimeGrid(rows=tuple(sizes), columns=tuple(blocks), seconds=tuple(map(tuple, table)))
        for table in tables
    ]
    return results[0], results[1]

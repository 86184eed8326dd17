"""Latency of each level of memory, and the sizes of the caches, by a pointer chase.

One node a cache line, linked in one random cycle, so that no prefetcher can guess the
next address and every line is visited once. The cost of the loop itself is measured
without the loads and subtracted.

Source: McVoy and Staelin, lmbench, 1996; Sattolo's algorithm, 1986.
"""

from __future__ import annotations

import ctypes
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError, require
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine import host
from shoal.machine.native import library
from shoal.machine.protocols import ProbeContext
from shoal.machine.segments import levels

LINE = 64
NAMES = ("l1d", "l2", "l3", "l4")


def footprints(smallest: int, largest: int) -> list[int]:
    """Half-octaves from ``smallest`` to ``largest`` bytes, whole cache lines."""
    sizes, step = [], 0
    while (size := int(smallest * 2 ** (step / 2)) // LINE * LINE) <= largest:
        sizes.append(size)
        step += 1
    return sizes


class PointerChain:
    """A linked footprint of ``bytes_`` bytes; a context manager that owns the mapping.

    Raises:
        MachineError: the footprint is above the free memory, or below two lines.
    """

    def __init__(self, bytes_: int, *, huge: bool, seed: int = 0, random: bool = True) -> None:
        free = host.memory_available()
        require(
            2 * LINE <= bytes_ <= 0.8 * free,
            "probe.memory_latency footprint",
            bytes_,
            expected=f"128 bytes to {int(0.8 * free)} bytes, 80 % of the free memory",
            hint="choose a smaller probe.memory_latency.largest_bytes",
            error=MachineError,
        )
        self._chase = library("chase")
        self.bytes, self.lines = bytes_, bytes_ // LINE
        granted = ctypes.c_int()
        self.base: int = self._chase.chase_map(bytes_, int(huge), ctypes.byref(granted))
        if not self.base:
            raise MachineError(
                f"probe.memory_latency: {bytes_} bytes cannot be mapped; "
                "free memory or choose a smaller largest_bytes"
            )
        self.granted = bool(granted.value)
        if self._chase.chase_link(self.base, self.lines, LINE, seed, int(random)):
            self.close()
            raise MachineError(
                f"probe.memory_latency: no memory to link {self.lines} lines; "
                "choose a smaller largest_bytes"
            )
        self._place = ctypes.c_void_p(self.base)

    def __enter__(self) -> PointerChain:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the memory back."""
        if self.base:
            self._chase.chase_unmap(self.base, self.bytes)
            self.base = 0

    def follow(self) -> list[int]:
        """The line each line points to, read from the memory itself."""
        words = (ctypes.c_uint64 * (self.lines * LINE // 8)).from_address(self.base)
        return [(words[i * LINE // 8] - self.base) // LINE for i in range(self.lines)]

    def samples(self, loads: int, repeats: int) -> list[float]:
        """Seconds of one dependent load, ``repeats`` times; each goes on where the last ended."""
        blocks = max(1, loads // 16)
        self._chase.chase_warm(self.base, self.lines, LINE)
        self._chase.chase_run(ctypes.byref(self._place), max(1, min(blocks, self.lines // 16)))
        overhead = min(
            float(self._chase.chase_overhead(ctypes.byref(self._place), blocks)) for _ in range(3)
        )
        return [
            float(self._chase.chase_run(ctypes.byref(self._place), blocks)) - overhead
            for _ in range(repeats)
        ]


@part
class MemoryLatency:
    """Latency per footprint, with and without huge pages, and the cache levels that it shows.

    Args:
        smallest_bytes: the first footprint.
        largest_bytes: the last footprint; 0 for 256 MiB (fast) or 1 GiB.
        repeats: samples of each footprint; 0 for 7 (fast) or 15.
        order: ``random``, or ``sequential`` to measure the effect of the prefetcher.
        huge_pages: ``both``, ``on`` or ``off``; the levels come from huge pages where
            the system grants them.
    """

    smallest_bytes: Annotated[int, Ge(4 * LINE)] = 4096
    largest_bytes: int = 0
    repeats: Annotated[int, Ge(0)] = 0
    huge_pages: str = "both"
    order: str = "random"

    def __post_init__(self) -> None:
        where = "probe.memory_latency"
        require(
            self.largest_bytes == 0 or self.largest_bytes >= 8 * self.smallest_bytes,
            f"{where}.largest_bytes",
            self.largest_bytes,
            expected="0, or 8 times smallest_bytes or more",
        )
        require(
            self.order in ("random", "sequential"),
            f"{where}.order",
            self.order,
            expected="random or sequential",
        )
        require(
            self.huge_pages in ("both", "on", "off"),
            f"{where}.huge_pages",
            self.huge_pages,
            expected="both, on or off",
        )

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``latency`` and ``latency_small_pages`` (s, at bytes).

        Then for each level found its ``NAME.latency`` (s) and ``NAME.capacity`` (B).
        """
        largest = self.largest_bytes
        if not largest:
            wanted = 2**28 if context.fast else 2**30
            largest = int(min(wanted, max(2**20, 0.25 * host.memory_available())))
        sizes = footprints(self.smallest_bytes, largest)
        measurements: list[Measurement] = []
        curves: dict[bool, list[float]] = {}
        for huge in (True, False):
            if self.huge_pages == ("off" if huge else "on"):
                continue
            curve = self._curve(context, sizes, huge=huge)
            if curve:
                curves[huge] = [item.median for item in curve]
                measurements += curve
        if not curves:
            return measurements
        curve_s = curves.get(True) or curves[False]
        caches = len(host.caches())
        plateaus = levels(sizes, curve_s, most=caches + 1 if caches else len(NAMES))
        names = [*NAMES[: len(plateaus) - 1], "dram"]
        for name, level, slower in zip(names, plateaus, [*plateaus[1:], None], strict=True):
            place = [
                i for i, size in enumerate(sizes) if level.first_bytes <= size <= level.last_bytes
            ]
            measurements.append(
                context.measured(
                    "memory_latency",
                    f"{name}.latency",
                    "s",
                    [curve_s[i] for i in place],
                    plausible=slower is None or slower.latency_s > level.latency_s,
                )
            )
            if level.capacity_bytes is not None and level.next_bytes is not None:
                knee = (level.last_bytes, level.capacity_bytes, level.next_bytes)
                measurements.append(
                    context.measured(
                        "memory_latency",
                        f"{name}.capacity",
                        "B",
                        knee,
                        note="the knee lies between low and high",
                    )
                )
        return measurements

    def _curve(self, context: ProbeContext, sizes: list[int], *, huge: bool) -> list[Measurement]:
        repeats = self.repeats or (7 if context.fast else 15)
        most = 2**16 if context.fast else 2**18
        quantity = "latency" if huge else "latency_small_pages"
        curve: list[Measurement] = []
        for size in sizes:
            with PointerChain(
                size, huge=huge, seed=len(curve), random=self.order == "random"
            ) as chain:
                if not chain.granted and huge:
                    context.skip("memory_latency.latency", "the system grants no huge pages")
                    return []
                values = chain.samples(max(2**14, min(chain.lines, most)), repeats)
            middle = sorted(values)[len(values) // 2]
            previous = curve[-1].median if curve else 0.0
            # Noise apart, a larger footprint is not faster, and no load takes under 0.1 ns.
            fine = middle > 1e-10 and middle > 0.6 * previous
            curve.append(
                context.measured(
                    "memory_latency",
                    quantity,
                    "s",
                    values,
                    at=size,
                    plausible=fine,
                    note="" if fine else "faster than a smaller footprint",
                )
            )
        return curve

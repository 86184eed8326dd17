"""The engines of bipolar products on a CPU, and what each would take. No torch here.

Cycles come from what the probe ``units`` measured on the machine, in operations per cycle of
one core: ``popcount``, ``dot_int8``, ``tile_int8``; so does the crossover between engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from shoal.core.native import cpu_flags
from shoal.ir import Machine
from shoal.ir.machine import Measurement
from shoal.kernel.native.tiles import tiles_granted

_BASE = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
# Operations per cycle, Hz and B/s of a server core of 2023, for machines that were not probed.
_UNITS = {"popcount": 512.0, "dot_int8": 256.0, "tile_int8": 2048.0}
_CLOCK, _BANDWIDTH = 2.5e9, 1e10
# Rows that share one pass over expanded weights (planes.cpp).
_PASS_ROWS = 256


@dataclass(frozen=True)
class PlanesEngine:
    """One way to compute.

    Args:
        name: of the backend, without ``cpp_``.
        symbol: of the function in ``planes.cpp``.
        tiles: it takes the weights as tiles of planes; else as masks.
        block: rows of the input that lie together; 0 where it takes planes.
        group: the groups of K that it can sum are multiples of this.
        needs: flags of the CPU.
        cycles: (m, n, k, w, a, units) -> cycles of one core.
    """

    name: str
    symbol: str
    tiles: bool
    block: int
    group: int
    needs: frozenset[str]
    cycles: Callable[[int, int, int, int, int, dict[str, float]], float]

    def refuses(self) -> str | None:
        """Why it cannot run on this CPU, or None."""
        missing = sorted(self.needs - cpu_flags())
        if missing:
            return f"needs a CPU with {', '.join(missing)}"
        if "amx_tile" in self.needs and not tiles_granted():
            return "needs AMX tiles, which the operating system does not permit"
        return None

    def seconds(self, m: int, n: int, k: int, w: int, a: int, machine: Machine) -> float:
        """Of one product whose weights lie in main memory, on all cores."""
        units = _units(machine)
        cores = machine.device.num_cores or 1
        compute = self.cycles(m, n, k, w, a, units) / (units["clock"] * cores)
        memory = n * k * w / 8 / (machine.device.main_memory.read_bandwidth or _BANDWIDTH)
        # The input is made codes, the result written, by all cores in their own caches.
        around = m * (k * (1 + a) + 4 * n) / (32 * units["clock"] * cores)
        # What is computed while memory is waited for is not quite for nothing.
        return max(compute, memory) + 0.2 * min(compute, memory) + around


def _popcount(m: int, n: int, k: int, w: int, a: int, units: dict[str, float]) -> float:
    # An exclusive or, a count and an addition for each vector, on the same few ports.
    return 1.5 * w * a * float(m) * n * k / units["popcount"]


def _expand(n: int, k: int, w: int, units: dict[str, float]) -> float:
    # A permutation and a transposition for 64 weights; eight bits are two values.
    return 2.0 * (2 if w == 8 else 1) * float(n) * k / 64 * 128 / units["dot_int8"]


def _few(m: int, n: int, k: int, w: int, a: int, units: dict[str, float]) -> float:
    dots = 2.0 * m * n * k / units["dot_int8"] * (2 if w == 8 else 1)
    return -(-m // 4) * _expand(n, k, w, units) + dots


def _dots(m: int, n: int, k: int, w: int, a: int, units: dict[str, float]) -> float:
    dots = 2.0 * m * n * k / units["dot_int8"] * (2 if w == 8 else 1)
    return -(-m // _PASS_ROWS) * 1.5 * _expand(n, k, w, units) + dots / 0.85


def _matrix(m: int, n: int, k: int, w: int, a: int, units: dict[str, float]) -> float:
    rows = -(-m // 16) * 16
    tiles = 2.0 * rows * n * k / units["tile_int8"] * (2 if w == 8 else 1)
    # Operands come from the second cache: some fifty cycles a product, where sixteen would do.
    return -(-m // _PASS_ROWS) * 1.5 * _expand(n, k, w, units) + tiles / 0.3


ENGINES: dict[str, PlanesEngine] = {
    engine.name: engine
    for engine in (
        PlanesEngine("popcnt", "popcount", True, 0, 64, _BASE | {"avx512_vpopcntdq"}, _popcount),
        PlanesEngine("gemv", "few", False, 1, 16, _BASE | {"avx512_vnni"}, _few),
        PlanesEngine("vnni", "dots", False, 8, 16, _BASE | {"avx512_vnni"}, _dots),
        PlanesEngine("amx", "matrix", False, 16, 64, _BASE | {"amx_tile", "amx_int8"}, _matrix),
    )
}


def chosen(
    m: int, n: int, k: int, w: int, a: int, group: int, machine: Machine, *, masks: bool = False
) -> PlanesEngine | None:
    """The engine that would be fastest here, or None if there is none.

    Args:
        m: rows of the input.
        n: rows of the weights.
        k: their length.
        w: bits of the weights.
        a: bits of the input.
        group: numbers along K that are summed exactly before a scale; K for all.
        machine: where.
        masks: only engines that take the weights as masks.
    """
    able = [
        engine
        for engine in ENGINES.values()
        if engine.refuses() is None
        and (group >= k or group % engine.group == 0)
        and not (masks and engine.tiles)
    ]
    return min(able, key=lambda e: e.seconds(m, n, k, w, a, machine), default=None)


def bound(w: int, a: int) -> int:
    """The least K whose sums may not fit in 32 bits."""
    return -(-(1 << 31) // (((1 << w) - 1) * ((1 << a) - 1)))


def _units(machine: Machine) -> dict[str, float]:
    return _units_of(machine.measurements)


@functools.lru_cache(maxsize=64)
def _units_of(measurements: tuple[Measurement, ...]) -> dict[str, float]:
    result = {m.quantity: m.median for m in measurements if m.probe == "units"}
    return {"clock": result.get("clock", _CLOCK)} | {
        name: result.get(name, usual) for name, usual in _UNITS.items()
    }

"""Latency and throughput of the arithmetic units of one core, in operations per cycle.

A dependent chain gives an instruction's latency; 8 to 16 independent chains, the best
of them, its throughput. The clock is calibrated by a chain of register additions, one
a cycle, run between the others.

Source: Fog, Instruction tables; Luo et al., Benchmarking and Dissecting the NVIDIA
Hopper GPU Architecture, 2024, for the method of isolating units.
"""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import MachineError
from shoal.core.native import cpu_flags
from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.native import library
from shoal.machine.protocols import ProbeContext


@dataclass(frozen=True)
class InstructionTest:
    """One instruction under test.

    Args:
        quantity: what it does; several widths of one quantity compete, the best counts.
        function: stem of the function in ``units.cpp``.
        mnemonic: as a disassembler prints it.
        ops: operations of one instruction; a multiply-add counts two.
        needs: CPU flags without which it must not be run.
        chains: the numbers of independent chains that are built.
        limit: instructions a cycle that no core of today exceeds.
    """

    quantity: str
    function: str
    mnemonic: str
    ops: int
    needs: frozenset[str]
    chains: tuple[int, ...] = (8, 12)
    limit: float = 4.0


def _wide(quantity: str, mnemonic: str, ops: int, *needs: str) -> InstructionTest:
    flags = frozenset({"avx512f", *needs})
    return InstructionTest(quantity, f"{quantity}_512", mnemonic, ops, flags, (8, 12, 16))


INSTRUCTIONS = (
    _wide("fma_fp32", "vfmadd231ps", 32),
    InstructionTest("fma_fp32", "fma_fp32_256", "vfmadd231ps", 16, frozenset({"avx", "fma"})),
    _wide("fma_fp64", "vfmadd231pd", 16),
    InstructionTest("fma_fp64", "fma_fp64_256", "vfmadd231pd", 8, frozenset({"avx", "fma"})),
    _wide("dot_bf16", "vdpbf16ps", 64, "avx512_bf16"),
    _wide("dot_int8", "vpdpbusd", 128, "avx512_vnni"),
    InstructionTest("dot_int8", "dot_int8_256", "vpdpbusd", 64, frozenset({"avx2", "avx_vnni"})),
    _wide("permute_bytes", "vpermb", 64, "avx512_vbmi"),
    InstructionTest("permute_bytes", "permute_bytes_256", "vpshufb", 32, frozenset({"avx2"})),
    _wide("popcount", "vpopcntq", 512, "avx512_vpopcntdq"),
    InstructionTest("popcount", "popcount_64", "popcnt", 64, frozenset({"popcnt"}), (8, 12), 6.0),
    InstructionTest(
        "tile_bf16", "tile_bf16", "tdpbf16ps", 16384, frozenset({"amx_tile", "amx_bf16"}), (6,), 0.5
    ),
    InstructionTest(
        "tile_int8", "tile_int8", "tdpbssd", 32768, frozenset({"amx_tile", "amx_int8"}), (6,), 0.5
    ),
)

# A sample is the fastest of so many turns.
TURNS = 3


def clock_samples(repeats: int = 15, blocks: int = 20_000) -> list[float]:
    """Seconds of one clock cycle, ``repeats`` times."""
    units = library("units")
    return [float(units.unit_clock(blocks)) for _ in range(repeats)]


@part
class Units:
    """Fused multiply-add, dot products, permutes, popcount and matrix tiles of one core.

    Args:
        repeats: number of samples of each function; 0 for 9 (fast) or 25.
        blocks: iterations of the measured loop, with 8 instructions per chain, over all chains.
    """

    repeats: Annotated[int, Ge(0)] = 0
    blocks: Annotated[int, Ge(100)] = 30_000

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities: ``clock`` in Hz; per unit ``X`` in op/cycle, ``X.latency`` in cycles."""
        repeats = self.repeats or (9 if context.fast else 25)
        units = library("units")
        clocks = clock_samples(max(repeats, 9))
        results = [
            context.measured(
                "units",
                "clock",
                "Hz",
                [1 / cycle for cycle in clocks],
                plausible=0.2e9 < 1 / min(clocks) < 8e9,
            )
        ]
        done: set[str] = set()
        for unit in INSTRUCTIONS:
            reason = refuses(unit, units)
            if reason:
                if not any(other.quantity == unit.quantity for other in _usable(units)):
                    context.skip(f"units.{unit.quantity}", reason)
                continue
            if unit.quantity in done:  # the widest form that this CPU has came first
                continue
            done.add(unit.quantity)
            results += self._measure(context, units, unit, repeats)
        return results

    def _measure(
        self, context: ProbeContext, units: ctypes.CDLL, unit: InstructionTest, repeats: int
    ) -> list[Measurement]:
        def sampled(chains: int) -> list[float]:
            function = getattr(units, f"unit_{unit.function}_{chains}")
            function.restype, function.argtypes = ctypes.c_double, [ctypes.c_uint64]
            blocks = max(100, self.blocks // chains)
            for _ in range(4):
                function(blocks)  # wide units are powered on late, and the clock adapts
            cycles = []
            for _ in range(repeats):
                # Interrupts and the other thread of the core only ever add time.
                clock = min(float(units.unit_clock(2000)) for _ in range(2))
                turns = [float(function(blocks)) for _ in range(TURNS)]
                clock = min(clock, float(units.unit_clock(2000)))
                if min(turns) < 0:
                    raise MachineError("the kernel grants no matrix tiles to this process")
                cycles.append(min(turns) / clock)
            return cycles

        try:
            latency = sampled(1)
            best = min(
                (sampled(chains) for chains in unit.chains), key=lambda c: sorted(c)[len(c) // 2]
            )
        except MachineError as cause:
            context.skip(f"units.{unit.quantity}", str(cause))
            return []
        rate = [unit.ops / cycles for cycles in best]
        middle = sorted(rate)[len(rate) // 2]
        possible = middle <= unit.limit * unit.ops
        note = unit.mnemonic if possible else f"{unit.mnemonic}: above clock x width"
        return [
            context.measured(
                "units", unit.quantity, "op/cycle", rate, plausible=possible, note=note
            ),
            context.measured(
                "units", f"{unit.quantity}.latency", "cycle", latency, note=unit.mnemonic
            ),
        ]


def refuses(unit: InstructionTest, units: ctypes.CDLL) -> str:
    """Why this instruction cannot be run here; empty if it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"{unit.mnemonic} is an x86 instruction; this CPU is {platform.machine()}"
    missing = sorted(unit.needs - cpu_flags())
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    if not hasattr(units, f"unit_{unit.function}_1"):
        return f"the compiler does not target {', '.join(sorted(unit.needs))}"
    return ""


def _usable(units: ctypes.CDLL) -> list[InstructionTest]:
    return [unit for unit in INSTRUCTIONS if not refuses(unit, units)]

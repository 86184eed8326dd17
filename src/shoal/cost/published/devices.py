"""Devices of the published runs: data-sheet numbers, and what a large product reaches.

FLOP/s are dense. ``matmul`` is what a probe of many shapes found to be the most that a
product reaches (Bekman, Machine Learning Engineering, table of maximum achievable matmul
FLOPS, 2024-2025); where that table has no row it is ``assumed`` from the architecture before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.errors import MachineError, nearest
from shoal.cost.gpu.device import Accelerator, generation_of
from shoal.ir import Link, Machine
from shoal.ir.machine import Device, MemoryTier


@dataclass(frozen=True)
class Sheet:
    """A data sheet.

    Args:
        peak: bf16 (fp16 where there is none) FLOP/s.
        reach: share of it that the best product reaches.
        low: fp8 FLOP/s of the sheet; 0 where there is none.
        low_reach: share of it that the best product reaches.
        least: fp4 FLOP/s of the sheet.
        stream: byte/s of the memory.
        capacity: bytes of the memory.
        inside: byte/s to the devices of the domain, in one direction.
        domain: devices of a node or of a rack with one switch.
        outside: byte/s to other domains.
        reach_source: probed, from kernel tables (what one in ten of their large products exceeds,
            as the described machines say it), or assumed.
        sustained: ``reach`` was probed in runs so long that power limited it, as in a step.
        turns: cycles a second of all units together; 0 where nothing asks.
    """

    peak: float
    reach: float
    stream: float
    capacity: float
    inside: float
    domain: int
    outside: float
    low: float = 0.0
    low_reach: float = 0.0
    least: float = 0.0
    reach_source: str = "probed"
    sustained: bool = False
    turns: float = 0.0


# Under a lower power limit the clock falls with its cube root: power grows with f V^2, V with f.
_CAPPED = (500 / 700) ** (1 / 3)
DEVICES: dict[str, Sheet] = {
    "V100": Sheet(125e12, 0.80, 0.9e12, 32e9, 150e9, 4, 12.5e9, reach_source="assumed"),
    "A100-80GB": Sheet(312e12, 0.869, 2.04e12, 80e9, 300e9, 8, 25e9),
    "A100-40GB": Sheet(312e12, 0.869, 1.555e12, 40e9, 300e9, 8, 25e9),
    "H100-80GB": Sheet(989e12, 0.803, 3.35e12, 80e9, 450e9, 8, 50e9, 1979e12, 0.709),
    "H100-96GB-500W": Sheet(
        989e12, 0.803 * _CAPPED, 2.4e12, 96e9, 450e9, 8, 50e9, 1979e12, 0.709 * _CAPPED
    ),
    "H200": Sheet(989e12, 0.803, 4.8e12, 141e9, 450e9, 8, 50e9, 1979e12, 0.709),
    "B200": Sheet(2250e12, 0.71, 8e12, 180e9, 900e9, 8, 50e9, 4500e12, 0.61, 9000e12, "tables"),
    "B300": Sheet(2250e12, 0.78, 8e12, 270e9, 900e9, 8, 100e9, 4500e12, 0.66, 13500e12, "tables"),
    # The machine of SimuMax's runs, by its authors' own probe of 514 products (its system file
    # b200_bf16_ceperm.json): 0.45 to 0.51 for large ones, 0.485 in the middle; rings reach 0.67.
    "B200-SimuMax": Sheet(
        2250e12, 0.485, 8e12, 180e9, 900e9, 8, 50e9, 4500e12, 0.43, 9000e12, "probed", True
    ),
    "GB200": Sheet(2500e12, 0.71, 8e12, 186e9, 900e9, 64, 50e9, 5000e12, 0.60, 10000e12, "tables"),
    "GB300": Sheet(2500e12, 0.79, 8e12, 279e9, 900e9, 64, 100e9, 5000e12, 0.70, 15000e12, "tables"),
    "L40S": Sheet(
        362e12, 0.75, 0.864e12, 48e9, 25e9, 8, 12.5e9, 733e12, 0.75, reach_source="assumed"
    ),
    "RTX-PRO-6000": Sheet(
        467.8e12, 0.75, 1.792e12, 96e9, 50e9, 8, 25e9, 935.6e12, 0.7, 1871e12, "assumed"
    ),
    "MI250X": Sheet(191.5e12, 0.767, 1.6e12, 64e9, 50e9, 8, 12.5e9),
    "MI300X": Sheet(
        1307e12,
        0.514,
        5.3e12,
        192e9,
        448e9,
        8,
        50e9,
        2615e12,
        0.45,
        reach_source="probed; fp8 assumed",
    ),
    "MI325X": Sheet(
        1307e12,
        0.604,
        6e12,
        256e9,
        448e9,
        8,
        50e9,
        2615e12,
        0.52,
        reach_source="probed; fp8 assumed",
    ),
    "TPU v4": Sheet(275e12, 0.87, 1.2e12, 32e9, 150e9, 4096, 25e9, reach_source="assumed"),
}


def _board(
    tflops: float, gbps: float, gigabytes: float, units: int, clock: float, link: float = 20.0
) -> Sheet:
    """By TFLOP/s (16-bit sums where there are two rates), GB/s, GB, units and their GHz."""
    return Sheet(
        tflops * 1e12,
        0.75,
        gbps * 1e9,
        gigabytes * 1e9,
        link * 1e9,
        8,
        link * 1e9,
        reach_source="assumed",
        turns=units * clock * 1e9,
    )


# Boards and laptops of serving runs. Apple: GPU FLOP/s and byte/s as Apple and its reviewers say.
DEVICES |= {
    "H100 PCIe": _board(756, 2000, 80, 114, 1.755),
    "A100 PCIe": _board(312, 1935, 80, 108, 1.41),
    "A100 SXM": _board(312, 2039, 80, 108, 1.41, 300),
    "RTX 3070": _board(81, 448, 8, 46, 1.73),
    "RTX 3080 10GB": _board(119, 760, 10, 68, 1.71),
    "RTX 3080 Ti": _board(136, 912, 12, 80, 1.67),
    "RTX 3090": _board(142, 936, 24, 82, 1.70),
    "RTX 4070 Laptop": _board(120, 256, 8, 36, 2.1),
    "RTX 4070 Ti": _board(160, 504, 12, 60, 2.61),
    "RTX 4080": _board(195, 717, 16, 76, 2.51),
    "RTX 4090": _board(330, 1008, 24, 128, 2.52),
    "RTX 4000 Ada": _board(107, 360, 20, 48, 2.17),
    "RTX 5000 Ada": _board(261, 576, 32, 100, 2.55),
    "RTX A6000": _board(155, 768, 48, 84, 1.80),
    "RTX 6000 Ada": _board(364, 960, 48, 142, 2.5),
    "A40": _board(150, 696, 48, 84, 1.74),
    "Apple M1 7-Core": _board(2.3, 68, 8, 7, 1.28),
    "Apple M1 Max": _board(10.4, 400, 64, 32, 1.3),
    "Apple M2 Ultra": _board(27.2, 800, 192, 76, 1.4),
    "Apple M3 Max": _board(16.4, 400, 64, 40, 1.4),
}
# Cores, TFLOP/s of 16-bit and of 8-bit products, GB/s and GB of the memory, MB of the second cache,
# of the data sheets of Intel and AMD, and of Apple's reviewers.
_CPUS = {
    "Ryzen 7950X": (16, 4.8, 9.6, 83, 64, 16),
    "Apple M2 Max (CPU)": (8, 1.8, 3.6, 200, 64, 32),
    "Xeon E5-2683": (32, 2.1, 2.1, 154, 128, 8),
    "Xeon 6980P": (128, 260, 520, 845, 768, 256),
}
# Shares of a CPU's rates that products and streams reach, seconds of an operator's launch, and
# byte/s of a core from its second cache: assumed.
_REACH, _STREAM, _LAUNCH_S, _CACHE = 0.6, 0.8, 2e-6, 1e11
_SAME = {"A100": "A100-80GB", "H100": "H100-80GB", "V100-32GB": "V100", "MI250X (GCD)": "MI250X"}


@functools.cache
def gpu(name: str, *, domain: int = 0, outside: float = 0.0) -> Accelerator:
    """The device of a row.

    Args:
        name: as the row spells it.
        domain: devices of a node, where the row says it and the device has no larger domain.
        outside: byte/s of one device to other nodes, where the row says it.

    Raises:
        MachineError: there is no sheet of this device.
    """
    key = _SAME.get(name, name)
    if key not in DEVICES:
        raise MachineError(
            f"device {name!r}: expected one of {', '.join(DEVICES)}; {nearest(name, DEVICES)}"
        )
    sheet = DEVICES[key]
    peak = {"bf16": sheet.peak, "fp16": sheet.peak}
    matmul = {"bf16": sheet.reach * sheet.peak, "fp16": sheet.reach * sheet.peak}
    if sheet.low:
        matmul["fp8"] = sheet.low_reach * sheet.low
    if sheet.least:
        matmul["fp4"] = sheet.low_reach * sheet.least * 0.8
    return Accelerator(
        name=name,
        peak=tuple(sorted(peak.items())),
        matmul=tuple(sorted(matmul.items())),
        stream=sheet.stream,
        capacity=sheet.capacity,
        generation=generation_of(key).name,
        inside=sheet.inside,
        domain=domain if domain and sheet.domain <= 8 else sheet.domain,
        outside=outside or sheet.outside,
        sustained=sheet.sustained,
        turns=sheet.turns,
    )


def _longest(name: str, known: Iterable[str]) -> str:
    plain = name.replace("-", " ")
    fits = [key for key in known if plain.startswith(key.replace("-", " "))]
    if not fits:
        raise MachineError(f"device {name!r}: expected one that starts with {', '.join(known)}")
    return max(fits, key=len)


def served_by(name: str) -> Accelerator:
    """The accelerator of a row of serving, by the longest known name that it starts with.

    Raises:
        MachineError: there is no sheet of this device.
    """
    return gpu(_longest(name, (*DEVICES, *_SAME)))


@functools.cache
def cpu(name: str) -> Machine:
    """The CPU of a row of serving, as a machine.

    Raises:
        MachineError: there is no sheet of this device.
    """
    key = _longest(name, _CPUS)
    cores, plain, low, stream, capacity, cache = _CPUS[key]
    main, near = _STREAM * stream * 1e9, cores * _CACHE
    peak = {"bf16": plain * 1e12, "fp32": plain * 1e12, "int8": low * 1e12}
    device = Device(
        name=key,
        kind="cpu",
        num_cores=cores,
        peak_flops=peak,
        matmul_flops={dtype: _REACH * rate for dtype, rate in peak.items()},
        op_overhead_s=_LAUNCH_S,
        memory=(
            MemoryTier(name="l2", capacity_bytes=int(cache * 1e6), read_bandwidth=near),
            MemoryTier(name="dram", capacity_bytes=int(capacity * 1e9), read_bandwidth=main),
        ),
    )
    link = Link(scope="node", bandwidth=2e10, latency_s=5e-6)
    return Machine(name=key, device=device, links=(link,), provenance="declared")

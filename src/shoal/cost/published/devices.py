"""Devices of the published runs: data-sheet numbers, and what a large product reaches.

FLOP/s are dense. ``matmul`` is what a probe of many shapes found to be the most that a
product reaches (Bekman, Machine Learning Engineering, table of maximum achievable matmul
FLOPS, 2024-2025); where that table has no row it is ``assumed`` from the architecture before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal.core.errors import MachineError, nearest
from shoal.cost.gpu.device import Accelerator, generation_of

__all__ = ["DEVICES", "Sheet", "gpu"]


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
        reach_source: probed, or assumed.
        sustained: ``reach`` was probed in runs so long that power limited it, as in a step.
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
    "B200": Sheet(2250e12, 0.77, 8e12, 180e9, 900e9, 8, 50e9, 4500e12, 0.68, 9000e12, "assumed"),
    "B300": Sheet(2250e12, 0.77, 8e12, 270e9, 900e9, 8, 100e9, 4500e12, 0.68, 13500e12, "assumed"),
    # The machine of SimuMax's runs, by its authors' own probe of 514 products (its system file
    # b200_bf16_ceperm.json): 0.45 to 0.51 for large ones, 0.485 in the middle; rings reach 0.67.
    "B200-SimuMax": Sheet(
        2250e12, 0.485, 8e12, 180e9, 900e9, 8, 50e9, 4500e12, 0.43, 9000e12, "probed", True
    ),
    "GB200": Sheet(2500e12, 0.77, 8e12, 186e9, 900e9, 64, 50e9, 5000e12, 0.68, 10000e12, "assumed"),
    "GB300": Sheet(
        2500e12, 0.77, 8e12, 279e9, 900e9, 64, 100e9, 5000e12, 0.68, 15000e12, "assumed"
    ),
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
_SAME = {"A100": "A100-80GB", "V100-32GB": "V100", "MI250X (GCD)": "MI250X"}


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
    )

"""Devices of the published serving rows: data-sheet numbers, dense.

Sources: NVIDIA and AMD data sheets and architecture papers (tensor FLOP/s with fp16 sums
where a consumer device has two rates, byte/s, multiprocessors, boost clock); Apple and its
reviewers (GPU FLOP/s, byte/s); Intel and AMD (cores, clocks, memory channels).
"""

from __future__ import annotations

import re

from shoal.core.errors import MachineError
from shoal.cost.gpu.serve import Host

__all__ = ["HOSTS", "host_of"]


def _gpu(
    flops: float,
    stream: float,
    gigabytes: float,
    units: int,
    clock: float,
    low: float = 0.0,
    least: float = 0.0,
    wire: float = 20.0,
    hop: float = 20.0,
) -> Host:
    """A GPU by TFLOP/s, GB/s, GB, multiprocessors, GHz, GB/s to its neighbours, and us."""
    return Host(
        "",
        flops * 1e12,
        stream * 1e9,
        gigabytes * 1e9,
        low * 1e12,
        least * 1e12,
        units * clock * 1e9,
        wire * 1e9,
        hop * 1e-6,
        units=units,
    )


def _cpu(flops: float, stream: float, gigabytes: float, low: float = 0.0) -> Host:
    return Host("", flops * 1e12, stream * 1e9, gigabytes * 1e9, low * 1e12, cpu=True, hop_s=5e-6)


HOSTS: dict[str, Host] = {
    "H100 PCIe": _gpu(756, 2000, 80, 114, 1.755, 1513),
    "H100": _gpu(989, 3350, 80, 132, 1.83, 1979, wire=450, hop=9),
    "H200": _gpu(989, 4800, 141, 132, 1.83, 1979, wire=450, hop=9),
    "B200": _gpu(2250, 8000, 180, 148, 1.85, 4500, 9000, wire=900, hop=9),
    "A100 PCIe": _gpu(312, 1935, 80, 108, 1.41, 624),
    "A100": _gpu(312, 2039, 80, 108, 1.41, 624, wire=300, hop=12),
    "MI250X": _gpu(191.5, 1638, 64, 110, 1.7, 191.5),
    "MI300X": _gpu(1307, 5300, 192, 304, 2.1, 2615, wire=448, hop=15),
    "RTX 3070": _gpu(81, 448, 8, 46, 1.73),
    "RTX 3080 10GB": _gpu(119, 760, 10, 68, 1.71),
    "RTX 3080 Ti": _gpu(136, 912, 12, 80, 1.67),
    "RTX 3090": _gpu(142, 936, 24, 82, 1.70),
    "RTX 4070 Laptop": _gpu(120, 256, 8, 36, 2.1),
    "RTX 4070 Ti": _gpu(160, 504, 12, 60, 2.61),
    "RTX 4080": _gpu(195, 717, 16, 76, 2.51),
    "RTX 4090": _gpu(330, 1008, 24, 128, 2.52),
    "RTX 4000 Ada": _gpu(107, 360, 20, 48, 2.17),
    "RTX 5000 Ada": _gpu(261, 576, 32, 100, 2.55),
    "RTX A6000": _gpu(155, 768, 48, 84, 1.80),
    "RTX 6000 Ada": _gpu(364, 960, 48, 142, 2.5),
    "RTX PRO 6000": _gpu(504, 1792, 96, 188, 2.6, 1008),
    "A40": _gpu(150, 696, 48, 84, 1.74),
    "L40S": _gpu(362, 864, 48, 142, 2.52),
    "Apple M1 7-Core": _gpu(2.3, 68, 8, 7, 1.28),
    "Apple M1 Max": _gpu(10.4, 400, 64, 32, 1.3),
    "Apple M2 Ultra": _gpu(27.2, 800, 192, 76, 1.4),
    "Apple M3 Max": _gpu(16.4, 400, 64, 40, 1.4),
    # CPUs: fp32 or bf16 vector FLOP/s of all cores; eight-bit dot products.
    "Ryzen 7950X": _cpu(4.8, 83, 64, 9.6),
    "Apple M2 Max (CPU)": _cpu(1.8, 200, 64, 3.6),
    "Xeon E5-2683": _cpu(2.1, 154, 128),
    "Xeon 6980P": _cpu(260, 845, 768, 520),
}


def host_of(name: str) -> Host:
    """The device of a row.

    Raises:
        MachineError: there is no sheet of this device.
    """
    fits = [key for key in HOSTS if re.match(re.escape(key), name)]
    if not fits:
        raise MachineError(f"device {name!r}: expected one that starts with {', '.join(HOSTS)}")
    key = max(fits, key=len)
    return HOSTS[key].__class__(**{**vars(HOSTS[key]), "name": name})

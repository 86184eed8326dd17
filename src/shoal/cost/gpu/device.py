"""What the kernels of a step need to know of an accelerator and of its links.

A :class:`Accelerator` is a :class:`~shoal.ir.Machine` in plain floats, with what its generation
adds: the number of units that share a product's tiles, and what an attention kernel reaches.

Sources: NVIDIA Turing, A100, Ada, H100 and Blackwell architecture papers, AMD CDNA 2, 3 and 4
papers (units);
Dao, FlashAttention-2, 2023; Shah et al., FlashAttention-3, 2024; NVIDIA cuDNN 9 release
notes (attention).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.core.errors import MachineError
from shoal.ir import Machine


@dataclass(frozen=True)
class GpuCalibration:
    """The constants that measurements set; all else in this room is counted or cited.

    Args:
        gemm: share of the rate of a probed large product that products sustain in a step of
            seconds, limited by power, clocks and other kernels.
        gemm_low: the same for eight- and four-bit products.
        stream: share of the memory's rate that chains of elementwise operators reach.
        wire: fraction of the link bandwidth that collectives reach.
        host: seconds of the host for one kernel, where the host, not the device, sets the pace.
    """

    gemm: float = 0.86
    gemm_low: float = 0.80
    stream: float = 0.75
    wire: float = 0.75
    host: float = 6e-6


# What the five named rows of the scoreboard give (shoal.cost.published.calibration.fitted).
CALIBRATED = GpuCalibration(
    gemm=0.8615, gemm_low=0.8738, stream=0.8127, wire=0.8085, host=9.511e-06
)


@dataclass(frozen=True)
class Generation:
    """What devices of one architecture share.

    Args:
        name: of the architecture.
        units: streaming multiprocessors or compute units of the largest device.
        attention: kernel -> shares of the peak of its (forward, backward) pass on long causal
            sequences with heads of 128.
        reach: share of the peak that a probed large product reaches on such a device.
        half: tokens of a sequence at which the fastest kernel has half of its rate.
    """

    name: str
    units: int
    reach: float
    attention: dict[str, tuple[float, float]]
    half: float = 700.0


_FLASH_ONLY = {"flash1": (0.40, 0.36), "flash2": (0.45, 0.38)}
GENERATIONS: dict[str, Generation] = {
    "volta": Generation("volta", 80, 0.8, {"flash1": (0.35, 0.30), "flash2": (0.35, 0.30)}),
    # A T4 has 40 of the 72 of the largest die; FlashAttention-2 does not run there.
    "turing": Generation("turing", 40, 0.6, {"flash1": (0.35, 0.30), "flash2": (0.35, 0.30)}),
    # FlashAttention-2, figures 5 and 6: 190 and 170 of 312 TFLOP/s; 1 reaches about 0.6 of it.
    "ampere": Generation(
        "ampere", 108, 0.869, {"flash1": (0.40, 0.36), "flash2": (0.60, 0.53), "best": (0.62, 0.55)}
    ),
    # The kernels of attention are Ampere's (compute capability 8.x); FlashAttention-3 is not there.
    "ada": Generation(
        "ada", 142, 0.75, {"flash1": (0.40, 0.36), "flash2": (0.60, 0.53), "best": (0.62, 0.55)}
    ),
    # FlashAttention-3, figures 5 and 6: 370 and 330 of 989 by FlashAttention-2, backward 530 by 3.
    # Forward passes, and from what length on kernels are fast: the kernel tables, 1024 to 16384.
    "hopper": Generation(
        "hopper",
        132,
        0.803,
        {"flash1": (0.25, 0.22), "flash2": (0.38, 0.34), "best": (0.80, 0.60)},
        half=1900.0,
    ),
    # Backward passes of cuDNN 9.7 and later on a B200.
    "blackwell": Generation(
        "blackwell",
        148,
        0.77,
        {"flash1": (0.18, 0.15), "flash2": (0.25, 0.20), "best": (0.70, 0.51)},
        half=2250.0,
    ),
    "cdna2": Generation("cdna2", 110, 0.767, {**_FLASH_ONLY, "best": (0.45, 0.38)}),
    "cdna3": Generation("cdna3", 304, 0.514, {**_FLASH_ONLY, "best": (0.35, 0.28)}),
    # No measurement of attention is known: as of CDNA 3.
    "cdna4": Generation("cdna4", 256, 0.604, {**_FLASH_ONLY, "best": (0.35, 0.28)}),
    # Few and large matrix engines; a Gaudi 3 and a Trainium2 have eight.
    "tpu": Generation("tpu", 4, 0.87, {**_FLASH_ONLY, "best": (0.55, 0.45)}),
}
_NAMES = (
    ("volta", r"V100"),
    ("turing", r"\bT4\b|\b20[678]0\b"),
    ("ada", r"\bL4\b|L40|\b40[6-9]0\b|\bAda\b"),
    ("ampere", r"A100|A40|A6000|3090|3080|3070|A10\b|A800"),
    ("blackwell", r"G?B[23]00|GB10\b|RTX PRO|\b50[6-9]0\b"),
    ("cdna2", r"MI2\d\d"),
    ("cdna4", r"MI35\d"),
    ("cdna3", r"MI3\d\d"),
    ("tpu", r"TPU|Trainium|Gaudi"),
)


def generation_of(name: str) -> Generation:
    """The architecture of a device of this name; Hopper where the name shows none."""
    for key, pattern in _NAMES:
        if re.search(pattern, name, re.IGNORECASE):
            return GENERATIONS[key]
    return GENERATIONS["hopper"]


@dataclass(frozen=True)
class Accelerator:
    """One accelerator among others, in plain numbers.

    Args:
        name: of the machine and of its device, by which its kernels are known.
        peak: dtype -> FLOP/s of the data sheet.
        matmul: dtype -> FLOP/s that a large product reaches when nothing else runs.
        stream: byte/s of the main memory.
        capacity: bytes of the main memory.
        generation: of its architecture.
        inside: byte/s of one device to the others of its domain, in one direction.
        domain: devices that ``inside`` joins.
        outside: byte/s of one device to other domains.
        near_s: seconds of a small message inside.
        far_s: seconds of a small message outside.
        sustained: ``matmul`` was probed in runs so long that power limited it, as in a step.
        launch_s: seconds that a framework takes to launch one operator.
        turns: cycles a second of all units together; 0 where they are not known.
    """

    name: str
    peak: tuple[tuple[str, float], ...]
    matmul: tuple[tuple[str, float], ...]
    stream: float
    capacity: float
    generation: str
    inside: float
    domain: int
    outside: float
    near_s: float = 3e-6
    far_s: float = 6e-6
    sustained: bool = False
    launch_s: float = 5e-6
    turns: float = 0.0

    @property
    def facts(self) -> Generation:
        """What its architecture adds."""
        return GENERATIONS[self.generation]

    def rate(self, dtype: str) -> float:
        """FLOP/s of a large product; of the nearest wider type where this one is missing."""
        rates = dict(self.matmul)
        for name in {
            "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
            "fp8": ("fp8", "bf16", "fp16"),
            "bf16": ("bf16", "fp16", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "fp32": ("fp32", "tf32", "bf16"),
        }[dtype]:
            if name in rates:
                return rates[name]
        raise MachineError(
            f"machine {self.name}: device.matmul_flops has no rate for {dtype} or a wider type; "
            "probe the machine, or add the rate in FLOP/s"
        )


def gpu_of(machine: Machine) -> Accelerator:
    """The accelerator of a machine.

    Raises:
        MachineError: its memory has no rate.
    """
    device = machine.device
    main = device.main_memory
    if main.read_bandwidth is None:
        raise MachineError(
            f"machine {machine.name}: device.memory.{main.name} has no read_bandwidth; probe the "
            "machine, or add it in byte/s"
        )
    near, far = machine.link("device"), machine.link("node")
    either = near or far
    rates = {**device.peak_flops, **device.matmul_flops}
    return Accelerator(
        name=f"{machine.name}, {device.name}",
        peak=tuple(sorted(device.peak_flops.items())),
        matmul=tuple(sorted(rates.items())),
        stream=main.read_bandwidth,
        capacity=float(main.capacity_bytes),
        generation=generation_of(f"{machine.name} {device.name}").name,
        inside=(near or either).bandwidth if either else 1e11,
        domain=machine.devices_per_node,
        outside=(far or either).bandwidth if either else 1e11,
        near_s=(near or either).latency_s if either else 3e-6,
        far_s=(far or either).latency_s if either else 6e-6,
        sustained=device.sustained,
        launch_s=device.op_overhead_s,
        turns=device.peak_flops.get("fp32", 0.0) / (2.0 * _lanes(device.name)),
    )


def _lanes(name: str) -> int:
    """Lanes of a unit that add and multiply fp32 numbers."""
    return 64 if re.search(r"V100|T4\b|A[18]00|MI2\d\d", name) else 128

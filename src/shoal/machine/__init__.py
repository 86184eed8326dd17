"""machine: what there is. Probe it, describe it, compare it, and check that it is well.

The door: the table of probes, and what is used most, imported when used. Further in
their modules: ``doctor.doctor``, ``fingerprint.fingerprint`` and ``fingerprint.versions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.machine.comparing import compare
    from shoal.machine.described import load, names
    from shoal.machine.probing import probe
    from shoal.machine.roofline import roofline_svg

__all__ = [
    "PROBES",
    "compare",
    "load",
    "names",
    "probe",
    "roofline_svg",
]

# In the order in which they run: what needs a quiet machine most comes first.
PROBES = PartTable(
    "probe",
    {
        "units": "shoal.machine.probes.units:Units",
        "memory_latency": "shoal.machine.probes.memory_latency:MemoryLatency",
        "memory_bandwidth": "shoal.machine.probes.memory_bandwidth:MemoryBandwidth",
        "matmul": "shoal.machine.probes.matmul:Matmul",
        "framework": "shoal.machine.probes.framework:Framework",
        "collective": "shoal.machine.probes.collective:Collective",
        "steps": "shoal.machine.probes.steps:Steps",
        "kernels": "shoal.machine.probes.kernels:Kernels",
        "gpu": "shoal.machine.probes.gpu:Gpu",
        "loopback": "shoal.machine.probes.loopback:Loopback",
        "system": "shoal.machine.probes.system:System",
        "gemm": "shoal.machine.probes.gemm:Gemm",
    },
    about="One microbenchmark of this machine. `shoal probe` runs all of them.",
    protocol="shoal.machine.protocols:Probe",
)

_HANDED_ON = {
    "compare": "shoal.machine.comparing:compare",
    "load": "shoal.machine.described:load",
    "names": "shoal.machine.described:names",
    "probe": "shoal.machine.probing:probe",
    "roofline_svg": "shoal.machine.roofline:roofline_svg",
}


def __getattr__(name: str) -> Any:
    if name in _HANDED_ON:
        return load_object(_HANDED_ON[name])
    raise AttributeError(f"module 'shoal.machine' has no attribute {name!r}")

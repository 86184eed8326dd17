"""machine: what there is. Probe it, describe it, compare it, and check that it is well.

The door: the table of probes. Functions are in their modules: ``probing.probe``,
``described.load``, ``doctor.doctor``, ``fingerprint.fingerprint``, ``compare.compare``;
they are handed on here and imported when used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import PartTable, load_object

if TYPE_CHECKING:
    from shoal.machine.compare import compare
    from shoal.machine.described import load, names
    from shoal.machine.doctor import Check, doctor
    from shoal.machine.fingerprint import fingerprint, versions
    from shoal.machine.probing import probe

__all__ = [
    "PROBES",
    "Check",
    "compare",
    "doctor",
    "fingerprint",
    "load",
    "names",
    "probe",
    "versions",
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
        "gpu": "shoal.machine.probes.gpu:Gpu",
        "loopback": "shoal.machine.probes.loopback:Loopback",
        "system": "shoal.machine.probes.system:System",
    },
)

_HANDED_ON = {
    "Check": "shoal.machine.doctor:Check",
    "compare": "shoal.machine.compare:compare",
    "doctor": "shoal.machine.doctor:doctor",
    "fingerprint": "shoal.machine.fingerprint:fingerprint",
    "load": "shoal.machine.described:load",
    "names": "shoal.machine.described:names",
    "probe": "shoal.machine.probing:probe",
    "versions": "shoal.machine.fingerprint:versions",
}


def __getattr__(name: str) -> Any:
    if name in _HANDED_ON:
        return load_object(_HANDED_ON[name])
    raise AttributeError(f"module 'shoal.machine' has no attribute {name!r}")

"""machine: what there is. Probe it, describe it, compare it, and check that it is well.

The door: what is used most, imported when used. Further in their modules: ``doctor.doctor``,
``fingerprint.fingerprint`` and ``fingerprint.versions``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.core.parts import load_object

if TYPE_CHECKING:
    from shoal.machine.comparing import compare
    from shoal.machine.described import load, names
    from shoal.machine.probing import probe
    from shoal.machine.roofline import roofline_svg

__all__ = [
    "compare",
    "load",
    "names",
    "probe",
    "roofline_svg",
]

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

"""The C sources of the probes, built when a probe first needs them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from shoal.core.native import build

__all__ = ["libraries", "library"]

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "chase_map": (c_void_p, [c_uint64, c_int, POINTER(c_int)]),
    "chase_unmap": (None, [c_void_p, c_uint64]),
    "chase_link": (c_int, [c_void_p, c_uint64, c_uint64, c_uint64, c_int]),
    "chase_warm": (c_uint64, [c_void_p, c_uint64, c_uint64]),
    "chase_run": (c_double, [POINTER(c_void_p), c_uint64]),
    "chase_overhead": (c_double, [POINTER(c_void_p), c_uint64]),
    "bandwidth_has": (c_int, [c_int]),
    "bandwidth_run": (
        c_int,
        [c_int, c_uint64, c_int, POINTER(c_int), c_int, c_int, POINTER(c_double)],
    ),
    "unit_clock": (c_double, [c_uint64]),
    "gemm_run": (
        c_double,
        [c_int, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int],
    ),
    "gemm_moved": (c_uint64, [c_int, c_int64, c_int64, c_int64]),
    "system_ping_pong": (c_double, [c_int, c_int, c_int, c_int]),
    "system_page_fault": (c_double, [c_int]),
    "system_launch": (c_double, [c_char_p, c_int]),
    "system_memcpy": (c_double, [c_uint64, c_int]),
    "system_write": (c_double, [c_char_p, c_uint64, c_uint64]),
    "system_fsync": (c_double, [c_char_p, c_int]),
    "system_read": (c_double, [c_char_p, c_uint64, c_int]),
    "system_loopback": (
        c_int,
        [c_uint64, c_int, c_uint64, c_int, POINTER(c_double), POINTER(c_double)],
    ),
}


def libraries() -> tuple[str, ...]:
    """Names of all libraries."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.cpp")))


def library(name: str) -> ctypes.CDLL:
    """The built library of ``name``.cpp of this directory, its functions declared.

    Raises:
        BuildError: there is no compiler, or it refuses the source.
    """
    source = (Path(__file__).parent / f"{name}.cpp").read_text(encoding="utf-8")
    part = build(source, name=name)
    for function, (result, arguments) in _SIGNATURES.items():
        if function.startswith({"units": "unit"}.get(name, name) + "_"):
            declared = getattr(part, function)
            declared.restype, declared.argtypes = result, arguments
    return part

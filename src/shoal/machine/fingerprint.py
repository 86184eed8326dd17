"""Who measured: the facts that make two measurements comparable."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

from shoal.core.native import cpu_flags, cpu_model
from shoal.machine import host

PACKAGES = (
    "shoal-ml",
    "torch",
    "numpy",
    "scipy",
    "pydantic",
    "ray",
    "transformers",
    "tokenizers",
    "safetensors",
)
# What decides which kernels a library picks.
_TELLING = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "sve", "i8mm")


def fingerprint() -> dict[str, str]:
    """CPU model, instruction sets, cores, memory, caches, kernel and Python, as text."""
    caches = host.caches()
    return {
        "cpu": cpu_model(),
        "isa": " ".join(flag for flag in _TELLING if flag in cpu_flags()) or "baseline",
        "cores": str(len(host.cpus())),
        "memory_bytes": str(host.memory_total()),
        "caches": " ".join(f"{name}={size}" for name, size in caches.items()),
        "system": platform.system(),
        "kernel": platform.release(),
        "arch": platform.machine(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Package -> version of what is installed, without importing any of it."""
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions

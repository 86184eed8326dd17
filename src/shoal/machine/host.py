"""What the operating system says about this host: cores, memory, caches, load."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from pathlib import Path

import psutil

Caches = dict[str, int]


def cpus() -> tuple[int, ...]:
    """The cores this process may use: its affinity, cut to the control group's share."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = list(range(os.cpu_count() or 1))
    quota = _read(Path("/sys/fs/cgroup/cpu.max")).split()
    if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
        share = max(1, round(int(quota[0]) / int(quota[1])))
        allowed = allowed[:share]
    return tuple(allowed)


def memory_total() -> int:
    """Bytes of memory this process may use."""
    total = int(psutil.virtual_memory().total)
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    return min(total, int(limit)) if limit.isdigit() else total


def memory_available() -> int:
    """Bytes of memory that are free now, or freed on demand."""
    free = int(psutil.virtual_memory().available)
    limit = _read(Path("/sys/fs/cgroup/memory.max")).strip()
    used = _read(Path("/sys/fs/cgroup/memory.current")).strip()
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def peak_memory() -> int:
    """Most bytes of memory that this process had."""
    # What getrusage says begins, on Linux, with the peak of the process that started this one.
    match = re.search(r"^VmHWM:\s+(\d+) kB$", _read(Path("/proc/self/status")), re.MULTILINE)
    if match:
        return 1024 * int(match[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def caches() -> Caches:
    """Name -> bytes of the caches that the first core sees, as the OS reports them."""
    caches: Caches = {}
    for entry in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = _read(entry / "level").strip(), _read(entry / "type").strip()
        match = re.fullmatch(r"(\d+)([KMG]?)", _read(entry / "size").strip())
        if match and level and kind in ("Data", "Unified"):
            scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
            caches["l1d" if level == "1" else f"l{level}"] = int(match[1]) * scale
    return caches


def load_average() -> float:
    """Runnable processes over the last minute."""
    return os.getloadavg()[0]


def ticks() -> tuple[float, float]:
    """(all, stolen) processor time since boot: stolen is what other guests took."""
    first = _read(Path("/proc/stat")).splitlines()[:1]
    numbers = [float(word) for word in first[0].split()[1:]] if first else []
    return sum(numbers[:8]), numbers[7] if len(numbers) > 7 else 0.0


def _read(path: Path) -> str:
    # Absent on other kernels and in some containers: then there is nothing to say.
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""

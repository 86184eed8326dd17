"""Is this machine fit for work, and if not, what would make it so."""

from __future__ import annotations

import datetime
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from shoal.core.errors import ShoalError, install
from shoal.core.files import shoal_home
from shoal.core.native import build, compiler, cpu_model
from shoal.core.sizes import human_bytes
from shoal.machine import host

_GB = 10**9


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        status: ok, warn (it works, with a drawback) or fail (something will not work).
        detail: what was found.
        fix: what to do; empty when all is well.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def doctor() -> list[Check]:
    """Look at everything; takes about a second and changes nothing but the native cache."""
    return [check() for check in CHECKS]


def _ok(name: str, detail: str) -> Check:
    return Check(name=name, status="ok", detail=detail)


def _warn(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status="warn", detail=detail, fix=fix)


def _fail(name: str, detail: str, fix: str) -> Check:
    return Check(name=name, status="fail", detail=detail, fix=fix)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return _ok("python", version)


def _torch() -> Check:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return _warn(
            "torch",
            "not installed: planning works, running does not",
            install("run"),
        )
    numbers = tuple(int(x) for x in version.split("+")[0].split(".")[:2] if x.isdigit())
    if numbers < (2, 11):
        return _warn("torch", version, "pip install 'torch>=2.11'")
    return _ok("torch", version)


def _compiler() -> Check:
    tool = compiler()
    if tool is None:
        return _fail(
            "compiler",
            "no C++ compiler: this machine cannot be probed",
            "Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++",
        )
    try:
        library = build('extern "C" int shoal_doctor() { return 7; }', name="doctor")
    except ShoalError as cause:
        return _fail("compiler", str(cause), "repair the compiler, or set CXX to another one")
    if library.shoal_doctor() != 7:
        return _fail("compiler", f"{tool} builds wrong code", "set CXX to another compiler")
    return _ok("compiler", tool)


def _cores() -> Check:
    usable, all_ = len(host.cpus()), os.cpu_count() or 1
    detail = f"{usable} of {all_} cores usable, {cpu_model()}"
    if usable < 2:
        return _warn(
            "cores", detail, "two ranks would share one core; allow this process more cores"
        )
    return _ok("cores", detail)


def _memory() -> Check:
    free, total = host.memory_available(), host.memory_total()
    detail = f"{human_bytes(free)} of {human_bytes(total)} available"
    if free < 1 * _GB:
        return _fail("memory", detail, "end other programs; training needs 1 GB at least")
    if free < 4 * _GB:
        return _warn("memory", detail, "end other programs, or train small models")
    return _ok("memory", detail)


def _disk() -> Check:
    home = shoal_home()
    place = home
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    detail = f"{human_bytes(free)} free at {home}"
    if not os.access(place, os.W_OK):
        return _fail("disk", f"{place} cannot be written", "set SHOAL_HOME to another directory")
    if free < 0.5 * _GB:
        return _fail("disk", detail, "free some space, or set SHOAL_HOME to another disk")
    if free < 5 * _GB:
        return _warn("disk", detail, "checkpoints need room; free some space")
    return _ok("disk", detail)


def _load() -> Check:
    load, cores = host.load_average(), len(host.cpus())
    detail = f"load average {load:.2f} on {cores} cores"
    if load > 0.5 * cores:
        return _warn("load", detail, "measurements would be noisy; wait until the load is lower")
    return _ok("load", detail)


def _shared_memory() -> Check:
    place = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    if not place.is_dir():
        return _warn("shared memory", "no /dev/shm", "data loaders and Ray will use files")
    total = shutil.disk_usage(place).total
    detail = f"{human_bytes(total)} at {place}"
    if total < 0.25 * _GB:
        return _warn("shared memory", detail, "start the container with --shm-size=2g")
    return _ok("shared memory", detail)


def _ray() -> Check:
    if importlib.util.find_spec("ray") is None:
        return _ok("ray", f"not installed; only needed for many machines: {install('cluster')}")
    return _ok("ray", metadata.version("ray"))


def _gpu() -> Check:
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        return _ok("gpu", "none; the CPU is used")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        version = ""
    if not version or version.endswith("+cpu"):
        return _warn(
            "gpu",
            f"an NVIDIA driver, but torch {version or 'is missing'}",
            "install a CUDA build of torch",
        )
    return _ok("gpu", f"an NVIDIA driver, torch {version}")


def _probed() -> Check:
    from shoal.machine.described import load
    from shoal.machine.probing import saved_path

    path = saved_path()
    if not path.exists():
        return _warn("probe", "this machine has not been probed yet", "run: shoal probe")
    try:
        machine = load("local")
    except ShoalError as cause:
        return _fail("probe", str(cause), "run: shoal probe")
    modified = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    age = datetime.datetime.now(datetime.UTC) - modified
    detail = f"{path}, {age.days} days old"
    if machine.fingerprint.get("cpu") != cpu_model():
        return _warn("probe", f"{path} is of another CPU", "run: shoal probe")
    if "noise" in machine.sources:
        return _warn("probe", machine.sources["noise"], "run shoal probe when the load is lower")
    if age.days > 30:
        return _warn("probe", detail, "run: shoal probe")
    return _ok("probe", detail)


CHECKS: tuple[Callable[[], Check], ...] = (
    _python,
    _torch,
    _compiler,
    _cores,
    _memory,
    _disk,
    _load,
    _shared_memory,
    _ray,
    _gpu,
    _probed,
)

"""The one builder of native code: plain C functions, compiled once per machine.

A source file declares ``extern "C"`` functions over raw pointers and includes little
beyond the C headers, so g++ takes a fraction of a second. The library is kept under
``shoal_home()/native``, named by what it depends on (source, flags, compiler and CPU),
and appears there by a rename, so processes that build the same source at the same time
both find a whole file. It ends with a digest of its bytes and its name: what is cut short,
changed, or built for another processor and renamed is built again, and never loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import BuildError, require
from shoal.core.files import shoal_home

FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
_TIMEOUT_S = 120.0
_LOADED: dict[Path, ctypes.CDLL] = {}


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX`` if it is set, or g++, c++, clang++; else None."""
    return _compiler(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@functools.cache
def _compiler(wanted: str, path: str) -> str | None:
    for name in [*wanted.split()[:1], "g++", "c++", "clang++"]:
        found = shutil.which(name, path=path)
        if found:
            return found
    return None


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    names: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            key, separator, value = line.partition(":")
            if not separator:
                if names:
                    break
                continue
            names.setdefault(key.strip(), value.strip())
    return names


def cpu_model() -> str:
    """What the CPU calls itself, or the machine type where it does not."""
    info = _cpuinfo()
    return info.get("model name") or info.get("Hardware") or platform.machine() or "unknown"


def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as Linux spells them, such as ``avx512f`` and ``amx_tile``."""
    info = _cpuinfo()
    return frozenset((info.get("flags") or info.get("Features") or "").split())


def library_path(source: str, *, name: str, flags: Sequence[str] = ()) -> Path:
    """Where the library of this source, these flags and this CPU is or will be."""
    tool = compiler() or ""
    kind = (_cpuinfo().get(key, "") for key in ("vendor_id", "cpu family", "model", "CPU part"))
    cpu = (cpu_model(), *kind, *sorted(cpu_flags()))
    signature = "\0".join([source, *FLAGS, *flags, tool, *cpu])
    digest = hashlib.sha256(signature.encode()).hexdigest()[:24]
    return shoal_home() / "native" / f"{name}-{digest}.so"


def build(source: str, *, name: str, flags: Sequence[str] = ()) -> ctypes.CDLL:
    """Compile C++ text, unless that was done before, and load it.

    Args:
        source: text with ``extern "C"`` functions.
        name: short name of the library: letters, digits, ``_`` and ``-``.
        flags: further compiler flags, after :data:`FLAGS`.

    Raises:
        BuildError: there is no compiler, or it refuses the source; the message has its
            first error.
    """
    require(
        re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) is not None,
        "native.build name",
        name,
        expected="1 to 64 letters, digits, _ or -",
        error=BuildError,
    )
    path = library_path(source, name=name, flags=flags)
    if path in _LOADED:
        return _LOADED[path]
    if not _sealed(path):
        _compile(source, path, name, flags)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as cause:
        # Made with other versions of the libraries that it needs: build it again, once.
        path.unlink(missing_ok=True)
        _compile(source, path, name, flags)
        try:
            library = ctypes.CDLL(str(path))
        except OSError:
            raise BuildError(
                f"native code {name!r}: built, but cannot be loaded from {path} ({cause}); "
                "set SHOAL_HOME to a directory whose file system allows programs to run"
            ) from cause
    _LOADED[path] = library
    return library


def _seal(library: bytes, path: Path) -> bytes:
    return hashlib.sha256(library + path.name.encode()).digest()


def _sealed(path: Path) -> bool:
    """Whether a library is there, whole, and the one that its name says."""
    try:
        found = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return found[-size:] == _seal(found[:-size], path)


def _compile(source: str, path: Path, name: str, flags: Sequence[str]) -> None:
    tool = compiler()
    if tool is None:
        raise BuildError(
            f"native code {name!r}: no C++ compiler found; install one "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or set CXX"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}.") as place:
            text, output = Path(place) / f"{name}.cpp", Path(place) / path.name
            text.write_text(source, encoding="utf-8")
            command = [tool, *FLAGS, *flags, "-o", str(output), str(text)]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode or not output.exists():
                raise BuildError(
                    f"native code {name!r}: {_first_error(done.stderr)} "
                    f"({tool} exited with {done.returncode})"
                )
            with output.open("ab") as library:
                library.write(_seal(output.read_bytes(), path))
            os.replace(output, path)
    except subprocess.TimeoutExpired as cause:
        raise BuildError(
            f"native code {name!r}: {tool} took more than {_TIMEOUT_S:g} s; try again when the "
            "machine is less busy"
        ) from cause
    except OSError as cause:
        raise BuildError(
            f"native code {name!r}: {path.parent} cannot be written ({cause.strerror or cause}); "
            "free some space or set SHOAL_HOME to another directory"
        ) from cause


def _first_error(stderr: str) -> str:
    """The compiler's first complaint, without the path of the temporary file."""
    lines = [line for line in stderr.splitlines() if "error" in line.lower()]
    lines = lines or [line for line in stderr.splitlines() if line.strip()]
    if not lines:
        return "the compiler failed without a message"
    return re.sub(r"^\S*/([^/\s]+\.cpp)", r"\1", lines[0]).strip()

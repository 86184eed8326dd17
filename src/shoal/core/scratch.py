"""Temporary directories and names in shared memory whose owner follows from their name.

A process that is killed removes nothing. The name therefore says which process made the
directory, and :func:`sweep` removes those whose process is gone::

    shoal-replica0-k3fa-40123-2vq8c1-x8ab_3fq
          prefix   host pid   start  random

``host`` stands for the name of the host and the PID namespace: several containers, or hosts with a
common file system, may share a directory, and none can see whether the processes of another run.
``start`` is the moment at which the process began (clock ticks since boot, field 22 of
``/proc/PID/stat``), so that another process with a used number is not mistaken for the owner.
Directories have mode 0700 and end in characters that cannot be guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.core.errors import MachineError, require
from shoal.core.janitor import clean_up_with, wait_for_end

_SYSTEM = Path("/tmp")  # noqa: S108 - all that is made in it is ours alone
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - all that is made in it is ours alone

_SOCKET_PATH = 107
_SOCKET_ROOM = 1 + 8 + 1 + 16  # a slash, the random characters, a slash, a socket's name
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NAME = re.compile(r"shoal-[a-z0-9-]+-([a-z0-9]{4})-([0-9]+)-([a-z0-9]+)-[A-Za-z0-9_]{8}(\..*)?")


def scratch_name(prefix: str) -> str:
    """The beginning of a name that says who its owner is: this process.

    For what makes a file or directory by itself, as ``tempfile`` does with ``prefix``; eight
    random characters must follow.

    Args:
        prefix: what it is for: small letters, digits and dashes.

    Raises:
        ConfigError: another character.
    """
    require(
        re.fullmatch(r"[a-z0-9-]+", prefix) is not None,
        "scratch.prefix",
        prefix,
        expected="small letters, digits and dashes",
    )
    _take_care()
    process = os.getpid()
    return f"shoal-{prefix}-{_host()}-{process}-{_base36(_started(process) or 0)}-"


def _take_care() -> None:
    """Sweep when the first name of this process is made, and after it was killed."""
    process = os.getpid()
    if _Care.process != process:
        _Care.process = process
        clean_up_with("shoal.core.scratch")
        sweep()


class _Care:
    """Of the process that has swept; a fork is another one."""

    process = 0


def scratch(prefix: str, within: Path | None = None, *, sockets: bool = False) -> Path:
    """Make an empty directory that only this user can open (mode 0700).

    The caller removes it; if the process is killed before, :func:`sweep` does.

    Args:
        prefix: what it is for: small letters, digits and dashes.
        within: the directory to make it in; without one, that of temporary files (``TMPDIR``).
        sockets: Unix sockets will be in it, whose paths have at most 107 bytes: where that of
            temporary files is too deep for them, the system's own ``/tmp`` is used.

    Raises:
        MachineError: the file system refuses.
    """
    start = scratch_name(prefix)
    place = Path(tempfile.gettempdir()) if within is None else within
    if sockets and len(os.fsencode(place)) + len(start) + _SOCKET_ROOM > _SOCKET_PATH:
        place = _SYSTEM
    try:
        return Path(tempfile.mkdtemp(prefix=start, dir=place))
    except OSError as cause:
        raise MachineError(
            f"{place}: no temporary directory can be made ({cause.strerror or cause}); "
            "free some space or set TMPDIR to another directory"
        ) from cause


@contextlib.contextmanager
def scratch_directory(prefix: str, within: Path | None = None) -> Iterator[Path]:
    """A directory of :func:`scratch` that is removed when the block ends.

    Raises:
        MachineError: the file system refuses to make it.
    """
    folder = scratch(prefix, within)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shm_name(prefix: str) -> str:
    """A new name for a file in shared memory, to be made with ``O_EXCL`` and mode 0600.

    Args:
        prefix: what it is for: small letters, digits and dashes.
    """
    return scratch_name(prefix) + secrets.token_hex(4)


def left_behind(folders: Sequence[Path] | None = None) -> list[Path]:
    """What processes of this host and PID namespace have left that are gone.

    Args:
        folders: directories to look in; without them, those of temporary files and shared memory.
    """
    results = []
    if folders is None:
        folders = list(dict.fromkeys([Path(tempfile.gettempdir()), _SYSTEM, SHARED_MEMORY]))
    for folder in folders:
        try:
            paths = sorted(folder.iterdir())
        except OSError:  # not there, or not ours to read: nothing of ours is in it
            continue
        for path in paths:
            match = _NAME.fullmatch(path.name)
            mine = match is not None and match[1] == _host()
            if match and mine and not _runs(int(match[2]), match[3]):
                results.append(path)
    return results


def sweep(folders: Sequence[Path] | None = None) -> list[Path]:
    """Remove what processes that are gone have left behind; what cannot be removed is left.

    Args:
        folders: as of :func:`left_behind`.

    Returns:
        What was removed.
    """
    return [path for path in left_behind(folders) if _remove(path)]


def _remove(path: Path) -> bool:
    """Whether a file or directory of this user is gone now, and was not before."""
    try:
        if path.lstat().st_uid != os.geteuid():
            return False
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError:  # another process sweeps too, or the file system refuses
        return False
    return True


def _runs(process: int, started: str) -> bool:
    """Whether the process that began at that moment still exists."""
    if not Path("/proc/self/stat").exists():
        return True  # nothing is known without /proc, so nothing is removed
    now = _started(process)
    return now is not None and _base36(now) == started


def _started(process: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if it does not exist or has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field, the name, may hold blanks and parentheses; the first after it is the third.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _host() -> str:
    """Four characters for the host and its PID namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    text = f"{platform.node()} {namespace}"
    return _base36(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")).zfill(4)[-4:]


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text or "0"


if __name__ == "__main__":
    wait_for_end(int(sys.argv[1]))
    sweep()

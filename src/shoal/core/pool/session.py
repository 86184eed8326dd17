"""A directory of a cluster that belongs to one process, and the process that clears it away.

Ray leaves the directory of a session where it is, and when the process that started a cluster is
killed, no process is left to tidy up. A process of its own waits for the end of a pipe, which comes
however the other one ends: then it kills what still has files of the directory open, and removes
the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shoal.core import children

# Names of sockets below it have some 68 characters, and a socket's path has at most 107.
_LONGEST = 36
_LEAVE_S = 20.0
# What runs there ends by itself when its cluster is gone, and removes what is its own.
_GRACE_S = 3.0


class PoolSession:
    """A directory that only its user can enter, while this process lives.

    Attributes:
        path: the directory.
        inner: one in it for the cluster: Ray opens its own to all users.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self) -> None:
        place = tempfile.gettempdir()
        short = len(place) + len("/shoal-ray-") + 8 <= _LONGEST
        self.path = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir=place if short else "/tmp"))  # noqa: S108
        self.inner = self.path / "r"
        self._guard = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "shoal.core.pool.session"),
                *(str(self.path), str(os.getpid())),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=children.ROOT,
            env=children.environment(),
            start_new_session=True,  # what ends this process must not end the guard
        )

    def close(self) -> None:
        """End what is left of the cluster, and remove the directory."""
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(_LEAVE_S)


def end_those_in(folder: Path, spare: int) -> None:
    """Wait for the processes that use files of a directory, and kill those that do not end.

    Args:
        folder: the directory.
        spare: the process that it belongs to.
    """
    place = f"{folder}/"
    begin = time.monotonic()
    while results := [pid for pid in _pids() if pid != spare and _uses(pid, place)]:
        waited = time.monotonic() - begin
        if waited > _LEAVE_S / 2:
            return
        for pid in results if waited > _GRACE_S else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> list[int]:
    result = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    return [pid for pid in result if pid != os.getpid()]


def _uses(pid: int, place: str) -> bool:
    process = Path(f"/proc/{pid}")
    # A worker overwrites its own command line, but writes its log into the directory.
    with contextlib.suppress(OSError):
        if place.encode() in (process / "cmdline").read_bytes():
            return True
        for fd in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(fd.readlink()).startswith(place):
                    return True
    return False


def main() -> None:
    """Wait until standard input ends, then clear the directory away."""
    folder, owner = Path(sys.argv[1]), int(sys.argv[2])
    sys.stdin.buffer.read()
    end_those_in(folder, owner)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""A process that cleans up after this one was killed.

A killed process removes nothing. A shell, which takes less than 1 MiB, therefore waits at the end
of a pipe that only this process holds. When the pipe closes without a word, it becomes
``python -m MODULE PROCESS``, which removes what the process has left behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from shoal.core.children import ROOT, SAFE_PATH, environment

# The shell that waits is an orphan: Ray kills the children of its workers with them.
_SCRIPT = 'exec 3<&0; { read -r word || exec "$@"; } <&3 3<&- &'
_LOCK = threading.Lock()
_JANITORS: dict[str, tuple[int, subprocess.Popen[bytes]]] = {}
_LIMIT_S = 30.0
_LEAVE_S = 5.0
# No keys: what waits for long has nothing that others could want.
_NEEDED = ("PATH", "PYTHONPATH", SAFE_PATH, "LD_LIBRARY_PATH", "HOME", "TMPDIR")


def clean_up_with(module: str) -> None:
    """Let ``python -m module PROCESS`` run once this process has been killed.

    The first call of a process and module counts. Where no shell can be started, nothing cleans up
    before the next process does.

    Args:
        module: dotted name; its command line takes the number of this process.
    """
    with _LOCK:
        process = os.getpid()
        if module in _JANITORS and _JANITORS[module][0] == process:
            return
        command = [sys.executable, "-P", "-m", module, str(process)]
        with contextlib.suppress(OSError):
            janitor = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # closed when it has ended
                stderr=subprocess.DEVNULL,
                env={k: v for k, v in environment().items() if k in _NEEDED},
                cwd=ROOT,
                start_new_session=True,  # what ends this process must not end it
            )
            _JANITORS[module] = (process, janitor)
            with contextlib.suppress(subprocess.TimeoutExpired):
                janitor.wait(_LEAVE_S)  # the first shell, which ends at once


@atexit.register
def dismiss() -> None:
    """Say that this process has cleaned up itself; for those that end by ``os._exit``."""
    for process, janitor in _JANITORS.values():
        if os.getpid() != process or janitor.stdin is None or janitor.stdin.closed:
            continue  # a fork's exit says nothing about its parent
        with contextlib.suppress(BrokenPipeError), janitor.stdin:
            janitor.stdin.write(b"done\n")
        assert janitor.stdout is not None
        with janitor.stdout as ended:
            select.select([ended], [], [], _LEAVE_S)


def wait_for_end(process: int) -> None:
    """Wait until a process that has closed its files is gone."""
    deadline = time.monotonic() + _LIMIT_S
    stat = Path(f"/proc/{process}/stat")
    while time.monotonic() < deadline:
        try:
            if stat.read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX":
                return
        except OSError:
            return
        time.sleep(0.01)


def leave(status: int) -> NoReturn:
    """End this process at once, threads and all, with its output written."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    dismiss()
    os._exit(status)

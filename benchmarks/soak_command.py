"""A command of Shoal that is to be broken, and what must never be after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from shoal.core.scratch import SHARED_MEMORY, left_behind

SHOAL = str(Path(sys.executable).with_name("shoal"))
MARK = "MARK_OF_THE_SOAK"
WAIT_S = 180.0
# Every Python of a command reads its wall clock through this; monotonic clocks stay as they are.
CLOCK = """
import time
from pathlib import Path
def _faked(read, unit, file=Path({file!r})):
    return lambda: read() + unit * int(file.read_text() or 0)
time.time, time.time_ns = _faked(time.time, 1), _faked(time.time_ns, 10**9)
"""


class WrongError(Exception):
    """Something that must never be."""


def marked(mark: str) -> list[psutil.Process]:
    """Processes with the mark in their environment."""
    results = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                results.append(process)
    return results


class Command:
    """A ``shoal`` command with a place for temporary files and a mark of its own."""

    def __init__(
        self,
        folder: Path,
        *words: str,
        faked: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = folder / f"tmp-{self.mark[:8]}"
        self.temporary.mkdir()
        path = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        if faked is not None:
            patched = folder / f"clock-{self.mark[:8]}"
            patched.mkdir()
            (patched / "sitecustomize.py").write_text(CLOCK.format(file=str(faked)))
            path.insert(0, str(patched))
        self.log = (folder / f"log-{self.mark[:8]}").open("w+b")
        self.process = psutil.Popen(
            [SHOAL, *words],
            cwd=folder,
            env={
                **os.environ,
                MARK: self.mark,
                "TMPDIR": str(self.temporary),
                "OMP_NUM_THREADS": "1",
                **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
                **variables,
            },
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def children(self, module: str) -> list[psutil.Process]:
        """Processes below it that run a module."""
        results = []
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline():
                    results.append(process)
        return results

    def wait(self) -> int:
        """Its exit status; WrongError if it does not end, ends with a trace or leaves anything."""
        try:
            status = self.process.wait(WAIT_S)
        except psutil.TimeoutExpired:
            raise WrongError(f"did not end in {WAIT_S:g} s") from None
        deadline = time.monotonic() + 60
        while True:
            left = {
                "processes": [" ".join(p.cmdline()) for p in marked(self.mark)],
                "files": [p.name for p in self.temporary.iterdir()],
                "shared memory": [path.name for path in left_behind([SHARED_MEMORY])],
            }
            if not any(left.values()):
                break
            if time.monotonic() > deadline:
                raise WrongError(f"left behind: {left}")
            time.sleep(0.1)
        printed = self.printed()
        if "Traceback" in printed:
            raise WrongError(f"a trace: {printed[-2000:]}")
        return int(status)

    def printed(self) -> str:
        """What it has written so far."""
        self.log.flush()
        return Path(self.log.name).read_text(errors="replace")

    def kill(self) -> None:
        """End whatever is left of it."""
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.log.close()


def until(condition: Callable[[], bool], command: Command) -> None:
    """Wait for something to be so, or for the command to end."""
    deadline = time.monotonic() + WAIT_S
    while not condition() and command.process.is_running():
        if command.process.status() == psutil.STATUS_ZOMBIE:
            return
        if time.monotonic() > deadline:
            raise WrongError(f"nothing happened in {WAIT_S:g} s: {command.printed()[-2000:]}")
        time.sleep(0.02)

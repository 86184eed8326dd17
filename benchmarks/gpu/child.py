"""A stage in processes of its own, which may crash; this file is what they run.

``python -m gpu.child STAGE OUT SECONDS``
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gpu.frame import AGAIN, DONE, FAILED, LATER, USAGE, ended, put, read, run_stage, write
from shoal.core.errors import ShoalError

# The row of a stage that has no case.
WHOLE = "(stage)"
# What runs a stage: STAGE, OUT and SECONDS follow.
COMMAND = (sys.executable, "-m", "gpu.child")
# s that a process may take to start, before its first case.
START_S = 20.0


def run_apart(stage: str, out: Path, deadline: float, say: Callable[[str], None] = print) -> int:
    """Measure what is left of a stage; its processes are killed at the deadline.

    Returns:
        DONE, LATER, USAGE, or FAILED where they crash before a case.
    """
    rows = read(out, stage)
    if rows.pop(WHOLE, None):
        write(out, stage, rows)
    while True:
        left = deadline - time.monotonic()
        if left < START_S:
            return LATER
        before = read(out, stage)
        command = [*COMMAND, stage, str(out), str(left)]
        child = subprocess.Popen(command, start_new_session=True)
        try:
            status = child.wait(timeout=left)
        except subprocess.TimeoutExpired:
            say(f"[   0 s left] {stage}: the call is over; what it was at is begun again")
            return LATER
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        if status in (DONE, LATER, USAGE):
            return status
        if status != AGAIN:
            open_rows = [n for n, row in read(out, stage).items() if not ended(row)]
            name = next((n for n in open_rows if before.get(n) != read(out, stage)[n]), WHOLE)
            row = {**read(out, stage).get(name, {}), "error": f"its process ended with {status}"}
            put(out, stage, name, row)
            say(f"    {stage}: {name}: {row['error']}")
            if name == WHOLE:
                return FAILED


def main() -> int:
    """Its status is that of :func:`gpu.frame.run_stage`."""
    from gpu.place import here

    stage, out, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    deadline = time.monotonic() + seconds
    try:
        place = here(out)
        try:
            return run_stage(stage, out, deadline, place, functools.partial(print, flush=True))
        finally:
            shutil.rmtree(place.scratch, ignore_errors=True)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


if __name__ == "__main__":
    sys.exit(main())

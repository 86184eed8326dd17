"""One call of ``scripts/gpu``: stages in their order until the time is over, then the table."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path

from gpu import frame
from gpu.child import run_apart
from gpu.place import here, interpreted
from gpu.table import table
from shoal.core.errors import ShoalError
from shoal.core.files import write_atomic
from shoal.cost.gpu.nearest import nearest

# What is in no description, to see that a fallback is said.
UNKNOWN = "NVIDIA Z900"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """What a call is asked."""
    parser = argparse.ArgumentParser("scripts/gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="that this call may take")
    parser.add_argument("--only", nargs="+", choices=frame.STAGES, default=list(frame.STAGES))
    parser.add_argument("--out", type=Path, default=frame.OUT, help="directory of the results")
    parser.add_argument("--retry", action="store_true", help="failed and skipped rows once more")
    parser.add_argument("--again", action="store_true", help="all rows of the stages once more")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, tiny, into nowhere")
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="filled if empty, else installed"
    )
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """0: all is measured; 1: something failed; 2: a usage error; 3: call again."""
    asked = arguments(given)
    try:
        if asked.dry_run:
            return dry_run(tuple(asked.only))
        return measure(asked)
    except ShoalError as error:
        print(f"error: {error}", file=sys.stderr)
        return frame.USAGE


def measure(asked: argparse.Namespace) -> int:
    """Go on where the last call stopped."""
    deadline = time.monotonic() + asked.seconds
    for stage in asked.only if asked.retry or asked.again else ():
        frame.forget(asked.out, stage, everything=asked.again)
    status = frame.DONE
    for stage in asked.only:
        result = run_apart(stage, asked.out, deadline)
        if result == frame.USAGE:
            return result
        status = max(status, result)
    write_atomic(asked.out / "table.md", table(asked.out).encode())
    failed = frame.failures(asked.out, asked.only)
    print(table(asked.out))
    for one in failed:
        print(f"failed: {one}")
    if status == frame.LATER:
        print("not all is measured: call scripts/gpu again")
        return status
    return frame.FAILED if failed or status else frame.DONE


def dry_run(stages: tuple[str, ...]) -> int:
    """Every stage on the CPU with tiny sizes: imports, arguments, files and the table."""
    interpreted()
    failed = [f"{UNKNOWN} is priced, and nothing says so"] if not nearest(UNKNOWN)[1] else []
    out = Path(tempfile.mkdtemp(prefix="shoal-gpu-dry-"))
    place = here(out, dry=True)
    try:
        for stage in stages:
            needs = importlib.import_module(f"gpu.{stage}").NEEDS
            missing = [name for name in needs if importlib.util.find_spec(name) is None]
            failed += [f"{stage} needs {name}, which is not installed" for name in missing]
            deadline = time.monotonic() + 3600.0
            while not missing and frame.run_stage(stage, out, deadline, place) == frame.AGAIN:
                continue
            if not missing and not frame.read(out, stage):
                failed.append(f"{stage} has no cases")
        print(table(out))
        failed += frame.failures(out, stages)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(place.scratch, ignore_errors=True)
    for one in failed:
        print(f"failed: {one}")
    print("dry run: the numbers above mean nothing")
    return frame.FAILED if failed else frame.DONE

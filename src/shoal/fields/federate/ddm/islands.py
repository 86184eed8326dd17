"""Running the processes of islands: a few at a time, watched; one that fails stops alone."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.core import children
from shoal.fields.federate.ddm.protocols import NetworkTask

_POLL_S = 0.05


class _Island:
    """A process at work, and how far it is."""

    def __init__(self, run: Path, task: NetworkTask) -> None:
        self.task, self.step, self.error = task, 0, ""
        self.process: subprocess.Popen[Any] = children.start(
            "shoal.fields.federate.ddm.worker",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=children.environment({"OMP_NUM_THREADS": "1"}),
        )
        assert self.process.stdin is not None
        words = {"run": str(run), "task": task.model_dump(mode="json")}
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.close()
        self._threads = [
            threading.Thread(target=read, daemon=True) for read in (self._steps, self._errors)
        ]
        for thread in self._threads:
            thread.start()

    def _steps(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.step = json.loads(line)["step"]

    def _errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.error = line.strip() or self.error

    def why(self) -> str:
        """Why it has ended early; empty if it has not."""
        for thread in self._threads:
            thread.join(1.0)
        code = self.process.returncode
        if not code:
            return ""
        return self.error if code > 0 else f"ended by signal {-code}"


def train_islands(
    run: Path,
    tasks: Sequence[NetworkTask],
    at_once: int,
    tick: Callable[[float, str], None],
    started: Callable[[NetworkTask, subprocess.Popen[Any]], None] = lambda task, process: None,
) -> dict[str, str]:
    """Train each task in a process of its own, from the shard in its directory.

    A task whose model lies there already is done.

    Args:
        run: directory of the run.
        tasks: what to train; the longest first.
        at_once: processes that may work at the same time.
        tick: called with the share done and what is being done.
        started: called with each process.

    Returns:
        Folder of a task that failed -> why; the others have left a model.
    """
    waiting = [task for task in tasks if not (run / task.folder / "model.safetensors").exists()]
    whole = sum(task.steps * task.batch for task in tasks) or 1
    done = whole - sum(task.steps * task.batch for task in waiting)
    at_work: list[_Island] = []
    failed: dict[str, str] = {}
    try:
        while waiting or at_work:
            while waiting and len(at_work) < at_once:
                at_work.append(_Island(run, waiting.pop(0)))
                started(at_work[-1].task, at_work[-1].process)
            time.sleep(_POLL_S)
            for island in [one for one in at_work if one.process.poll() is not None]:
                at_work.remove(island)
                done += island.task.steps * island.task.batch
                if why := island.why():
                    failed[island.task.folder] = why
            now = done + sum(one.step * one.task.batch for one in at_work)
            names = ", ".join(f"{one.task.folder} at step {one.step}" for one in at_work)
            tick(now / whole, names or "done")
    finally:
        children.kill(one.process for one in at_work)
    return failed

"""Runs that faults strike one after the other, and that must end as if nothing had been."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from soak_command import Command, WrongError, until

from shoal.checkpoint.branches import branches, place_of
from shoal.checkpoint.store import Store

STEPS = 60
TRAIN = [
    *(
        "train",
        "--machine",
        "laptop",
        "--model",
        "shoal-0.3m",
        "--ranks",
        "2",
        "--steps",
        str(STEPS),
    ),
    *("--set", "seq_len=64", "--set", "global_batch=4", "--set", "threads=1"),
    *("--set", "checkpoint.every=5", "--set", "timeout_s=10"),
]
MODES = ("blocking", "snapshot", "lazy")


def events(run: Path) -> list[dict[str, Any]]:
    """The events of a run so far; the last line may be half written."""
    events = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "events.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                events.append(json.loads(line))
    return events


def digest(run: Path) -> str:
    """Of the trained weights."""
    return hashlib.sha256((run / "export" / "model.safetensors").read_bytes()).hexdigest()


@contextlib.contextmanager
def disk(folder: Path, small: bool) -> Iterator[Path]:
    """A directory, on a disk of its own of 96 MiB if wanted."""
    folder.mkdir()
    if not small:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Training:
    """Trials of a run."""

    def __init__(self, folder: Path, draw: random.Random, tally: Counter[str]) -> None:
        self.folder, self.draw, self.tally = folder, draw, tally
        self.faults = ["rank killed", "rank stopped", "supervisor killed"]
        self.faults += ["SIGTERM", "SIGHUP", "SIGINT", "killed while starting"]
        self.faults += ["clock +1 h", "clock -1 h"]
        if os.geteuid() == 0:
            self.faults.append("disk full")
        whole = Command(folder, *TRAIN, "--dir", str(folder / "whole"))
        if whole.wait() != 0:
            raise WrongError(whole.printed())
        self.expected = digest(folder / "whole")

    def trial(self, number: int) -> str:
        """One run with up to three faults; what struck it."""
        faults = self.draw.choices(self.faults, k=self.draw.randint(1, 3))
        mode = self.draw.choice(MODES)
        with disk(self.folder / f"run-{number}", "disk full" in faults) as place:
            run = place / "run"
            words = [*TRAIN, "--dir", str(run), "--set", f"checkpoint.mode={mode}"]
            for fault in faults:
                self.strike(words, run, fault)
                self.tally[fault] += 1
                self.verify(run)
            last = Command(self.folder, *words, *resume(run))
            try:
                if last.wait() != 0:
                    raise WrongError(f"after {faults}: {last.printed()[-2000:]}")
            finally:
                last.kill()
            if digest(run) != self.expected:
                raise WrongError(
                    f"mode {mode}, {faults}: other weights than a run that nothing struck"
                )
        return f"train, {mode}: {', '.join(faults)}"

    def strike(self, words: list[str], run: Path, fault: str) -> None:
        """Start or resume the run, and let a fault strike it."""
        clock = None
        if fault.startswith("clock"):
            clock = self.folder / f"seconds-{uuid.uuid4().hex[:8]}"
            clock.write_text("0")
        done = len(events(run))
        command = Command(self.folder, *words, *resume(run), faked=clock)
        try:
            if fault == "killed while starting":
                time.sleep(self.draw.uniform(0.1, 4.0))
            else:
                until(lambda: any(e["kind"] == "step" for e in events(run)[done:]), command)
                time.sleep(self.draw.uniform(0.0, 1.0))
            allowed = self.act(fault, command, run, clock)
            status = command.wait()
            # A run may have ended by itself before the fault came.
            if status not in (*allowed, 0):
                raise WrongError(f"{fault}: ended with {status}: {command.printed()[-2000:]}")
        finally:
            command.kill()
            (run.parent / "filler").unlink(missing_ok=True)

    def act(self, fault: str, command: Command, run: Path, clock: Path | None) -> tuple[int, ...]:
        """Do it; the statuses with which the command may end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if fault in ("rank killed", "rank stopped"):
                ranks = command.children("shoal.train.worker")
                if ranks:
                    one = self.draw.choice(ranks)
                    one.kill() if fault == "rank killed" else one.suspend()
                return (2,)
            if fault in ("supervisor killed", "killed while starting"):
                command.process.kill()
                return (-signal.SIGKILL,)
            if fault == "disk full":
                fill(run.parent / "filler")
                return (2,)
            if clock is not None:
                clock.write_text("3600" if "+" in fault else "-3600")
                return (0,)
            number = signal.Signals[fault]
            command.process.send_signal(number)
            return (128 + number,)
        return ()

    def verify(self, run: Path) -> None:
        """Every checkpoint that is listed is whole."""
        for branch in branches(run):
            store = Store(place_of(run / "checkpoints", branch.number))
            for step in store.steps():
                store.open(step)
                self.tally["checkpoints verified"] += 1


def resume(run: Path) -> list[str]:
    """The flag, where there is something to go on with."""
    return ["--resume"] if (run / "plan.yaml").exists() else []


def fill(path: Path) -> None:
    """Take all room of a disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))

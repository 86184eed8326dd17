"""The place of a run's checkpoints fails in the middle of it: training goes on, and it is told."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import Refusing, bucket

from shoal.checkpoint.store import Store
from shoal.core.errors import ShoalError
from shoal.core.meter import read_events
from shoal.ir import TrainPlan
from shoal.train.run import execute

pytestmark = [pytest.mark.multi, pytest.mark.slow]

Make = Callable[..., TrainPlan]

# Bytes of a disk that is about to be full: a few checkpoints.
_ROOM = 48 * 2**20
_GETFLAGS, _SETFLAGS, _IMMUTABLE = 0x80086601, 0x40086602, 0x10


class Breaker:
    """Breaks a place when the first checkpoint is there, and mends it when that was told.

    Args:
        break_it: breaks it.
        mend: mends it.
    """

    def __init__(self, break_it: Callable[[], None], mend: Callable[[], None]) -> None:
        self.break_it, self.mend = break_it, mend
        self.broken = self.mended = False

    def __call__(self, supervisor: Any, event: dict[str, Any]) -> None:
        if event["kind"] == "checkpoint" and not self.broken:
            self.broken = True
            self.break_it()
        if event["kind"] == "checkpoint_failed" and not self.mended:
            self.mended = True
            self.mend()


def goes_on(plan: TrainPlan, place: Path | str, run: Path, breaker: Breaker, reason: str) -> None:
    """The run ends, has told of its failure, and every checkpoint that is there is whole."""
    execute(plan, run, inject=breaker)
    events = list(read_events(run / "events.jsonl"))
    failed = [event for event in events if event["kind"] == "checkpoint_failed"]
    assert breaker.mended and failed and reason in failed[0]["message"], failed
    saved = [event["step"] for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(60))
    store = Store(place)
    assert saved[0] in store.steps() and store.steps()[-1] == 60
    assert failed[0]["step"] not in store.steps()
    for step in store.steps():
        store.open(step)


def job(make_plan: Make, place: Path | str, mode: str) -> TrainPlan:
    return make_plan(
        steps=60, checkpoint={"every": 1, "keep": 1000, "mode": mode, "path": str(place)}
    )


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A disk of its own, for who may mount one."""
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip("this user mounts nothing")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk(make_plan: Make, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        filler = disk / "filler"
        with filler.open("wb") as file:
            free = os.statvfs(disk).f_bavail * 4096
            os.posix_fallocate(file.fileno(), 0, free - _ROOM)
        breaker = Breaker(lambda: None, filler.unlink)
        plan = job(make_plan, disk / "saved", "lazy")
        goes_on(plan, disk / "saved", tmp_path / "run", breaker, "disk full while saving")


def test_a_full_disk_under_the_run_itself_is_what_the_error_says(
    make_plan: Make, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        filled: list[int] = []

        def fill(_supervisor: Any, event: dict[str, Any]) -> None:
            if event["kind"] != "step" or filled:
                return
            filled.append(event["step"])
            with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 2**20):
                    pass
                while file.write(b"x" * 64):
                    pass

        plan = make_plan(steps=400, checkpoint={"every": 0, "path": str(tmp_path / "saved")})
        with pytest.raises(ShoalError, match=r"disk full|No space left on device"):
            execute(plan, disk / "run", inject=fill)


def forbid(folder: Path, *, allow: bool = False) -> None:
    """Take away the right to write, from root as well."""
    if os.geteuid():
        folder.chmod(0o700 if allow else 0o500)
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        flags = struct.unpack("i", fcntl.ioctl(fd, _GETFLAGS, bytes(4)))[0]
        wanted = flags & ~_IMMUTABLE if allow else flags | _IMMUTABLE
        fcntl.ioctl(fd, _SETFLAGS, struct.pack("i", wanted))
    finally:
        os.close(fd)


def test_lost_permission(make_plan: Make, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    place.mkdir()
    try:
        forbid(place)
        forbid(place, allow=True)
    except OSError:
        pytest.skip("this file system cannot forbid root anything")
    breaker = Breaker(lambda: forbid(place), lambda: forbid(place, allow=True))
    try:
        goes_on(job(make_plan, place, "snapshot"), place, tmp_path / "run", breaker, "permissions")
    finally:
        forbid(place, allow=True)


def test_a_server_that_answers_500(
    make_plan: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket(monkeypatch, wrap=Refusing) as place:
        plan = make_plan(
            steps=60, checkpoint={"every": 20, "keep": 9, "mode": "lazy", "path": place}
        )
        breaker = Breaker(lambda: None, lambda: None)
        goes_on(plan, place, tmp_path / "run", breaker, "cannot be saved")

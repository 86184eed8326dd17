"""Saves checkpoints in forked children that are killed, and checks what they leave.

Run as ``python crashing_writer.py calls|moments|MODE ROOT``; prints how many children died.

- ``calls``: the child dies at its first call to the file system, the next child at its
  second, and so on through every call of three saves; a write dies half-way.
- ``moments``: the child saves for ever and is killed after a random time.
- ``MODE``: the same in a mode of saving that goes on behind, its tensors changing meanwhile.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import Store

KEEP = 2
CALLS = ("open", "write", "pwrite", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell which step they are of."""
    return {f"model.{i}": torch.full((300 + i,), float(step + i)) for i in range(3)}


def save(root: Path, step: int) -> None:
    """Save one step."""
    Store(root, keep=KEEP).save(step, state(step), {"seed": step})


def check(root: Path, done: int) -> int:
    """The newest checkpoint loads without falling back, and is no older than ``done``."""
    store = Store(root, keep=KEEP)
    result = store.latest()
    assert result is not None and result.step >= done, (result and result.step, done)
    for name, tensor in state(result.step).items():
        assert torch.equal(result.tensor(name), tensor), (name, result.step)
    assert result.meta == {"seed": result.step, "step": result.step}
    for step in store.steps():
        store.open(step)
    return result.step


def die_at(number: int) -> None:
    """Kill this process at its ``number``-th call to the file system."""
    count = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name in ("write", "pwrite"):
                    fd, data, *at = arguments
                    real(fd, data[: len(data) // 2], *at)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def at_every_call(root: Path) -> int:
    """Children that die at each call in turn; returns how many did."""
    for step in (1, 2):
        save(root / "before", step)
    for number in range(1, 10_000):
        place = root / str(number)
        shutil.copytree(root / "before", place)
        child = os.fork()
        if child == 0:
            die_at(number)
            for step in (3, 3, 4):  # one new, one that replaces, one that deletes an old one
                save(place, step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check(place, 2)
        save(place, 5)
        assert check(place, 5) == 5
        assert all(p.name.startswith("step-") for p in place.iterdir()), list(place.iterdir())
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            return number - 1
    raise AssertionError("the saves never ended")


def write_for_ever(root: Path, first: int, told: int) -> None:
    """Save step by step, and say which steps are done."""
    for step in range(first, first + 10_000):
        save(root, step)
        os.write(told, step.to_bytes(4, "big"))


def save_behind(mode: str) -> Callable[[Path, int, int], None]:
    """The same in a mode that saves behind training."""

    def run(root: Path, first: int, told: int) -> None:
        saver = SAVE_MODES.build(mode).build(Store(root, keep=KEEP), SinglePeer())
        live = state(first)
        for step in range(first, first + 10_000):
            saver.before_update()
            for name, tensor in state(step).items():
                live[name].copy_(tensor)
            saver.save(step, live, {"seed": step})
            for ticket in saver.finished():
                if ticket.error is None:
                    os.write(told, ticket.step.to_bytes(4, "big"))

    return run


def at_random_moments(root: Path, write: Callable[[Path, int, int], None]) -> int:
    """Children that are killed after a random time; returns how many were."""
    choose = random.Random(0)
    save(root, 0)
    done = 0
    for _ in range(60):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            write(root, done + 1, writer)
            os._exit(0)
        os.close(writer)
        time.sleep(choose.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        text = b"".join(iter(lambda fd=reader: os.read(fd, 2**16), b""))
        os.close(reader)
        done = check(root, int.from_bytes(text[-4:], "big") if text else done)
    return 60


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, where = sys.argv[1:]
    if mode == "calls":
        print(at_every_call(Path(where)))
    else:
        forever = write_for_ever if mode == "moments" else save_behind(mode)
        print(at_random_moments(Path(where), forever))

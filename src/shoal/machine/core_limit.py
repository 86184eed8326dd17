"""Shares of a core: groups of processes that may compute for a part of every few milliseconds.

Several emulated devices of equal speed on fewer cores: without a limit, one that has much to do
takes the time of those that wait for it. Linux control groups, of either version; needs root.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import MachineError

# Short beside what a rank computes at a time, long beside a tick of the scheduler.
_PERIOD_US = 10_000
_GROUPS = Path("/sys/fs/cgroup")
_ENDS_S = 5.0


def _root() -> Path | None:
    """Where a group with a limit can be made."""
    if (_GROUPS / "cpu" / "cgroup.procs").exists():
        return _GROUPS / "cpu"
    control = _GROUPS / "cgroup.subtree_control"
    return _GROUPS if control.exists() and "cpu" in control.read_text().split() else None


def unlimited() -> str | None:
    """Why processes cannot be limited here, and what would help; None if they can."""
    root = _root()
    if root is None:
        return "no cpu controller of control groups under /sys/fs/cgroup; mount one"
    if not os.access(root, os.W_OK):
        return f"{root} cannot be written; use sudo"
    return None


def set_control(control: Path, text: str) -> None:
    """Write a control file: the kernel takes it in one call, and nothing can replace it."""
    with control.open("w") as file:
        file.write(text)


@contextlib.contextmanager
def core_limit(name: str, cores: float) -> Iterator[Path]:
    """A group whose processes together compute on so many cores; ``cgroup.procs`` takes their ids.

    The processes must have ended when the block does.

    Raises:
        MachineError: groups cannot be made here.
    """
    root, reason = _root(), unlimited()
    if root is None or reason is not None:
        raise MachineError(f"cores = {cores:g}: {reason}")
    group, quota = root / name, round(cores * _PERIOD_US)
    try:
        group.mkdir()
        if root == _GROUPS:
            set_control(group / "cpu.max", f"{quota} {_PERIOD_US}")
        else:
            set_control(group / "cpu.cfs_period_us", str(_PERIOD_US))
            set_control(group / "cpu.cfs_quota_us", str(quota))
    except OSError as cause:
        remove(group)
        raise MachineError(f"cores = {cores:g}: {cause}") from cause
    try:
        yield group
    finally:
        remove(group)


def remove(group: Path) -> None:
    """Take a group down once its processes have ended."""
    deadline = time.monotonic() + _ENDS_S
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def sweep_groups(ended: list[str]) -> None:
    """Take down the groups of hosts that have ended."""
    root = _root()
    if root is not None:
        for name in ended:
            remove(root / name)

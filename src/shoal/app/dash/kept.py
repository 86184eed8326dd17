"""What a run keeps: its checkpoints, and the memory of every tier while it trained."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.app.dash.runs import Events, number
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.saved import Saved
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.svg import Chart, Series

__all__ = ["Save", "checkpoints", "memory_by_tier", "slowest"]

# Newest saves that a page lists.
MOST = 50
# Ranks of which a page tells.
MOST_RANKS = 1024
_MIB = 2**20


@dataclass(frozen=True)
class Save:
    """One save of a run.

    Args:
        step: after which it was made.
        stall_s: for which training stood still; None if no event tells.
        nbytes: on the disk; None when it is not kept any more.
        files: ranks that wrote it.
        state: complete, damaged, failed, or not kept.
        told: what is wrong.
        mode: how it was saved, as the event says.
        ranks_s: for every rank, phase -> seconds of its share.
    """

    step: int
    stall_s: float | None
    nbytes: int | None = None
    files: int = 0
    state: str = "not kept"
    told: str = ""
    mode: str = ""
    ranks_s: tuple[dict[str, float], ...] = ()


def slowest(save: Save) -> dict[str, int]:
    """Phase -> the rank that it took longest; nothing for a rank alone."""
    if len(save.ranks_s) < 2:
        return {}
    phases = save.ranks_s[0]
    return {
        name: max(range(len(save.ranks_s)), key=lambda rank: save.ranks_s[rank].get(name, 0.0))
        for name in phases
    }


def checkpoints(root: Path | None, events: Events) -> list[Save]:
    """The saves of a run, newest first: those that events tell of, and those on the disk.

    A kept one is called complete when its index, its headers and the sizes of its files are what
    was written; ``shoal model verify`` reads every byte.
    """
    stalls = {int(step): event for step, event in events.saves.items()}
    folders: dict[int, Path] = {}
    if root is not None:
        store = root / "checkpoints"
        try:
            folders = {step: Store(store).folder(step) for step in Store(store).steps()}
        except (OSError, CheckpointError):
            folders = {}  # it is being replaced, or not ours to read: for a page it is not there
    found = []
    for step in sorted({*stalls, *folders}, reverse=True)[:MOST]:
        event = stalls.get(step, {})
        stall = _stall(event)
        mode = str(event.get("mode", ""))[:40]
        ranks = _ranks(event)
        if step not in folders:
            failed = event.get("kind") == "checkpoint_failed"
            told = str(event.get("message", ""))[:500] if failed else ""
            found.append(
                Save(step, stall, None, 0, "failed" if failed else "not kept", told, mode, ranks)
            )
            continue
        state, told, nbytes, files = _looked_at(folders[step], _stamp(folders[step]))
        found.append(Save(step, stall, nbytes, files, state, told, mode, ranks))
    return found


def _stall(event: dict[str, Any]) -> float | None:
    """Seconds for which training stood still, of all causes; None if the event does not tell."""
    blocked = event.get("blocked_s")
    causes = blocked.values() if isinstance(blocked, dict) else [event.get("seconds")]
    total = math.fsum(map(number, causes))
    return total if math.isfinite(total) else None


def _ranks(event: dict[str, Any]) -> tuple[dict[str, float], ...]:
    """Seconds of every rank by phase, as far as the event tells them."""
    told = event.get("ranks_s")
    if not isinstance(told, list) or not all(isinstance(one, dict) for one in told):
        return ()
    return tuple(
        {str(name)[:20]: number(value) for name, value in one.items()} for one in told[:MOST_RANKS]
    )


def _stamp(folder: Path) -> int:
    try:
        return (folder / INDEX_NAME).stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=256)
def _looked_at(folder: Path, _changed: int) -> tuple[str, str, int | None, int]:
    """(state, what is wrong, bytes, files) of one saved step."""
    if folder.is_symlink() or folder.parent.is_symlink():
        return "damaged", f"{folder} is a link, which is not followed", None, 0
    try:
        index = Saved(folder).index
    except ShoalError as error:
        return "damaged", str(error), None, 0
    return "complete", "", sum(file.bytes for file in index.files.values()), len(index.files)


def memory_by_tier(events: Events, width: int, height: int) -> Chart | None:
    """Most bytes of each tier in each step; None for a run that tells of none."""
    names: dict[str, None] = {}
    for event in events.steps.values():
        tiers = event.get("tier_bytes")
        if isinstance(tiers, dict):
            names |= dict.fromkeys(str(name)[:20] for name in tiers)
    series = []
    for name in names:
        pairs = [
            (float(step), number(_tier(event, name)) / _MIB)
            for step, event in sorted(events.steps.items())
        ]
        kept = [(x, y) for x, y in pairs if math.isfinite(y)]
        series.append(Series(name, [x for x, _ in kept], [y for _, y in kept]))
    series = [one for one in series if one.x]
    if not series:
        return None
    said = ", ".join(f"{one.name} {max(one.y):.4g} MiB" for one in series)
    return Chart(
        title="Memory by tier",
        description=f"Most bytes in use in each step: {said}.",
        x_label="step",
        y_label="MiB",
        series=series,
        width=width,
        height=height,
    )


def _tier(event: dict[str, Any], name: str) -> Any:
    tiers = event.get("tier_bytes")
    return tiers.get(name) if isinstance(tiers, dict) else None

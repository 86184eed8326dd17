"""What a run keeps: its checkpoints, and the memory of every tier while it trained."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.branches import branches, place_of
from shoal.checkpoint.history import SaveRecord, heat_map, stalls
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.svg import Chart, Series
from shoal.core.svg_rows import BarChart, HeatMap
from shoal.core.tables import digits
from shoal.train.runs import Events, number

# Newest saves that a page lists.
MOST = 50
_MB = 1e6


@dataclass(frozen=True)
class RunSave:
    """One save of a run.

    Args:
        step: after which it was made.
        stall_s: for which training stood still; None if no event states it.
        nbytes: on the disk; None when it is not kept any more.
        files: ranks that wrote it.
        state: complete, damaged, failed, or not kept.
        message: what is wrong.
        save: what events report of it.
    """

    step: int
    stall_s: float | None
    nbytes: int | None = None
    files: int = 0
    state: str = "not kept"
    message: str = ""
    save: SaveRecord | None = None


def checkpoints(root: Path | None, events: Events) -> list[RunSave]:
    """The saves of a run, newest first: those that events report, and those on the disk.

    A kept one is called complete when its index, its headers and the sizes of its files are what
    was written; ``shoal model verify`` reads every byte.
    """
    folders: dict[int, Path] = {}
    if root is not None:
        try:
            for branch in branches(root):  # of a step that several have, the newest branch's
                store = Store(place_of(root / "checkpoints", branch.number))
                folders |= {step: store.folder(step) for step in store.steps()}
        except (OSError, CheckpointError):
            folders = {}  # it is being replaced, or not ours to read: for a page it is not there
    checkpoints = []
    for step in sorted({*events.saves, *folders}, reverse=True)[:MOST]:
        result = None
        if step in events.saves:
            result = SaveRecord.of(events.saves[step], events.levels.get(step, ()))
        stall = None if result is None else result.stall_s
        if step in folders:
            state, what, nbytes, files = _looked_at(folders[step], _stamp(folders[step]))
            checkpoints.append(RunSave(step, stall, nbytes, files, state, what, result))
        else:
            failed = result is not None and result.failed
            words = "failed" if failed else "not kept"
            checkpoints.append(
                RunSave(step, stall, None, 0, words, result.message if result else "", result)
            )
    return checkpoints


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
        saved = SavedCheckpoint(folder)
        saved.check_files()
    except ShoalError as error:
        return "damaged", str(error), None, 0
    files = saved.index.files
    return "complete", "", sum(file.bytes for file in files.values()), len(files)


def heat_of(saves: Sequence[RunSave]) -> HeatMap | None:
    """Ranks and phases of the newest save, if its ranks have reported."""
    if not saves or saves[0].save is None or not saves[0].save.ranks:
        return None
    result = heat_map(saves[0].save)
    return result if result.columns else None


def stalls_of(saves: Sequence[RunSave]) -> BarChart | None:
    """For how long each save held training up; None if no event states it."""
    notes = [one.save for one in reversed(saves) if one.save is not None and one.save.blocked_s]
    return stalls(notes) if notes else None


def memory_by_tier(events: Events) -> Chart | None:
    """Most bytes of each tier in each step; None for a run that reports none."""
    names: dict[str, None] = {}
    for event in events.steps.values():
        tiers = event.get("tier_bytes")
        if isinstance(tiers, dict):
            names |= dict.fromkeys(str(name)[:20] for name in tiers)
    series = []
    for name in names:
        pairs = [
            (float(step), number(_tier(event, name)) / _MB)
            for step, event in sorted(events.steps.items())
        ]
        kept = [(x, y) for x, y in pairs if math.isfinite(y)]
        series.append(Series(name, [x for x, _ in kept], [y for _, y in kept]))
    series = [one for one in series if one.x]
    if not series:
        return None
    said = ", ".join(f"{one.name} {digits(max(one.y))} MB" for one in series)
    return Chart(
        title="Memory by tier",
        description=f"Peak memory of each step: {said}.",
        x_label="step",
        y_label="MB",
        series=series,
    )


def _tier(event: dict[str, Any], name: str) -> Any:
    tiers = event.get("tier_bytes")
    return tiers.get(name) if isinstance(tiers, dict) else None

"""Branches of a run: what it saves after it was continued from an earlier step.

``shoal train --from-step 20`` abandons what was done after step 20, but deletes nothing. The run
goes on in a new branch, whose checkpoints lie in a directory of their own, ``branch-1``, within
every place where the run saves; those of the first branch lie in the place itself. The newest
branch is the one that ``--resume`` continues: from its newest checkpoint, or from the step where it
begins. Each branch keeps its own newest checkpoints, so none deletes those of another.

The file ``branches.json`` in the run's directory lists them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError
from shoal.core.files import write_json

_FILE = "branches.json"


@dataclass(frozen=True)
class CheckpointBranch:
    """Where a branch begins.

    Args:
        of: number of the branch with the initial checkpoint.
        step: of that checkpoint; None for the first branch, which begins by itself.
    """

    number: int
    of: int = 0
    step: int | None = None


def branches(root: Path) -> list[CheckpointBranch]:
    """All branches of a run, the newest last; one that never branched has one."""
    try:
        listed = json.loads((root / _FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [CheckpointBranch(0)]
    return [CheckpointBranch(0), *(CheckpointBranch(**one) for one in listed)]


def place_of(place: Path | str, number: int) -> Path | str:
    """Where a branch saves in a place: a directory, or an address."""
    if number == 0:
        return place
    folder = f"branch-{number}"
    return place / folder if isinstance(place, Path) else f"{place.rstrip('/')}/{folder}"


def begin_branch(root: Path, places: Sequence[Path | str], step: int) -> CheckpointBranch:
    """Let the run go on from an earlier step.

    Args:
        root: the run's directory.
        places: where the first branch saves, nearest first.
        step: the step; of the newest branch that has it.

    Raises:
        CheckpointError: no branch has it.
    """
    known = branches(root)
    for branch in reversed(known):
        for place in places:
            with contextlib.suppress(OSError, CheckpointError):  # a place that is away has none
                if step in Store(place_of(place, branch.number)).steps():
                    new = CheckpointBranch(len(known), branch.number, step)
                    write_json(root / _FILE, [asdict(one) for one in [*known[1:], new]])
                    return new
    last = known[-1].number
    Store(place_of(places[0], last)).open(step)  # says which there are
    raise CheckpointError(f"{root}: no checkpoint of step {step}")

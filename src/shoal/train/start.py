"""A run that begins where another one stopped: of any format, any split, any number of ranks.

The file ``start.json`` in the run's directory says from which checkpoint. As long as the run has
saved nothing of its own, its ranks begin there: with weights and moments, at that step, so with
the tokens that come next and at that place of the learning rate's course.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import CheckpointError
from shoal.core.files import write_json
from shoal.train.finite import non_finite

if TYPE_CHECKING:
    from shoal.checkpoint.formats.protocols import Contents
    from shoal.ir import TrainJob
    from shoal.train.loop import RankTrainer

FILE = "start.json"


def begin_at(root: Path, place: str) -> None:
    """Let the run in ``root`` begin from a checkpoint.

    What ranks dumped is put together here, once, and not by every rank.

    Args:
        root: directory of the run.
        place: path, ``FORMAT:PATH`` such as ``universal:DIR``, or the address of a store.

    Raises:
        ShoalError: it cannot be read, or is no checkpoint that training can go on from.
    """
    from shoal.checkpoint.formats.transfer import name_of, open_any
    from shoal.checkpoint.remote import is_address

    contents = open_any(place)
    if not isinstance(contents.meta.get("run"), Mapping):
        raise CheckpointError(
            f"{contents.path}: has no record of its data, seed and batch, so a run cannot "
            f"continue from it; to start with its weights, convert it to huggingface and "
            "give that directory as model"
        )
    if is_address(contents.path):
        place = str(contents.path)
    else:
        place = f"{name_of(contents)}:{Path(contents.path).absolute()}"
    write_json(root / FILE, {"from": place})


def open_start(root: Path) -> Contents | None:
    """The checkpoint from which the run in ``root`` begins; None if it begins by itself."""
    from shoal.checkpoint.formats.transfer import open_any

    file = root / FILE
    if not file.is_file():
        return None
    return open_any(str(json.loads(file.read_text())["from"]))


def take_over(
    trainer: RankTrainer, contents: Contents, model: Mapping[str, Any], run: Mapping[str, Any]
) -> int:
    """Load a checkpoint of another run into this one.

    Args:
        trainer: this rank's.
        contents: the checkpoint.
        model: what its configuration must be.
        run: data, seed, batch and optimizer that it must have been trained with.

    Returns:
        The step to go on with.

    Raises:
        CheckpointError: it is of another model or another run, is damaged or not finite.
    """
    from shoal.checkpoint.common import differences

    for kind, now in (("model", model), ("run", run)):
        then = contents.meta.get(kind) or {}
        for key, there, here in differences(then, now):
            raise CheckpointError(
                f"{contents.path}: saved with {kind}.{key} = {there!r}, and the run has {here!r}; "
                "restore that value, or start a new run without --from"
            )
    trainer.load(contents)
    bad = non_finite(trainer.pieces())
    if bad:
        raise CheckpointError(
            f"{contents.path}: step {contents.step} cannot be continued: {bad}; begin from an "
            "earlier one"
        )
    return contents.step


def job_of(place: str) -> TrainJob | None:
    """The job with which a checkpoint was trained; None if it does not say it.

    Raises:
        ShoalError: the checkpoint cannot be read.
    """
    from shoal.checkpoint.formats.transfer import open_any
    from shoal.core.config import parse
    from shoal.ir import TrainJob

    contents = open_any(place)
    raw = contents.meta.get("job")
    return parse(TrainJob, raw, where=f"{contents.path}: job") if isinstance(raw, dict) else None

"""The values of a job ``train_towers``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.retrieve.towers.protocols import TowerTask
from shoal.ir import Job, Plan, Report


class TrainTowersJob(TowerTask, Job):
    """Train a tower for queries and one for documents, and measure what they retrieve.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: ``local:N``, N pairs of this machine's documentation and packages; a file of JSON
            lines with ``query`` and ``document`` (rows without a document are further queries); or
            documents with titles, as ``rank_peers`` reads them (``packages``,
            ``docstrings:PACKAGE``, a directory).
        method: the way to train; None lets the planner choose.
        held: pairs that are held out to judge by, and as many more to choose by.
        k: documents of an answer.
        ranks: processes that share each batch; 1 trains in this one.
        threads: of each process.
    """

    job: Literal["train_towers"] = "train_towers"
    name: str = Field(default="train_towers", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    method: Annotated[Choice, Kind("tower_training")] | None = None
    held: PositiveInt = 1000
    k: Annotated[int, Ge(1), Le(1000)] = 10
    ranks: Annotated[int, Ge(1), Le(64)] = 1
    threads: PositiveInt = 1

    def task(self) -> TowerTask:
        """How towers learn."""
        return TowerTask(**{name: getattr(self, name) for name in TowerTask.model_fields})


class TrainTowersPlan(Plan[TrainTowersJob]):
    """A plan of towers: its job has a method.

    Args:
        pairs: that are learned from.
        unlabelled: further queries.
    """

    pairs: int
    unlabelled: int


class TrainTowersReport(Report[TrainTowersPlan]):
    """A report of towers; its details have ``index``, the digest of the documents' vectors."""

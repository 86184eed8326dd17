"""The values of a curation: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Gt, Le
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.data.curate.effect import EffectSettings
from shoal.fields.data.readers import BadRows
from shoal.ir import Job, Plan, Report


def _switch(value: Any) -> Any:
    """``true`` and ``false`` as settings."""
    return (EffectSettings() if value else None) if isinstance(value, bool) else value


class CurateJob(Job):
    """Choose the rows of a data set that a model should see.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file or directory of tables or text, or ``stdlib``, ``digits``, ``photos:N``.
        columns: those that the method reads; empty for what it takes by itself.
        method: how rows are chosen; None lets the planner choose.
        keep: share of the rows that is kept, of methods that are given one.
        bad: rows that cannot be read: ``raise`` an error, or ``skip`` and count them.
        pool: where shards are processed: None for this process, ``local``, ``ray``.
        workers: shards that are in work at a time.
        effect: also train a small model on what is kept and on all rows, and compare their losses
            on rows that neither has seen; ``true`` for the defaults.
        seed: random seed.
    """

    job: Literal["curate"] = "curate"
    name: str = Field(default="curate", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, ...] = ()
    method: Annotated[Choice, Kind("curator")] | None = None
    keep: Annotated[float, Gt(0), Le(1)] = 0.7
    bad: BadRows = "raise"
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1
    effect: Annotated[EffectSettings | None, BeforeValidator(_switch)] = None
    seed: NonNegativeInt = 0


class CuratePlan(Plan[CurateJob]):
    """A curation's plan: its job has a method.

    Args:
        num_bytes: of the data, as stored.
        rows: of the data; None where only reading tells.
    """

    num_bytes: int
    rows: int | None = None


class CurateReport(Report[CuratePlan]):
    """A curation's report; its details have ``stages``: what each part of the method dropped."""

"""The values of a preparation: what to do, the plan with its reasons, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt
from pydantic import Field, PositiveInt

from shoal.core.config import Kind, Value
from shoal.core.parts import Choice
from shoal.fields.data.prepare.profile import TableProfile
from shoal.fields.data.prepare.protocols import Reason
from shoal.fields.data.readers import BadRows
from shoal.ir import Job, Plan, Report


class PrepareJob(Job):
    """Profile a table, and prepare it for analysis step by step.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file or directory of Parquet, JSON Lines, CSV or Arrow; or ``dirty:N``, N generated
            rows with everything that is wrong with tables.
        target: column that is to be predicted, which is left as it is; empty for none.
        holdout: share of the rows that no step learns from; they are prepared too.
        steps: in their order; None lets the guide choose.
        bad: rows that cannot be read: ``raise`` an error, or ``skip`` and count them.
        pool: where shards are processed: None for this process, ``local``, ``ray``.
        workers: shards that are in work at a time.
        batch_rows: rows that a worker has in memory at a time.
        seed: of held-out rows, folds, samples and projections.
    """

    job: Literal["prepare"] = "prepare"
    name: str = Field(default="prepare", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    target: str = ""
    holdout: Annotated[float, Ge(0), Lt(1)] = 0.0
    steps: tuple[Annotated[Choice, Kind("preparation")], ...] | None = None
    bad: BadRows = "raise"
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1
    batch_rows: Annotated[int, Ge(1), Le(2**20)] = 65_536
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 1


class StepReason(Value):
    """A step of a plan, why it is there, and what it costs.

    Args:
        step: with its options, as text.
        reason: measurement and rule.
        seconds: predicted, of all workers together.
        memory_bytes: predicted, of what it keeps.
    """

    step: str
    reason: Reason
    seconds: float
    memory_bytes: float


class PreparePlan(Plan[PrepareJob]):
    """A plan of preparation; the steps of its job may be edited.

    Args:
        profile: of the training rows, before.
        reasons: for each step.
        passes: over the data, that of the profile left out.
    """

    profile: TableProfile | None = None
    reasons: tuple[StepReason, ...] = ()
    passes: int = 0


class PrepareReport(Report[PreparePlan]):
    """A report of preparation; its details have the profile ``after``."""

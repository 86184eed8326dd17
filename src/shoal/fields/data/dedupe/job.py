"""The values of a deduplication: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from pydantic import Field, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.data.dedupe.protocols import Compared
from shoal.fields.data.readers import BadRows
from shoal.ir import Job, Plan, Report


class DedupeJob(Job):
    """Remove duplicate documents, or find tables that others contain.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file or directory of tables or text, or ``stdlib``; with ``compared: tables``, a
            directory of Parquet files.
        compared: ``rows``, documents by their text; or ``tables``, files by their rows.
        columns: columns of text that are compared together; empty for ``text``, or the only one.
        method: how duplicates are found; None lets the planner choose.
        threshold: Jaccard similarity of the shingles from which on rows are duplicates; 1 for equal
            texts only.
        unit: a shingle is a run of ``words`` or of ``characters``.
        ngram: units of a shingle.
        bad: rows that cannot be read: ``raise`` an error, or ``skip`` and count them.
        pool: where shards are processed: None for this process, ``local``, ``ray``.
        workers: shards that are in work at a time.
        seed: of the hash functions.
    """

    job: Literal["dedupe"] = "dedupe"
    name: str = Field(default="dedupe", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    compared: Compared = "rows"
    columns: tuple[str, ...] = ()
    method: Annotated[Choice, Kind("deduper")] | None = None
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    unit: Literal["words", "characters"] = "words"
    ngram: Annotated[int, Ge(1), Le(1000)] = 5
    bad: BadRows = "raise"
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 1


class DedupePlan(Plan[DedupeJob]):
    """A deduplication's plan: its job has a method.

    Args:
        num_bytes: of the data, as stored.
        rows: of the data; None where only reading tells.
        tables: files.
    """

    num_bytes: int
    rows: int | None = None
    tables: int = 1


class DedupeReport(Report[DedupePlan]):
    """A deduplication's report; its details have ``sizes`` of clusters and ``examples``."""

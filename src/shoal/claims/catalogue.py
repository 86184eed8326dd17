"""The catalogue: one row a paper, with the status its claim has earned.

The shipped list says what is planned; a status other than ``planned`` comes only from a
results file whose verdict was computed again just now.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

from pydantic import PositiveInt, StringConstraints

from shoal.claims import CLAIMS
from shoal.claims.protocols import Evidence, Experiment, Status
from shoal.claims.record import ClaimRecord, RecordFault, inspect, recheck
from shoal.core.config import Value, parse
from shoal.core.files import read_yaml

__all__ = [
    "CatalogueEntry",
    "CatalogueRow",
    "CatalogueStatus",
    "catalogue",
    "counts",
    "listing",
    "standing",
    "standings",
]

FILE = Path(__file__).with_name("catalogue.yaml")

Sentence = Annotated[str, StringConstraints(min_length=20, max_length=240, strip_whitespace=True)]


class CatalogueRow(Value):
    """One system of the catalogue.

    Args:
        id: number of the row.
        name: short name of the system.
        title: the paper's title.
        year: the paper's year.
        says: what the paper claims, with its figures.
        checks: what is run here and when it counts.
        room: room of its main part.
        parts: places of its parts in the house.
        area: area it belongs to, the stem of its specification.
        status: always ``planned``; the rest is earned.
        claim: name of the experiment, once there is one.
    """

    id: int
    name: str
    title: str
    year: PositiveInt
    says: Sentence
    checks: Sentence
    room: str
    parts: tuple[str, ...]
    area: str
    status: Status = "planned"
    claim: str | None = None


class _Catalogue(Value):
    systems: tuple[CatalogueRow, ...]


class CatalogueEntry(Value):
    """A row as ``shoal claims list`` shows it.

    Args:
        id: number of the row.
        name: short name of the system.
        room: room of its main part.
        status: earned by its results file, or ``planned``.
        evidence: grade of the evidence, or None.
        threshold: metric -> condition.
        measured: metric -> measured number.
        title: the paper's title.
        year: the paper's year.
        claim: name of the experiment, if there is one.
        reason: why it does not work, in a sentence.
    """

    id: int
    name: str
    room: str
    status: Status
    evidence: Evidence | None = None
    threshold: dict[str, str] = {}
    measured: dict[str, float] = {}
    title: str = ""
    year: int = 0
    claim: str | None = None
    reason: str = ""


@functools.cache
@functools.cache
def catalogue() -> tuple[CatalogueRow, ...]:
    """All rows, in order of their ids."""
    return parse(_Catalogue, read_yaml(FILE), where=FILE.name).systems


def listing(results: Path = Path("results")) -> list[CatalogueEntry]:
    """Every row with the status its results file gives it.

    Args:
        results: directory of the results files.

    Raises:
        StoreError: a results file was edited or is out of date.
    """
    return [_listed(row, results) for row in catalogue()]


class CatalogueStatus(Value):
    """A row with its results file, whatever state that is in.

    Args:
        row: the row of the catalogue.
        record: its results file with the recomputed verdict; None when there is none or
            it cannot be believed.
        fault: why its results file cannot be believed; None otherwise.
    """

    row: CatalogueRow
    record: ClaimRecord | None = None
    fault: RecordFault | None = None


def standings(results: Path = Path("results")) -> list[CatalogueStatus]:
    """Every row with its results file; one that was edited is told, not believed.

    Unlike :func:`listing` this goes on past a bad file, for pages that show what is
    wrong beside everything that is right.

    Args:
        results: directory of the results files.
    """
    return [standing(row, results) for row in catalogue()]


def counts(rows: list[CatalogueEntry]) -> dict[tuple[Status, Evidence | None], int]:
    """Number of rows by status and grade of evidence."""
    counts: dict[tuple[Status, Evidence | None], int] = {}
    for row in rows:
        key = (row.status, row.evidence)
        counts[key] = counts.get(key, 0) + 1
    return counts


def standing(row: CatalogueRow, results: Path = Path("results")) -> CatalogueStatus:
    """One row with its results file."""
    if row.claim is None:
        return CatalogueStatus(row=row)
    path = results / f"{row.claim}.json"
    if not path.exists():
        return CatalogueStatus(row=row)
    result = inspect(path, CLAIMS.load(row.claim))
    if isinstance(result, RecordFault):
        return CatalogueStatus(row=row, fault=result)
    return CatalogueStatus(row=row, record=result)


def _listed(row: CatalogueRow, results: Path) -> CatalogueEntry:
    common = CatalogueEntry(
        id=row.id,
        name=row.name,
        room=row.room,
        status="planned",
        title=row.title,
        year=row.year,
        claim=row.claim,
    )
    if row.claim is None:
        return common
    experiment: type[Experiment] = CLAIMS.load(row.claim)
    path = results / f"{row.claim}.json"
    record: ClaimRecord | None = recheck(path, experiment) if path.exists() else None
    update: dict[str, object] = {
        "threshold": {metric.name: metric.condition for metric in experiment.metrics}
    }
    if record is not None:
        verdict = record.verdict
        update |= {
            "status": verdict.status,
            "evidence": verdict.evidence,
            "measured": {metric.name: metric.value for metric in verdict.metrics},
            "reason": verdict.reason,
        }
    return common.model_copy(update=update)

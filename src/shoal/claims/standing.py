"""Where every row of the catalogue stands: planned, or what its results file has earned.

A status other than ``planned`` comes only from a results file whose verdict was computed
again just now.
"""

from __future__ import annotations

from pathlib import Path

from shoal.claims.catalogue import CatalogueRow, catalogue
from shoal.claims.protocols import Evidence, Status
from shoal.claims.record import ClaimRecord, RecordFault, inspect, recheck
from shoal.core.config import Value

__all__ = [
    "CatalogueEntry",
    "CatalogueStatus",
    "counts",
    "listing",
    "standing",
    "standings",
]


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
    """Every row with its results file; one that was edited is reported, not trusted.

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
    result = inspect(path, row.metrics)
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
    path = results / f"{row.claim}.json"
    record: ClaimRecord | None = recheck(path, row.metrics) if path.exists() else None
    update: dict[str, object] = {
        "threshold": {metric.name: metric.condition for metric in row.metrics}
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

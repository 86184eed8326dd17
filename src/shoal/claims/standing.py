"""Where every row of the catalogue stands: planned, or what its results file has earned.

A status other than ``planned`` comes from a results file whose verdict was computed again just now.
Where there is no such file, it is the verdict that an installed package brings along.
"""

from __future__ import annotations

from pathlib import Path

from shoal.claims import CLAIMS
from shoal.claims.catalogue import CatalogueRow, catalogue
from shoal.claims.dependencies import code_digest
from shoal.claims.protocols import Evidence, Status
from shoal.claims.record import ClaimRecord, RecordFault, inspect
from shoal.claims.shipped import results_directory, shipped_records
from shoal.core.config import Value


class CatalogueEntry(Value):
    """A row as ``shoal claims list`` shows it.

    Args:
        id: number of the row.
        name: short name of the system.
        room: room of its main part.
        status: earned by its results file, or ``planned``.
        evidence: grade of the evidence, or None.
        stale: code that it depends on has changed since it was run.
        threshold: metric -> condition.
        measured: metric -> measured number.
        headline: the metric that stands for the claim; empty without a result.
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
    stale: bool = False
    threshold: dict[str, str] = {}
    measured: dict[str, float] = {}
    headline: str = ""
    title: str = ""
    year: int = 0
    claim: str | None = None
    reason: str = ""


def listing(results: Path | None = None, *, stale: bool = True) -> list[CatalogueEntry]:
    """Every row with the status its results file gives it; one that is not believed is skipped.

    Args:
        results: directory of the results files; :func:`~shoal.claims.shipped.results_directory`
            if not given.
        stale: look whether the code has changed, for which all of it is read.
    """
    place = results or results_directory()
    return [_listed(row, place, stale) for row in catalogue()]


class CatalogueStatus(Value):
    """A row with its results file, whatever state that is in.

    Args:
        row: the row of the catalogue.
        record: its results file with the recomputed verdict; None when there is none or
            it cannot be believed.
        fault: why its results file cannot be believed; None otherwise.
        stale: code that the result depends on has changed since.
        shipped: it came with the package, without its samples.
    """

    row: CatalogueRow
    record: ClaimRecord | None = None
    fault: RecordFault | None = None
    stale: bool = False
    shipped: bool = False


def is_stale(record: ClaimRecord) -> bool:
    """Whether code that a result depends on has changed since it was made."""
    return record.claim in CLAIMS and record.code != code_digest(CLAIMS[record.claim])


def to_run_again(results: Path | None = None) -> list[str]:
    """Claims whose result is stale or missing or cannot be believed, the oldest first."""
    waiting = [
        (found.record.started if found.record else "", found.row.claim)
        for found in standings(results)
        if found.row.claim is not None and (found.record is None or found.stale)
    ]
    return [claim for _, claim in sorted(waiting)]


def standings(results: Path | None = None) -> list[CatalogueStatus]:
    """Every row with its results file; one that was edited is reported, not trusted.

    Unlike :func:`listing` this goes on past a bad file, for pages that show what is
    wrong beside everything that is right.

    Args:
        results: directory of the results files; see :func:`listing`.
    """
    place = results or results_directory()
    return [standing(row, place) for row in catalogue()]


def counts(rows: list[CatalogueEntry]) -> dict[tuple[Status, Evidence | None], int]:
    """Number of rows by status and grade of evidence."""
    counts: dict[tuple[Status, Evidence | None], int] = {}
    for row in rows:
        key = (row.status, row.evidence)
        counts[key] = counts.get(key, 0) + 1
    return counts


def standing(row: CatalogueRow, results: Path, *, stale: bool = True) -> CatalogueStatus:
    """One row with its results file, and whether it is stale if that is asked."""
    if row.claim is None:
        return CatalogueStatus(row=row)
    path = results / f"{row.claim}.json"
    if not path.exists():
        return _shipped(row, stale)
    result = inspect(path, row.metrics)
    if isinstance(result, RecordFault):
        return CatalogueStatus(row=row, fault=result)
    return CatalogueStatus(row=row, record=result, stale=stale and is_stale(result))


def _shipped(row: CatalogueRow, stale: bool) -> CatalogueStatus:
    """The row with the verdict that came with the package, if one did."""
    record = shipped_records().get(row.claim or "")
    if record is None:
        return CatalogueStatus(row=row)
    if record.metrics != tuple(row.metrics):
        text = "its thresholds are not those of the claim any more; run the claim again"
        fault = RecordFault(kind="outdated", text=text)
        return CatalogueStatus(row=row, fault=fault, shipped=True)
    old = stale and is_stale(record)
    return CatalogueStatus(row=row, record=record, stale=old, shipped=True)


def _listed(row: CatalogueRow, results: Path, stale: bool) -> CatalogueEntry:
    common = CatalogueEntry(
        id=row.id,
        name=row.name,
        room=row.room,
        status="planned",
        title=row.title,
        year=row.year,
        claim=row.claim,
        threshold={metric.name: metric.condition for metric in row.metrics},
    )
    found = standing(row, results, stale=stale)
    if found.fault is not None:
        why = f"its results file is {found.fault.kind}: {found.fault.text}"
        return common.model_copy(update={"status": "skipped", "reason": why})
    if found.record is None:
        return common
    verdict = found.record.verdict
    measured = {metric.name: metric.value for metric in verdict.metrics}
    headlines = [metric.name for metric in row.metrics if not metric.check]
    update: dict[str, object] = {
        "status": verdict.status,
        "evidence": verdict.evidence,
        "stale": found.stale,
        "measured": measured,
        "headline": next((name for name in headlines if name in measured), ""),
        "reason": verdict.reason,
    }
    return common.model_copy(update=update)

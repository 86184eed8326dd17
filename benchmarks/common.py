"""Rows of ``results/benchmarks.json``: name, value, unit, threshold, verdict, note."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.core.files import write_json
from shoal.core.measure import check_quiet
from shoal.machine.fingerprint import fingerprint, versions

RESULTS = Path(__file__).parents[1] / "results" / "benchmarks.json"


@dataclass(frozen=True)
class Row:
    """One judged number.

    Args:
        name: what was measured.
        value: the number.
        unit: its unit; x for a ratio.
        comparison: ``>=`` or ``<=``.
        threshold: what it must reach.
        note: how, and against what.
        low: lower end of the 90 % interval, where there is one.
        high: upper end.
        samples: raw paired samples, in the order they were taken.
    """

    name: str
    value: float
    unit: str
    comparison: str
    threshold: float
    note: str
    low: float | None = None
    high: float | None = None
    samples: dict[str, list[float]] | None = None

    @property
    def holds(self) -> bool:
        """Whether the threshold is met."""
        if self.comparison == ">=":
            return self.value >= self.threshold
        return self.value <= self.threshold


def finish(path: Path, table: dict[str, Any], rows: list[Row], *, dry: bool) -> None:
    """Write a table of its own and put rows into the results file; or only show the rows.

    Args:
        path: of the table.
        table: its parts by name.
        rows: what was judged.
        dry: write nothing.
    """
    if dry:
        for one in rows:
            print(f"{one.name}: {one.value:.2f} {one.unit} ({one.comparison} {one.threshold:g})")
        return
    path.parent.mkdir(exist_ok=True)
    stamp = {"machine": fingerprint(), "versions": versions(), "date": time.strftime("%Y-%m-%d")}
    write_json(path, table | stamp)
    record(rows)


def _place(row: dict[str, Any]) -> tuple[str, str, str]:
    """Of a row on file: a name has one for every kind of processor."""
    return row["name"], row["machine"]["cpu"], row["machine"]["isa"]


def record(rows: list[Row]) -> None:
    """Put rows into the results file; rows of that name and of this kind of processor go."""
    old = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else []
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    taken = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": fingerprint(),
        "versions": versions(),
    }
    fresh = [
        {
            **{key: value for key, value in asdict(row).items() if value is not None},
            "holds": row.holds,
            **taken,
        }
        for row in rows
    ]
    replaced = {_place(row) for row in fresh}
    kept = [row for row in old if _place(row) not in replaced]
    write_json(RESULTS, {"rows": sorted([*kept, *fresh], key=_place)})
    for row in rows:
        verdict = "holds" if row.holds else "FALLS SHORT"
        print(
            f"{row.name}: {row.value:.4g} {row.unit} ({row.comparison} {row.threshold:g}) {verdict}"
        )


def require_quiet() -> None:
    """Wait up to five minutes for a quiet machine, then refuse to measure."""
    check_quiet(wait_s=300)

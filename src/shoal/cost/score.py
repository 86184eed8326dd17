"""The score: every run's prediction beside its measurement, kept in one SQLite file.

It also knows where the directories of runs lie, so that live and past runs can be found.

Readers and writers of several processes may share the file (write-ahead log). The
schema has a version: a file of an older one is brought up to date in place, a file of a
newer Shoal is refused rather than guessed at.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.core.errors import ShoalError, StoreError
from shoal.core.files import shoal_home
from shoal.core.tables import ShownAsTables, Table
from shoal.cost.score_rows import ErrorSummary, ScoreRow, machine_key, summarise
from shoal.cost.score_rules import RunFacts, left_out, quantity_left_out
from shoal.ir import Interval, Job, Machine, Report, kind_named, predictions

__all__ = [
    "ErrorSummary",
    "RunEntry",
    "Score",
    "ScoreRow",
    "ScoredQuantity",
    "machine_key",
    "run_id",
    "summarise",
]

VERSION = 4

# What brings a file from the version before to this one.
_STEPS: dict[int, tuple[str, ...]] = {
    1: (
        "CREATE TABLE runs (id INTEGER PRIMARY KEY, recorded_s REAL NOT NULL, name TEXT NOT NULL, "
        "model TEXT NOT NULL, machine TEXT NOT NULL, quantity TEXT NOT NULL, predicted REAL, "
        "low REAL, high REAL, measured REAL NOT NULL, "
        "run INTEGER NOT NULL REFERENCES reports(id))",
        "CREATE TABLE reports (id INTEGER PRIMARY KEY, recorded_s REAL NOT NULL, "
        "report TEXT NOT NULL)",
        "CREATE INDEX runs_by_machine ON runs (machine, quantity)",
    ),
    2: (
        "CREATE TABLE run_dirs (id TEXT PRIMARY KEY, path TEXT NOT NULL UNIQUE, "
        "kind TEXT NOT NULL, name TEXT NOT NULL, model TEXT NOT NULL, started_s REAL NOT NULL)",
        "ALTER TABLE reports ADD COLUMN kind TEXT NOT NULL DEFAULT 'train'",
        "ALTER TABLE reports ADD COLUMN name TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE reports ADD COLUMN model TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE reports ADD COLUMN directory TEXT REFERENCES run_dirs(id)",
        "UPDATE reports SET kind = coalesce(json_extract(report, '$.plan.job.job'), 'train'), "
        "name = coalesce(json_extract(report, '$.plan.job.name'), ''), "
        "model = coalesce(json_extract(report, '$.plan.job.model'), '')",
        # Reports are long; lists are read from these indices alone.
        "CREATE INDEX reports_listed ON reports (directory, id, recorded_s, kind, name, model)",
        "CREATE INDEX runs_by_report ON runs (run, quantity, predicted, low, high, measured)",
    ),
    3: (
        "ALTER TABLE reports ADD COLUMN device TEXT NOT NULL DEFAULT ''",
        # Before reports said so: a torch that knows no GPU computed on the CPU, as drafters do.
        "UPDATE reports SET device = 'cpu' WHERE kind = 'drafter' "
        "OR json_extract(report, '$.versions.torch') LIKE '%+cpu%'",
        "CREATE INDEX reports_by_device ON reports (id, device)",
    ),
    # Why a row does not count; Score.repair() fills it in for rows of older versions.
    4: ("ALTER TABLE runs ADD COLUMN left_out TEXT NOT NULL DEFAULT ''",),
}


# A row of ``runs`` that was predicted for one kind of device and measured on another.
_ELSEWHERE = (
    "EXISTS (SELECT 1 FROM reports WHERE id = runs.run AND device <> '' AND "
    "instr(runs.machine, CASE device WHEN 'cpu' THEN '|gpu|' ELSE '|cpu|' END) > 0)"
)


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run, live or past, as a list shows it.

    Args:
        id: stands for it in addresses: 16 hexadecimal digits of its directory's path, or
            ``report-N`` when no directory is known.
        kind: kind of job: train, serve or drafter.
        name: name of the job.
        model: its model.
        path: its directory; None for a report of an older version.
        started_s: when it was started, or started again; s since 1970.
        report: number of its newest report; None while there is none.
        recorded_s: when that was written.
    """

    id: str
    kind: str
    name: str
    model: str
    path: Path | None
    started_s: float
    report: int | None = None
    recorded_s: float | None = None

    @property
    def ended(self) -> bool:
        """A report was written since it was last started."""
        return self.recorded_s is not None and self.recorded_s >= self.started_s


@dataclass(frozen=True, slots=True)
class ScoredQuantity:
    """A measured number beside its prediction.

    Args:
        measured: what the run saw.
        predicted: value in the plan; None if it has none.
        low: lower end of its 90 % interval.
        high: upper end.
    """

    measured: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        """Measured / predicted - 1; None without a prediction."""
        return self.measured / self.predicted - 1 if self.predicted else None


def run_id(path: Path) -> str:
    """What stands for a directory in addresses: the same however the path is spelled."""
    return hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]


def _ends(predicted: Interval | None) -> tuple[float | None, float | None, float | None]:
    """(value, low, high); without ends where no spread is predicted."""
    if predicted is None:
        return None, None, None
    if predicted.low == predicted.high:
        return predicted.value, None, None
    return predicted.value, predicted.low, predicted.high


class Score(ShownAsTables):
    """The store of all past predictions.

    Args:
        path: the SQLite file; ``score.db`` in Shoal's home if not given.

    Raises:
        StoreError: the file is no such store, is of a newer version, or cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else shoal_home() / "score.db"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as cause:
            raise StoreError(
                f"{self.path}: cannot be made ({cause.strerror}); set SHOAL_HOME to a directory "
                "that can be written"
            ) from cause
        with self._open() as connection:
            self._migrate(connection)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=30.0)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=NORMAL")
                with connection:
                    yield connection
        except sqlite3.Error as cause:
            raise StoreError(
                f"{self.path}: {cause}; this is not a valid score database; move it away to start "
                f"a new one"
            ) from cause

    def _migrate(self, connection: sqlite3.Connection) -> None:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > VERSION:
            raise StoreError(
                f"{self.path}: written by a newer version (schema {version}, this version supports "
                f"{VERSION}); upgrade shoal-ml, or set SHOAL_HOME to another directory"
            )
        if version == VERSION:
            return
        # Several processes may find the same old file; one of them changes it.
        connection.execute("BEGIN IMMEDIATE")
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        tables = {
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
        if version == 0 and tables:
            raise StoreError(
                f"{self.path}: a database of another program (tables {', '.join(sorted(tables))}); "
                "give another path"
            )
        for step in range(version + 1, VERSION + 1):
            for statement in _STEPS[step]:
                connection.execute(statement)
        if version:
            self._judge(connection)
        connection.execute(f"PRAGMA user_version={VERSION}")

    def register(self, path: Path, kind: str, name: str, model: str = "") -> str:
        """Remember that a run has its directory at ``path`` and starts now.

        Args:
            path: directory of the run.
            kind: kind of job: train, serve or drafter.
            name: name of the job.
            model: its model.

        Returns:
            The id of the run.

        Raises:
            StoreError: the file cannot be written.
        """
        identity = run_id(path)
        with self._open() as connection:
            connection.execute(
                "INSERT INTO run_dirs (id, path, kind, name, model, started_s) "
                "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, "
                "name = excluded.name, model = excluded.model, started_s = excluded.started_s",
                (identity, str(path.resolve()), kind, name, model, time.time()),
            )
        return identity

    def run_dirs(self) -> list[RunEntry]:
        """Every run that is known, newest first; reports of unknown directories among them.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._open() as connection:
            result = connection.execute(
                "SELECT d.id, d.kind, d.name, d.model, d.path, d.started_s, r.id, r.recorded_s "
                "FROM run_dirs d LEFT JOIN reports r ON r.id = "
                "(SELECT max(id) FROM reports WHERE directory = d.id) "
                "UNION ALL SELECT 'report-' || id, kind, name, model, NULL, recorded_s, id, "
                "recorded_s FROM reports WHERE directory IS NULL ORDER BY 6 DESC"
            ).fetchall()
        return [
            RunEntry(identity, kind, name, model, None if path is None else Path(path), *rest)
            for identity, kind, name, model, path, *rest in result
        ]

    def quantities(self, reports: Sequence[int]) -> dict[int, dict[str, ScoredQuantity]]:
        """Report -> quantity -> what was measured and predicted.

        Args:
            reports: numbers of reports; few, such as those of a page.

        Raises:
            StoreError: the file cannot be read.
        """
        places = ", ".join("?" * len(reports))
        with self._open() as connection:
            rows = connection.execute(
                "SELECT run, quantity, measured, predicted, low, high FROM runs "  # noqa: S608
                f"WHERE run IN ({places}) AND NOT {_ELSEWHERE} UNION ALL "
                "SELECT run, quantity, measured, NULL, NULL, NULL FROM runs "
                f"WHERE run IN ({places}) AND {_ELSEWHERE}",
                (*reports, *reports),
            ).fetchall()
        quantities: dict[int, dict[str, ScoredQuantity]] = {number: {} for number in reports}
        for number, name, *values in rows:
            quantities[number][name] = ScoredQuantity(*values)
        return quantities

    def report(self, number: int) -> Report[Any] | None:
        """One report; None if there is none of that number.

        Raises:
            StoreError: it cannot be read back.
        """
        with self._open() as connection:
            result = connection.execute(
                "SELECT kind, report FROM reports WHERE id = ?", (number,)
            ).fetchone()
        return None if result is None else self._parsed(*result)

    def append(self, report: Report[Any], directory: Path | None = None) -> None:
        """Keep a report: a row for each measured quantity.

        Args:
            report: prediction beside measurement.
            directory: where the run lies, if it was registered.

        Raises:
            StoreError: the file cannot be written.
        """
        now = time.time()
        predicted = predictions(report.plan)
        job = report.plan.job
        key = machine_key(report.plan.machine)
        with self._open() as connection:
            cursor = connection.execute(
                "INSERT INTO reports (recorded_s, report, kind, name, model, device, directory) "
                "VALUES (?, ?, ?, ?, ?, ?, (SELECT id FROM run_dirs WHERE id = ?))",
                (
                    now,
                    report.model_dump_json(),
                    job.job,
                    job.name,
                    job.model,
                    report.device,
                    None if directory is None else run_id(directory),
                ),
            )
            connection.executemany(
                "INSERT INTO runs (recorded_s, name, model, machine, quantity, predicted, low, "
                "high, measured, run) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (
                        now,
                        job.name,
                        job.model,
                        key,
                        quantity,
                        *_ends(predicted.get(quantity)),
                        measured,
                        cursor.lastrowid,
                    )
                    for quantity, measured in report.measured.items()
                    if math.isfinite(measured)
                ],
            )
            self._judge(connection, cursor.lastrowid)

    def repair(self) -> tuple[int, int]:
        """Judge every row again by the rules of today.

        Returns:
            How many rows do not count any more, and how many count again.

        Raises:
            StoreError: the file cannot be read or written.
        """
        with self._open() as connection:
            connection.execute("BEGIN IMMEDIATE")
            return self._judge(connection)

    def _judge(self, connection: sqlite3.Connection, newest: int | None = None) -> tuple[int, int]:
        """Write into rows why they do not count: all rows, or those of the newest report."""
        facts = self._facts(connection, newest)
        groups: dict[str, list[RunFacts]] = {}
        gone = again = 0
        for run in facts:
            before = groups.setdefault(run.group, [])
            whole = left_out(run, before)
            before.append(run)
            if newest not in (None, run.number):
                continue
            rows = connection.execute(
                "SELECT id, quantity, left_out FROM runs WHERE run = ?", (run.number,)
            ).fetchall()
            for row, quantity, was in rows:
                why = whole or quantity_left_out(run, quantity)
                if why != was:
                    connection.execute("UPDATE runs SET left_out = ? WHERE id = ?", (why, row))
                    gone, again = gone + (not was), again + (not why)
        return gone, again

    @staticmethod
    def _facts(connection: sqlite3.Connection, newest: int | None) -> list[RunFacts]:
        """What decides of every report, or of those that the newest one is compared with."""
        result = connection.execute(
            "SELECT r.id, coalesce(r.directory, r.kind || ' ' || r.name || ' ' || r.model), "
            "r.device, coalesce((SELECT machine FROM runs WHERE run = r.id LIMIT 1), ''), "
            "json_extract(r.report, '$.details.plans'), json_extract(r.report, '$.plan.minutes'), "
            "json_extract(r.report, '$.measured'), d.path "
            "FROM reports r LEFT JOIN run_dirs d ON d.id = r.directory "
            "LEFT JOIN reports n ON n.id = ?1 WHERE ?1 IS NULL OR r.directory = n.directory OR "
            "(r.directory IS NULL AND n.directory IS NULL AND r.kind = n.kind AND "
            "r.name = n.name AND r.model = n.model) ORDER BY r.id",
            (newest,),
        )
        return [
            RunFacts(
                number,
                group,
                device,
                machine,
                plans if plans is not None else _plans_at(path),
                minutes,
                json.loads(measured),
            )
            for number, group, device, machine, plans, minutes, measured, path in result
        ]

    def rows(
        self,
        *,
        quantity: str | None = None,
        machine: Machine | None = None,
        jobs: bool = True,
        scored: bool = False,
    ) -> list[ScoreRow]:
        """Past predictions, oldest first.

        Args:
            quantity: only this one.
            machine: only those of this machine.
            jobs: read the jobs too, which takes time; without, :attr:`ScoreRow.job` is None.
            scored: only those with a prediction that nothing leaves out.

        Raises:
            StoreError: the file cannot be read.
        """
        key = None if machine is None else machine_key(machine)
        with self._open() as connection:
            result = connection.execute(
                "SELECT recorded_s, name, model, machine, quantity, predicted, low, high, "
                "measured, (SELECT device FROM reports WHERE id = run), left_out, "
                "coalesce((SELECT kind FROM reports WHERE id = run), ''), run FROM runs "
                "WHERE (?1 IS NULL OR quantity = ?1) AND (?2 IS NULL OR machine = ?2) "
                "AND (NOT ?3 OR (predicted <> 0 AND left_out = '')) ORDER BY id",
                (quantity, key, scored),
            ).fetchall()
            texts = (
                connection.execute(
                    "SELECT id, kind, json_extract(report, '$.plan.job') FROM reports WHERE id IN "
                    "(SELECT run FROM runs WHERE (?1 IS NULL OR quantity = ?1) "
                    "AND (?2 IS NULL OR machine = ?2))",
                    (quantity, key),
                ).fetchall()
                if jobs
                else []
            )
        job_of = {number: _job(kind, text) for number, kind, text in texts}
        return [
            ScoreRow(**dict(zip(_COLUMNS, row[:-1], strict=True)), job=job_of.get(row[-1]))
            for row in result
        ]

    def reports(self) -> list[Report[Any]]:
        """Every report, oldest first.

        Raises:
            StoreError: a report cannot be read back.
        """
        with self._open() as connection:
            result = connection.execute("SELECT kind, report FROM reports ORDER BY id").fetchall()
        return [self._parsed(*row) for row in result]

    def counted_reports(self) -> list[tuple[Report[Any], frozenset[str]]]:
        """Reports of which a prediction counts, with these quantities; oldest first.

        Those that this version cannot read are left out.
        """
        with self._open() as connection:
            result = connection.execute(
                "SELECT kind, report, group_concat(quantity) FROM reports JOIN runs "
                "ON run = reports.id WHERE predicted <> 0 AND left_out = '' "
                "GROUP BY reports.id ORDER BY reports.id"
            ).fetchall()
        reports = []
        for kind, text, quantities in result:
            with contextlib.suppress(ShoalError):
                reports.append((self._parsed(kind, text), frozenset(quantities.split(","))))
        return reports

    def _parsed(self, kind: str, text: str) -> Report[Any]:
        try:
            return kind_named(kind).report_type.model_validate_json(text)
        except ValidationError as cause:
            raise StoreError(
                f"{self.path}: a report does not fit this version "
                f"({cause.errors()[0]['msg']}); move the file away to start a new score"
            ) from cause

    def errors(self) -> list[ErrorSummary]:
        """Summary of the errors, quantity by quantity."""
        return summarise(self.rows(jobs=False, scored=True))

    def figures(self, last: int) -> dict[str, Any]:
        """So many of the newest rows, and the errors, for programs.

        Raises:
            StoreError: the file cannot be read.
        """
        rows = self.rows(jobs=False)[-last:]
        return {
            "rows": [row.model_dump(mode="json", exclude={"job"}) for row in rows],
            "errors": [summary.model_dump(mode="json") for summary in self.errors()],
        }

    def __repr__(self) -> str:
        counted = self.rows(jobs=False, scored=True)
        return f"<score of {len(counted)} predictions in {self.path}>"

    def tables(self, *, last: int = 20, everything: bool = False) -> Iterator[Table | str]:
        """What people read; see :func:`~shoal.cost.score_tables.score_tables`.

        Raises:
            StoreError: the file cannot be read.
        """
        from shoal.cost.score_tables import score_tables

        return score_tables(self.rows(jobs=False), self.errors(), last=last, everything=everything)


_COLUMNS = (
    "recorded_s",
    "name",
    "model",
    "machine",
    "quantity",
    "predicted",
    "low",
    "high",
    "measured",
    "device",
    "left_out",
    "kind",
)


def _plans_at(path: str | None) -> int:
    """Plans that a run has had, by what its directory keeps; 1 where it is gone."""
    return 1 if path is None else 1 + sum(1 for _ in Path(path).glob("plan.*.yaml"))


def _job(kind: str, text: str | None) -> Job | None:
    """The job of a row; None if this version has no such kind or part any more."""
    if text is None:
        return None
    try:
        return kind_named(kind).job_type.model_validate_json(text)
    except (ShoalError, ValueError):  # an old job is history, not an error
        return None

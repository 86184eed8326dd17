"""Runs of Weights & Biases as it exports them: a table in CSV, or the history in JSON lines.

Source: the CSV export of a chart or of a run's table, and ``run.scan_history`` saved as JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.cost.imports.curves import known
from shoal.cost.imports.log import Log, LogEntry, head, lines, number, paced, refuse

SAMPLE = '{"_step": 10, "_runtime": 12.5, "throughput(tps)": 5762.1, "loss": 2.3}'
STEPS = ("_step", "step", "global_step", "trainer/global_step")
CLOCKS = ("_runtime", "_timestamp", "relative time (process)")
# The CSV of a chart has the least and the most of grouped runs beside each curve.
SIDES = ("__min", "__max")


@part
class WandbLog:
    """A CSV with a column ``Step``, or JSON lines (or a list) with a key ``_step``.

    Columns are matched by the usual names of curves; the run's name before `` - `` is ignored.
    """

    def sniff(self, path: Path) -> int:
        first = next(head(path), "")
        if path.suffix == ".csv":
            names = {word.strip(' "').lower() for word in first.split(",")}
            return 1_000_000 if names & set(STEPS) else 0
        return 1_000_000 if first.lstrip("[ ").startswith("{") and '"_step"' in first else 0

    def read(self, path: Path) -> Log:
        rows = _table(path) if path.suffix == ".csv" else _history(path)
        entries, times = [], []
        columns: set[str] = set()
        for place, row in rows:
            step, clock, values = None, None, {}
            for name, given in row.items():
                short = name.rpartition(" - ")[2].strip()
                lower = short.lower()
                columns.add(short)
                if given is None or given == "" or lower.endswith(SIDES):
                    continue
                curve = known(short)
                if lower in STEPS:
                    step = int(number(str(given), path, place, name))
                elif lower in CLOCKS:
                    clock = number(str(given), path, place, name)
                elif curve is not None and not isinstance(given, (dict, list)):
                    values[curve[0]] = curve[1] * number(str(given), path, place, name)
            if step is None:
                raise DataError(
                    f"{path}, line {place}: no step; expected a column or key of {', '.join(STEPS)}"
                )
            if values:
                entries.append(LogEntry(step, place, values))
                times.append(clock)
        if not entries:
            if columns:
                raise DataError(
                    f"{path}, line 1: no curve of loss, time, throughput or memory; there are "
                    f"{', '.join(sorted(columns)[:8])}; export one of those"
                )
            raise refuse(path, "wandb", SAMPLE)
        return Log("wandb", path, "train", paced(entries, times))


def _table(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    text = (line for _, line in lines(path))
    reader = csv.DictReader(text, restkey="", strict=True)
    try:
        for row in reader:
            yield reader.line_num, {key: value for key, value in row.items() if key}
    except csv.Error as cause:
        raise DataError(
            f"{path}, line {reader.line_num}: {cause}; give a CSV as it was exported"
        ) from cause


def _history(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    whole: Any = None
    if next(head(path), "").lstrip().startswith("["):
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as cause:
            place = getattr(cause, "lineno", 1)
            raise DataError(f"{path}, line {place}: not JSON; give a saved history") from cause
    if isinstance(whole, list):
        yield from ((1, row) for row in whole if isinstance(row, dict))
        return
    for place, line in lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as cause:
            raise DataError(
                f"{path}, line {place}: {line[:80]!r}: not JSON; expected a line such as {SAMPLE!r}"
            ) from cause
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, line {place}: {line[:80]!r}: expected a line such as {SAMPLE!r}"
            )
        yield place, row

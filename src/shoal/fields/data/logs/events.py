"""The files of a parsed log: events with their parameters, templates, and a picture over time."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.files import write_atomic
from shoal.core.svg import COLOURS, Chart, Series
from shoal.fields.data.logs.formats import LogFormat
from shoal.fields.data.logs.native import Bools, parameters
from shoal.fields.data.logs.protocols import Ints, Longs
from shoal.fields.data.logs.reading import LogBlock, as_text
from shoal.fields.data.logs.templates import lists_of
from shoal.fields.data.readers import arrow

_BINS = 60
# What the writer adds to the fields of a header.
_OWN = "line", "template_id", "parameters", "has_header"


class EventWriter:
    """Makes rows of ``events.parquet``: a line's number, header, template and parameters.

    Args:
        form: the format, whose fields are columns.
    """

    def __init__(self, form: LogFormat) -> None:
        pa = arrow()
        names = form.program.fields[:-1]
        self._fields = [name if name not in _OWN else f"{name}_" for name in names]
        self.schema = pa.schema(
            [
                ("line", pa.int64()),
                *((name, pa.large_string()) for name in self._fields),
                ("template_id", pa.int32()),
                ("parameters", pa.large_list(pa.large_string())),
                ("has_header", pa.bool_()),
            ]
        )

    def table(self, block: LogBlock, ids: Ints, templates: Sequence[bytes], first: int) -> Any:
        """Rows of some lines, as an Arrow table.

        Args:
            block: the lines.
            ids: int32 [n], template of each.
            templates: text of each.
            first: number of the first line, from 0.
        """
        pa = arrow()
        found = parameters(block.field(-1), ids, templates, flexible=True)
        absent = block.spans[:, :, 0] < 0
        columns = [pa.array(np.arange(first + 1, first + 1 + len(ids)))]
        for place in range(len(self._fields)):
            column = as_text(block.field(place))
            mask = pa.array(absent[:, place])
            columns.append(arrow("compute").if_else(mask, pa.scalar(None, column.type), column))
        columns += [pa.array(ids), lists_of(found.counts, found.values), pa.array(block.ok)]
        return pa.table(columns, schema=self.schema)


class TemplateTimes:
    """How often each template occurs in each of equal pieces of a log.

    Args:
        templates: how many.
        lines: of the log.
    """

    def __init__(self, templates: int, lines: int) -> None:
        self.bins = max(1, min(_BINS, lines))
        self.counts: Longs = np.zeros((self.bins, templates), np.int64)
        self._lines = max(lines, 1)

    def add(self, ids: Ints, first: int) -> None:
        """Some lines from number ``first`` on, from 0."""
        places = (first + np.arange(len(ids))) * self.bins // self._lines
        np.add.at(self.counts, (places, ids), 1)

    def picture(self, names: Sequence[str]) -> str:
        """SVG text: the most frequent templates, and all others together."""
        totals = self.counts.sum(axis=0)
        shown = np.argsort(-totals, kind="stable")[: len(COLOURS) - 1].tolist()
        x = (np.arange(self.bins) + 0.5) * self._lines / self.bins
        series = [
            Series(f"{at}: {_short(names[at])}", x.tolist(), self.counts[:, at].tolist())
            for at in shown
        ]
        if len(totals) > len(shown):
            rest = self.counts.sum(axis=1) - self.counts[:, shown].sum(axis=1)
            series.append(Series("others", x.tolist(), rest.tolist()))
        return Chart(
            title="templates over the log",
            description="How often the most frequent templates occur from its beginning to its end",
            x_label="line",
            y_label=f"lines of {self._lines / self.bins:,.0f}",
            series=series,
            width=960,
            height=480,
        ).render()


def write_templates(path: Path, templates: Sequence[str], counts: Longs) -> None:
    """``templates.csv`` in Loghub's layout, the most frequent first.

    Args:
        path: the file.
        templates: text of each.
        counts: int64 [templates], lines of each.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("EventId", "EventTemplate", "Occurrences"))
    for at in np.argsort(-counts, kind="stable").tolist():
        rows.writerow((f"E{at + 1}", templates[at], int(counts[at])))
    write_atomic(path, text.getvalue())


def write_anomalies(path: Path, names: Sequence[str], scores: Any, flags: Bools) -> None:
    """``anomalies.csv``: each group of lines with its score, the most unusual first."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(("group", "score", "anomalous"))
    for at in np.argsort(-np.asarray(scores), kind="stable").tolist():
        rows.writerow((names[at], f"{scores[at]:.6g}", int(flags[at])))
    write_atomic(path, text.getvalue())


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"

"""The score as people read it: tables and sentences."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.core.tables import Table, cut, digits, percent, table_of, without_empty
from shoal.ir import quantities

if TYPE_CHECKING:
    from shoal.cost.score_rows import ErrorSummary, ScoreRow

# Characters of a table, of what frames a column in it, and of a run's name at most and at least.
_WIDTH, _FRAME, _NAME, _SHORT = 80, 2, 12, 6
_LATENCIES = ("ttft", "tpot", "itl", "e2e")


def score_tables(
    rows: Sequence[ScoreRow], summaries: Sequence[ErrorSummary], *, last: int, everything: bool
) -> Iterator[Table | str]:
    """Predictions beside what was measured, and the errors in sum.

    Args:
        rows: of the score, oldest first.
        summaries: of the errors of each quantity.
        last: so many of the newest rows.
        everything: what is left out of the errors, too, and why.
    """
    if not rows:
        yield "no runs yet; create one with `shoal train --minutes 1`"
        return
    scored = [row for row in rows if row.predicted]
    counted = [row for row in scored if not row.left_out]
    left = [row for row in scored if row.left_out]
    yield predictions_table(counted[-last:])
    several = len({s.kind for s in summaries}) > 1
    yield without_empty(
        "errors",
        ("job", "quantity", "runs", "median", "median size", "in the interval"),
        [
            (
                s.kind if several else "",
                _label(s.kind, s.quantity),
                str(s.count),
                percent(s.median, sign=True),
                percent(s.median_abs),
                percent(s.inside),
            )
            for s in summaries
        ],
        "  rrrr",
    )
    if left and not everything:
        yield f"{len(left)} rows are excluded; `shoal score --all` shows the reasons"
    elif left:
        groups: dict[tuple[str, str, str, float], list[str]] = {}
        for row in left:
            key = (_day(row), cut(row.name, _NAME), row.left_out, row.recorded_s)
            groups.setdefault(key, []).append(_label(row.kind, row.quantity))
        yield table_of(
            "left out",
            ("when", "run", "quantities", "why"),
            [
                (when, name, ", ".join(labels), why)
                for (when, name, why, _), labels in list(groups.items())[-last:]
            ],
        )


def predictions_table(rows: Sequence[ScoreRow]) -> Table:
    """Predicted beside measured, a row each; every row has a prediction."""
    cells = [
        (
            _day(row),
            row.name,
            _label(row.kind, row.quantity),
            *_read(row),
            percent(row.error, sign=True),
        )
        for row in rows
    ]
    columns = ("when", "run", "quantity", "predicted", "measured", "unit", "error")
    # A run's name has what the others leave.
    others = sum(
        max(len(row[i]) for row in (columns, *cells)) for i in range(len(columns)) if i != 1
    )
    room = min(_NAME, max(_SHORT, _WIDTH - others - _FRAME * len(columns)))
    fitted = [(when, cut(name, room), *rest) for when, name, *rest in cells]
    return table_of("predictions", columns, fitted, "   rr r")


def _day(row: ScoreRow) -> str:
    return time.strftime("%m-%d", time.localtime(row.recorded_s))


def _label(kind: str, name: str) -> str:
    """What people read; of a latency its name, and which of its values."""
    known = quantities(kind)
    latency, _, which = name.removesuffix("_s").partition("_")
    if latency in _LATENCIES:
        return f"{latency.upper()} {which}"
    return known[name].label.strip() if name in known else name


def _read(row: ScoreRow) -> tuple[str, str, str]:
    """Predicted, measured and the unit that people read both in."""
    known = quantities(row.kind)
    name, values = row.quantity, (row.predicted or 0.0, row.measured)
    if name.endswith("_bytes"):
        factor, unit = (1e-9, "GB") if max(values) >= 1e9 else (1e-6, "MB")
    elif name.endswith("_per_s"):
        things = name.removesuffix("_per_s")
        factor, unit = 1.0, "tok/s" if things == "tokens" else f"{things}/s"
    elif name in known:
        one = known[name].scaled_to(row.measured)
        factor, unit = one.factor, one.unit
    else:  # a percentile beyond those that people read
        factor, unit = (1e3, "ms") if name.endswith("_s") else (1.0, "")
    return digits(factor * values[0]), digits(factor * values[1]), unit

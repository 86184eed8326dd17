"""What a scoreboard holds: rows scored, their errors by publication, intervals, a picture."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.svg import Chart, Series

# Share of the rows of a new publication that an interval is to hold; a row counts as a hit
# where the error is at most CLOSE.
COVERED = 0.90
CLOSE = 0.25
# Publications that set an interval of their own kind.
ENOUGH = 4


class ScoredRow(Value):
    """One row: what was reported and what Shoal says.

    Args:
        group: the publication; what belongs to one project is one.
        device: as published.
        devices: their number.
        metric: what was reported.
        reported: the number.
        predicted: the same quantity by the model.
        low: lower end of the 90 % interval.
        high: its upper end.
        run: degrees, micro-batch, recomputation and precision, in short.
        bound: the largest part of the predicted step beside products.
        filled: rules by which the row was completed.
        remembered: the value or a deciding setting was recalled, not read.
        named: the row is one of those that set the constants.
        reason: why it is off, where it is off by more than a quarter.
        baselines: the same quantity by other models.
    """

    id: str
    group: str
    device: str
    devices: int
    metric: str
    reported: float
    predicted: float
    low: float
    high: float
    run: str
    bound: str
    filled: tuple[str, ...] = ()
    remembered: bool = False
    named: bool = False
    reason: str = ""
    baselines: Mapping[str, float] = {}

    @property
    def error(self) -> float:
        """Predicted over reported, less one."""
        return self.predicted / self.reported - 1.0

    @property
    def covered(self) -> bool:
        """The interval holds what was reported."""
        return self.low <= self.reported <= self.high


class Scoreboard(Value):
    """All rows of one table.

    Args:
        kind: training or serving.
        rows: those that were replayed.
        skipped: id -> why the row was not replayed.
    """

    kind: str
    rows: tuple[ScoredRow, ...]
    skipped: Mapping[str, str] = {}

    @property
    def total(self) -> int:
        """All rows of the table."""
        return len(self.rows) + len(self.skipped)

    def median_error(self, group: str | None = None) -> float:
        """Median absolute error of all rows, or of one publication's."""
        return median(abs(r.error) for r in self.rows if group in (None, r.group))

    @property
    def coverage(self) -> float:
        """Share of rows whose interval holds what was reported."""
        return sum(row.covered for row in self.rows) / len(self.rows)

    def baseline_error(self, name: str) -> float:
        """Median absolute error of another model on the same rows."""
        return median(
            abs(r.baselines[name] / r.reported - 1) for r in self.rows if name in r.baselines
        )

    def scaled_error(self, name: str) -> float:
        """The same once one factor on its speed makes the named rows right, in their middle."""

        def slower(row: ScoredRow) -> float:
            ratio = row.baselines[name] / row.reported
            return ratio if row.metric == "step_s" else 1.0 / ratio

        named = [math.log(slower(row)) for row in self.rows if row.named]
        factor = math.exp(sum(named) / len(named)) if named else 1.0
        results = []
        for row in self.rows:
            ratio = slower(row) / factor
            results.append(abs((ratio if row.metric == "step_s" else 1.0 / ratio) - 1.0))
        return median(results)

    def groups(self) -> tuple[str, ...]:
        """Publications, most rows first."""
        names = {row.group for row in self.rows}
        return tuple(sorted(names, key=lambda g: (-sum(r.group == g for r in self.rows), g)))


def share_within(rows: Iterable[ScoredRow], limit: float = CLOSE) -> float:
    """Share of rows whose error is at most ``limit``."""
    results = [abs(row.error) <= limit for row in rows]
    return sum(results) / len(results) if results else 0.0


def figures(errors: Iterable[float]) -> dict[str, float]:
    """What a table says of errors: their number, median, what nine in ten keep to, share of hits.

    Args:
        errors: predicted over measured, less one; at least one.
    """
    own = sorted(abs(error) for error in errors)
    return {
        "rows": len(own),
        "median_error": median(own),
        "p90_error": own[math.ceil(0.9 * len(own)) - 1],
        "share_within_25": sum(error <= CLOSE for error in own) / len(own),
    }


def half_width(errors: Iterable[tuple[str, float]]) -> float:
    """Half-width of an interval on logarithms that holds 90 % of the rows of a new source.

    Every publication counts as much as every other, however many rows it has: the next one
    is a publication, too.

    Args:
        errors: (publication, absolute error on logarithms) of each row.
    """
    items = sorted((error, group) for group, error in errors)
    require(len(items) > 1, "errors", len(items), expected="at least 2 to set an interval")
    number = Counter(group for _, group in items)
    goal, seen = COVERED * len(number), 0.0
    for error, group in items:
        seen += 1.0 / number[group]
        if seen >= goal - 1e-9:
            return error
    return items[-1][0]


def widths(errors: Sequence[tuple[str, str, float]]) -> dict[tuple[str, str], float]:
    """Half-width for the rows of each (publication, kind), set by all other publications.

    Kinds of which too few rows are left take the width of all kinds together.

    Args:
        errors: (publication, kind, absolute error on logarithms) of each row.
    """
    widths: dict[tuple[str, str], float] = {}
    for group, kind, _ in errors:
        if (group, kind) not in widths:
            others = [(g, e) for g, other, e in errors if g != group and other == kind]
            if len({g for g, _ in others}) < ENOUGH:
                others = [(g, e) for g, _, e in errors if g != group]
            widths[group, kind] = half_width(others)
    return widths


# Devices in the picture: pattern of a name -> series.
_FAMILIES = (
    (r"Xeon|Ryzen|CPU|laptop|edge", "CPUs"),
    (r"Apple", "Apple"),
    (r"RTX|A40|L40", "RTX, A40, L40S"),
    (r"V100|A100", "V100, A100"),
    (r"H100|H200", "H100, H200"),
    (r"G?B[23]00", "B200, B300, GB200, GB300"),
)


def _family(device: str) -> str:
    return next((name for pattern, name in _FAMILIES if re.search(pattern, device)), "AMD, TPU")


def scatter(board: Scoreboard) -> Chart:
    """Predicted over reported of every row, by device."""
    series = []
    for family in (*(name for _, name in _FAMILIES), "AMD, TPU"):
        own = [row for row in board.rows if _family(row.device) == family]
        if own:
            x = [row.reported for row in own]
            y = [row.predicted / row.reported for row in own]
            series.append(Series(name=family, x=x, y=y, line=False, points=True))
    ends = [min(r.reported for r in board.rows), max(r.reported for r in board.rows)]
    lines = [
        Series(name="", x=ends, y=[level, level], dashed=level != 1.0)
        for level in (1.0, 1 + CLOSE, 1 - CLOSE)
    ]
    return Chart(
        title=f"Published {board.kind} runs: predicted over reported",
        description=(
            f"{len(board.rows)} published runs; the median error is {board.median_error():.1%}, "
            f"and {share_within(board.rows):.0%} lie within a quarter."
        ),
        x_label="reported (in the unit of each row)",
        y_label="predicted / reported",
        series=[*series, *lines],
        log_x=True,
        log_y=True,
        width=860,
        height=480,
    )

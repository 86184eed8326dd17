"""The scoreboard: every published training run, predicted beside reported.

No constant is fitted on the publication that is scored; see
:mod:`shoal.cost.published.calibration`. The 90 % interval of a row is set by how far the
predictions for all *other* publications were off.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.svg import Chart, Series
from shoal.cost.arithmetic import mixture_layers
from shoal.cost.published.baselines import BASELINES
from shoal.cost.published.calibration import NAMED, calibration_for
from shoal.cost.published.misses import reason_of
from shoal.cost.published.plan import Predicted, predict
from shoal.cost.published.quantity import reported
from shoal.cost.published.rows import Replay, Row, UnplayableError, read, replay

__all__ = ["Board", "Scored", "scatter", "score_training", "share_within"]

# Share of rows that an interval is to cover, and the share of errors that sets its width:
# intervals of rows not seen need a little more than the rows that set them.
COVERED = 0.90
CLOSE = 0.25


class Scored(Value):
    """One row: what was reported and what Shoal says.

    Args:
        id: of the row.
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


class Board(Value):
    """All rows of one table.

    Args:
        kind: training or serving.
        rows: those that were replayed.
        skipped: id -> why the row was not replayed.
    """

    kind: str
    rows: tuple[Scored, ...]
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

        def slower(row: Scored) -> float:
            ratio = row.baselines[name] / row.reported
            return ratio if row.metric == "step_s" else 1.0 / ratio

        named = [math.log(slower(row)) for row in self.rows if row.named]
        factor = math.exp(sum(named) / len(named)) if named else 1.0
        found = []
        for row in self.rows:
            ratio = slower(row) / factor
            found.append(abs((ratio if row.metric == "step_s" else 1.0 / ratio) - 1.0))
        return median(found)

    def groups(self) -> tuple[str, ...]:
        """Publications, most rows first."""
        names = {row.group for row in self.rows}
        return tuple(sorted(names, key=lambda g: (-sum(r.group == g for r in self.rows), g)))


def share_within(rows: Iterable[Scored], limit: float = CLOSE) -> float:
    """Share of rows whose error is at most ``limit``."""
    found = [abs(row.error) <= limit for row in rows]
    return sum(found) / len(found) if found else 0.0


def _short(run: Predicted) -> str:
    r = run.run
    degrees = {"tp": r.tp, "pp": r.pp, "vpp": r.vpp, "cp": r.cp, "ep": r.ep, "dp": r.dp}
    parts = [f"{name}{number}" for name, number in degrees.items() if number > 1]
    parts.append(f"mb{r.micro_batch}")
    parts.append(r.precision)
    if r.recompute != "none":
        parts.append(f"recompute {r.recompute}")
    return " ".join(parts)


def _bound(found: Predicted) -> str:
    terms = {k: v for k, v in found.step.terms.items() if k != "matmul"}
    name = max(terms, key=lambda k: terms[k])
    return f"{name} {terms[name] / found.step.seconds:.0%}"


def _kind(item: Replay) -> str:
    return "experts" if mixture_layers(item.run.shape) else "dense"


def half_width(errors: Iterable[tuple[str, float]]) -> float:
    """Half-width of an interval on logarithms that holds 90 % of the rows of a new source.

    Every publication counts as much as every other, however many rows it has: the next one
    is a publication, too.

    Args:
        errors: (publication, absolute error on logarithms) of each row.
    """
    found = sorted((error, group) for group, error in errors)
    require(len(found) > 1, "errors", len(found), expected="at least 2 to set an interval")
    number = Counter(group for _, group in found)
    goal, seen = COVERED * len(number), 0.0
    for error, group in found:
        seen += 1.0 / number[group]
        if seen >= goal - 1e-9:
            return error
    return found[-1][0]


def score_training(rows: tuple[Row, ...] | None = None) -> Board:
    """Score all rows of the shipped table, or of another."""
    return _shipped() if rows is None else _score(rows)


@functools.cache
def _shipped() -> Board:
    return _score(read())


def _score(rows: tuple[Row, ...]) -> Board:
    skipped: dict[str, str] = {}
    found: list[tuple[Replay, Predicted]] = []
    for row in rows:
        try:
            item = replay(row)
        except UnplayableError as cause:
            skipped[row.id] = str(cause)
            continue
        found.append((item, predict(item, calibration_for(row.group, rows))))
    off = [
        (item.row.group, _kind(item), abs(math.log(p.value / item.row.value))) for item, p in found
    ]
    widths: dict[tuple[str, str], float] = {}
    for item, _ in found:
        key = (item.row.group, _kind(item))
        if key not in widths:
            others = [(g, e) for g, kind, e in off if g != key[0] and kind == key[1]]
            widths[key] = half_width(
                others if len(others) >= 20 else [(g, e) for g, _, e in off if g != key[0]]
            )
    scored = []
    for item, p in found:
        row = item.row
        spread = math.exp(widths[row.group, _kind(item)])
        peak = dict(item.gpu.peak)["bf16"]
        error = p.value / row.value - 1.0
        scored.append(
            Scored(
                id=row.id,
                group=row.group,
                device=row.raw["device"],
                devices=p.run.devices,
                metric=row.metric,
                reported=row.value,
                predicted=p.value,
                low=p.value / spread,
                high=p.value * spread,
                run=_short(p),
                bound=_bound(p),
                filled=item.filled,
                remembered=row.remembered,
                named=row.id in NAMED,
                reason=reason_of(item, error) if abs(error) > CLOSE else "",
                baselines={
                    name: reported(row, p.run, model(p.run, item.gpu), peak)
                    for name, model in BASELINES.items()
                },
            )
        )
    return Board(kind="training", rows=tuple(scored), skipped=skipped)


def scatter(board: Board) -> str:
    """Predicted over reported, as SVG: throughput and utilisation as they are, times inverted."""
    series = []
    for group in board.groups():
        own = [row for row in board.rows if row.group == group]
        series.append(
            Series(
                name=group,
                x=[r.reported for r in own],
                y=[r.predicted / r.reported for r in own],
                line=False,
                points=True,
            )
        )
    low = min(r.reported for r in board.rows)
    high = max(r.reported for r in board.rows)
    ends = [low, high]
    lines = [
        Series(name="", x=ends, y=[1.0, 1.0]),
        Series(name="", x=ends, y=[1 + CLOSE, 1 + CLOSE], dashed=True),
        Series(name="", x=ends, y=[1 - CLOSE, 1 - CLOSE], dashed=True),
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
        height=520,
    ).render()

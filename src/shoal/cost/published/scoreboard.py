"""The scoreboard: every published training run, predicted beside reported.

No constant is fitted on the publication that is scored; see
:mod:`shoal.cost.published.calibration`. The 90 % interval of a row is set by how far the
predictions for all *other* publications were off.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from shoal.core.errors import ShoalError
from shoal.cost.arithmetic import mixture_layers
from shoal.cost.published.baselines import BASELINES
from shoal.cost.published.board import CLOSE, Scoreboard, ScoredRow, widths
from shoal.cost.published.calibration import NAMED, PRIOR, calibration_for
from shoal.cost.published.devices import gpu
from shoal.cost.published.misses import reason_of
from shoal.cost.published.plan import PublishedPrediction, predict
from shoal.cost.published.quantity import reported
from shoal.cost.published.rows import PublishedRow, TrainReplay, UnplayableError, read, replay


def _short(run: PublishedPrediction) -> str:
    r = run.run
    degrees = {"tp": r.tp, "pp": r.pp, "vpp": r.vpp, "cp": r.cp, "ep": r.ep, "dp": r.dp}
    parts = [f"{name}{number}" for name, number in degrees.items() if number > 1]
    parts.append(f"mb{r.micro_batch}")
    parts.append(r.precision)
    if r.recompute != "none":
        parts.append(f"recompute {r.recompute}")
    return " ".join(parts)


def _bound(found: PublishedPrediction) -> str:
    terms = {k: v for k, v in found.step.terms_s.items() if k != "matmul"}
    name = max(terms, key=lambda k: terms[k])
    return f"{name} {terms[name] / found.step.step_s.value:.0%}"


def _kind(item: TrainReplay) -> str:
    return "experts" if mixture_layers(item.run.shape) else "dense"


def alternatives() -> dict[str, tuple[float, float]]:
    """(median absolute error, share within a quarter) were the board set up in other ways.

    Without any calibration, and with the data sheet of a B200 where the board takes the rate
    of products that the publication itself probed on its machine.
    """
    plain, sheet = [], []
    for row in read():
        try:
            item = replay(row)
        except UnplayableError:
            continue
        plain.append(abs(predict(item, PRIOR).value / row.value - 1.0))
        if item.gpu.sustained:
            item = replace(item, gpu=gpu(row.raw["device"]))
        sheet.append(abs(predict(item, calibration_for(row.group)).value / row.value - 1.0))
    return {
        "no row calibrates": _describe(plain),
        "the data sheet for every device": _describe(sheet),
    }


def _describe(errors: list[float]) -> tuple[float, float]:
    return median(errors), sum(error <= CLOSE for error in errors) / len(errors)


def score_training(rows: tuple[PublishedRow, ...] | None = None) -> Scoreboard:
    """Score all rows of the shipped table, or of another.

    Constants and intervals of another table are those that the shipped one gives.
    """
    return _shipped() if rows is None else _score(rows, _replayed(read())[0])


@functools.cache
def _shipped() -> Scoreboard:
    return _score(read(), ())


_Replayed = Sequence[tuple[TrainReplay, PublishedPrediction]]


def _replayed(rows: tuple[PublishedRow, ...]) -> tuple[_Replayed, dict[str, str]]:
    """Rows that can be replayed, with their predictions, and why the others cannot."""
    skipped: dict[str, str] = {}
    results: list[tuple[TrainReplay, PublishedPrediction]] = []
    known = rows if any(row.id in NAMED for row in rows) else None
    for row in rows:
        try:
            item = replay(row)
            results.append((item, predict(item, calibration_for(row.group, known))))
        except ShoalError as cause:
            skipped[row.id] = str(cause)
    return results, skipped


def _score(rows: tuple[PublishedRow, ...], others: _Replayed) -> Scoreboard:
    results, skipped = _replayed(rows)
    off = [
        (item.row.group, _kind(item), abs(math.log(p.value / item.row.value)))
        for item, p in (*results, *others)
    ]
    spreads = widths(off)
    scored = []
    for item, p in results:
        row = item.row
        spread = math.exp(spreads[row.group, _kind(item)])
        peak = dict(item.gpu.peak)["bf16"]
        error = p.value / row.value - 1.0
        scored.append(
            ScoredRow(
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
    return Scoreboard(kind="training", rows=tuple(scored), skipped=skipped)

"""The pictures of the dashboard, from what was read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import MachineError
from shoal.core.svg import Band, Chart, Series
from shoal.cost.score import ScoreRow
from shoal.ir import Machine, Plan, predictions
from shoal.machine.roofline import attainable, ridge
from shoal.serve.watch.moments import WINDOW_S, Moment
from shoal.train.runs import Events, number
from shoal.train.saves import memory_by_tier

__all__ = ["of_machine", "of_run", "of_score", "of_server"]

# On a phone a picture shrinks to some 340 px; its text must stay legible.
WIDTH, HEIGHT = 430, 250
# Points of one cloud; the newest are shown.
MAX_POINTS = 400


def of_run(events: Events, plan: Plan[Any] | None) -> list[Chart]:
    """Loss, tokens per second, utilisation and memory over the steps; those that have points."""
    steps = events.steps
    if not steps:
        return []
    ends = [float(min(steps)), float(max(steps))]
    loss = [Series("training", *events.curve("loss"))]
    heldout = [
        (number(event.get("step")), number(event.get("loss"))) for event in events.evaluations
    ]
    if heldout:
        loss.append(
            Series("held-out", [x for x, _ in heldout], [y for _, y in heldout], points=True)
        )
    rate = [Series("measured", *events.curve("tokens_per_s"))]
    memory = [Series("measured", *events.curve("memory_bytes", 1 / 2**20))]
    bands = []
    cost = None if plan is None else plan.estimate
    if cost is not None and cost.tokens:
        low, high = cost.tokens / cost.step_s.high, cost.tokens / cost.step_s.low
        rate.append(Series("predicted", ends, [cost.tokens_per_s] * 2, dashed=True))
        bands.append(Band("predicted", ends, [low] * 2, [high] * 2))
    if plan is not None and cost is not None and cost.memory_bytes:
        rank = predictions(plan)["memory_bytes"].value / 2**20
        memory.append(Series("predicted", ends, [rank] * 2, dashed=True))
    results = [
        _chart("Loss", "nats per token", loss),
        _chart("Tokens per second", "tokens/s", rate, bands),
        _chart(
            "Model FLOPs utilisation",
            "% of the peak",
            [Series("measured", *events.curve("mfu", 100))],
        ),
        _chart("Memory of rank 0", "MiB", memory),
        memory_by_tier(events, WIDTH, HEIGHT),
    ]
    return [chart for chart in results if chart is not None]


def _chart(
    title: str, unit: str, series: Sequence[Series], bands: Sequence[Band] = ()
) -> Chart | None:
    finite = [y for one in series for y in one.y if math.isfinite(y)]
    if not any(math.isfinite(y) for y in series[0].y):
        return None
    said = f"{title} over the steps: {finite[0]:.4g} at first, {series[0].y[-1]:.4g} at last."
    return Chart(
        title=title,
        description=said,
        x_label="step",
        y_label=unit,
        series=series,
        bands=bands,
        width=WIDTH,
        height=HEIGHT,
    )


def of_score(rows: Sequence[ScoreRow], quantity: str, label: str, factor: float) -> Chart | None:
    """Measured against predicted, on the diagonal when they agree; None without predictions."""
    pairs = [
        (row.predicted * factor, row.measured * factor)
        for row in rows
        if row.quantity == quantity and row.predicted and row.predicted > 0 and row.measured > 0
    ][-MAX_POINTS:]
    if not pairs:
        return None
    low, high = min(map(min, pairs)) / 1.3, max(map(max, pairs)) * 1.3
    return Chart(
        title=label.partition(",")[0].capitalize(),
        description=f"{len(pairs)} runs: measured against predicted {label}; the dashed diagonal "
        "is where they agree, the band is 25 % to either side.",
        x_label=f"predicted {label}",
        y_label="measured",
        series=[
            Series("runs", [p for p, _ in pairs], [m for _, m in pairs], line=False, points=True),
            Series("agree", [low, high], [low, high], dashed=True),
        ],
        bands=[Band("agree", [low, high], [low * 0.75, high * 0.75], [low * 1.25, high * 1.25])],
        log_x=True,
        log_y=True,
        width=WIDTH,
        height=HEIGHT + 20,
    )


def of_machine(machine: Machine) -> Chart | None:
    """The roofline: rate over arithmetic intensity; None when a rate or bandwidth is unknown."""
    names = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
    rated = machine.device.matmul_flops or machine.device.peak_flops
    try:
        knees = {dtype: ridge(machine, dtype) for dtype in names if dtype in rated}
    except MachineError:
        return None  # a described machine may leave out its bandwidth
    if not knees:
        return None
    left, right = min(knees.values()) / 30, max(knees.values()) * 10
    series = []
    for dtype, knee in knees.items():
        xs = [left, knee, right]
        series.append(Series(dtype, xs, [attainable(machine, x, dtype) for x in xs]))
    return Chart(
        title="What this machine reaches",
        description="Roofline: FLOP/s over arithmetic intensity. Left of a knee the memory "
        "binds, right of it the arithmetic.",
        x_label="arithmetic intensity, FLOP per byte",
        y_label="FLOP/s",
        series=series,
        log_x=True,
        log_y=True,
        width=WIDTH,
        height=HEIGHT + 20,
    )


# Places and values that a picture of the server has in any case: a minute, and from nothing on.
_LAST_S, _FROM = (-60.0, 0.0), (0.0, 1.0)
# Of the server: title, unit, factor to the unit, (name in the legend, name of the value).
_LIVE: tuple[tuple[str, str, float, tuple[tuple[str, str], ...]], ...] = (
    ("Time to the first token", "ms", 1e3, (("median", "ttft_p50"), ("p99", "ttft_p99"))),
    ("Time between two tokens", "ms", 1e3, (("median", "gap_p50"), ("p99", "gap_p99"))),
    ("Requests", "requests", 1.0, (("running", "running"), ("waiting", "waiting"))),
    ("Cache in use", "%", 100.0, (("cache", "cache"),)),
    (f"Preemptions in {WINDOW_S:.0f} s", "preemptions", 1.0, (("preemptions", "preemptions"),)),
)


def of_server(moments: Sequence[Moment]) -> list[tuple[str, Chart | None]]:
    """(title, picture) of what was seen of a server; None for what has no value yet."""
    results: list[tuple[str, Chart | None]] = []
    for title, unit, factor, lines in _LIVE:
        series = [
            _past(name, moments, [factor * one.get(value) for one in moments])
            for name, value in lines
        ]
        results.append((title, _moving(title, unit, series)))
    written = _past("tokens", moments, [one.rate("tokens") for one in moments])
    results.append(("Tokens written per second", _moving("Tokens written", "tokens/s", [written])))
    return results


def _past(name: str, moments: Sequence[Moment], values: Sequence[float]) -> Series:
    return Series(name, [one.at - moments[-1].at for one in moments], values, broken=True)


def _moving(title: str, unit: str, series: Sequence[Series]) -> Chart | None:
    last = [
        (one.name, [y for y in one.y if math.isfinite(y)][-1])
        for one in series
        if any(math.isfinite(y) for y in one.y)
    ]
    if not last:
        return None
    text = ", ".join(
        f"{name} {value:.4g} {unit}" if len(series) > 1 else f"{value:.4g} {unit}"
        for name, value in last
    )
    return Chart(
        title=title,
        description=f"{title} over the last minutes; at last {text}.",
        x_label="seconds from now",
        y_label=unit,
        series=series,
        cover_x=_LAST_S,
        cover_y=_FROM,
        width=WIDTH,
        height=HEIGHT - 30,
    )

"""The charts of the dashboard, from what was read."""

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

# Points of one cloud; the newest are shown.
MAX_POINTS = 400
# Points of a line of a run; of a part that is zoomed into, as many again.
_POINTS = 1000

# Of a run: title, unit, field of a step's event, factor to the unit.
_STEPS: tuple[tuple[str, str, str, float], ...] = (
    ("Loss", "nats per token", "loss", 1.0),
    ("Learning rate", "", "lr", 1.0),
    ("Gradient norm", "before clipping", "grad_norm", 1.0),
    ("Tokens per second", "tokens/s", "tokens_per_s", 1.0),
    ("Model FLOPs utilisation", "% of the peak", "mfu", 100.0),
    ("Memory of rank 0", "MB", "memory_bytes", 1e-6),
)
_Window = tuple[float, float] | None


def of_run(events: Events, plan: Plan[Any] | None, window: _Window = None) -> list[Chart]:
    """What the steps of a run report; those that have points.

    Args:
        events: of the run.
        plan: its plan, for what was predicted.
        window: first and last step; all of them if None.
    """
    steps = events.steps
    own = [] if events.follower is None else list(events.follower.charts())
    if not steps:
        return own
    first, last = window or (-math.inf, math.inf)
    ends = [max(float(min(steps)), first), min(float(max(steps)), last)]
    more: dict[str, list[Series]] = {"loss": _held_out("held-out", events, window)}
    bands: dict[str, list[Band]] = {}
    cost = None if plan is None else plan.estimate
    if cost is not None and cost.tokens:
        low, high = cost.tokens / cost.step_s.high, cost.tokens / cost.step_s.low
        more["tokens_per_s"] = [Series("predicted", ends, [cost.tokens_per_s] * 2, dashed=True)]
        bands["tokens_per_s"] = [Band("predicted", ends, [low] * 2, [high] * 2)]
    if plan is not None and cost is not None and cost.memory_bytes:
        rank = predictions(plan)["memory_bytes"].value * 1e-6
        more["memory_bytes"] = [Series("predicted", ends, [rank] * 2, dashed=True)]
    results = []
    for title, unit, key, factor in _STEPS:
        curve = events.curve(key, factor, _POINTS, window)
        name = "training" if key == "loss" else "measured"
        series = [Series(name, *curve), *more.get(key, ())]
        results.append(_chart(title, unit, series, bands.get(key, ())))
    return own + [one for one in (*results, memory_by_tier(events)) if one is not None]


def of_runs(runs: Sequence[tuple[str, Events]], window: _Window = None) -> list[Chart]:
    """The curves of several runs over each other.

    Args:
        runs: what each is called, and its events.
        window: first and last step; all of them if None.
    """
    results = []
    for title, unit, key, factor in _STEPS:
        series = [Series(name, *one.curve(key, factor, _POINTS, window)) for name, one in runs]
        if key == "loss":
            for name, one in runs:
                series += _held_out(f"{name}, held-out", one, window)
        results.append(_chart(title, unit, series))
    return [one for one in results if one is not None]


def _held_out(name: str, events: Events, window: _Window) -> list[Series]:
    """The losses on held-out text, as points."""
    first, last = window or (-math.inf, math.inf)
    pairs = [(number(one.get("step")), number(one.get("loss"))) for one in events.evaluations]
    pairs = [(x, y) for x, y in pairs if first <= x <= last]
    return [Series(name, [x for x, _ in pairs], [y for _, y in pairs], points=True)] * bool(pairs)


def _chart(
    title: str, unit: str, series: Sequence[Series], bands: Sequence[Band] = ()
) -> Chart | None:
    """A chart over the steps; None when nothing was measured."""
    measured = [one for one in series if not one.points and not one.dashed]
    said = [
        f"{one.name} {ys[0]:.4g} at the start, {ys[-1]:.4g} at the end"
        for one in measured
        if (ys := [y for y in one.y if math.isfinite(y)])
    ]
    if not said:
        return None
    return Chart(
        title=title,
        description=f"{title} over the steps: {'; '.join(said)}.",
        x_label="step",
        y_label=unit,
        series=series,
        bands=bands,
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
    name = label.partition(",")[0]
    low, high = min(map(min, pairs)) / 1.3, max(map(max, pairs)) * 1.3
    return Chart(
        title=name[:1].upper() + name[1:],
        description=f"{len(pairs)} runs: measured over predicted {label}; the dashed diagonal is "
        f"a perfect prediction, the band is 25 % to either side.",
        x_label=f"predicted {label}",
        y_label="measured",
        series=[
            Series("runs", [p for p, _ in pairs], [m for _, m in pairs], line=False, points=True),
            Series("agree", [low, high], [low, high], dashed=True),
        ],
        bands=[Band("agree", [low, high], [low * 0.75, high * 0.75], [low * 1.25, high * 1.25])],
        log_x=True,
        log_y=True,
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
        title="Roofline of this machine",
        description="Roofline: FLOP/s over arithmetic intensity. Left of a knee memory is the "
        "bottleneck, right of it arithmetic.",
        x_label="arithmetic intensity, FLOP per byte",
        y_label="FLOP/s",
        series=series,
        log_x=True,
        log_y=True,
    )


# Places and values that a picture of the server has in any case: a minute, and from nothing on.
_LAST_S, _FROM = (-60.0, 0.0), (0.0, 1.0)
# Of the server: title, unit, factor to the unit, (name in the legend, name of the value).
_LIVE: tuple[tuple[str, str, float, tuple[tuple[str, str], ...]], ...] = (
    ("TTFT (time to first token)", "ms", 1e3, (("median", "ttft_p50"), ("p99", "ttft_p99"))),
    ("ITL (inter-token latency)", "ms", 1e3, (("median", "gap_p50"), ("p99", "gap_p99"))),
    ("Requests", "requests", 1.0, (("running", "running"), ("waiting", "waiting"))),
    ("Cache in use", "%", 100.0, (("cache", "cache"),)),
    (f"Preemptions in {WINDOW_S:.0f} s", "preemptions", 1.0, (("preemptions", "preemptions"),)),
)


def of_server(moments: Sequence[Moment]) -> list[Chart]:
    """What was seen of a server; a chart without values yet has none."""
    results = []
    for title, unit, factor, lines in _LIVE:
        series = [
            _past(name, moments, [factor * one.get(value) for one in moments])
            for name, value in lines
        ]
        results.append(_moving(title, unit, series))
    written = _past("tokens", moments, [one.rate("tokens") for one in moments])
    results.append(_moving("Generated tokens per second", "tokens/s", [written]))
    return results


def _past(name: str, moments: Sequence[Moment], values: Sequence[float]) -> Series:
    return Series(name, [one.at - moments[-1].at for one in moments], values)


def _moving(title: str, unit: str, series: Sequence[Series]) -> Chart:
    last = [
        (one.name, [y for y in one.y if math.isfinite(y)][-1])
        for one in series
        if any(math.isfinite(y) for y in one.y)
    ]
    text = ", ".join(
        f"{name} {value:.4g} {unit}" if len(series) > 1 else f"{value:.4g} {unit}"
        for name, value in last
    )
    return Chart(
        title=title,
        description=f"{title} over the last minutes; at last {text or 'no value yet'}.",
        x_label="seconds from now",
        y_label=unit,
        series=series,
        cover_x=_LAST_S,
        cover_y=_FROM,
    )

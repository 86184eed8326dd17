"""A landscape to look at: one HTML page with charts along each axis, peaks, turns and trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import MissingExtraError
from shoal.core.svg import Chart, Series
from shoal.plan.tune.landscape import Landscape
from shoal.plan.tune.protocols import Axis, Setting, TuningResult


@dataclass(frozen=True)
class LandscapeTable:
    """Rows below a title.

    Args:
        title: what they are.
        hint: how to read them; what it means if there are none.
        columns: names of the cells.
        rows: cells as text.
    """

    title: str
    hint: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def page(study: TuningResult, *, title: str, unit: str) -> str:
    """A study as one HTML page without links to other files.

    Raises:
        PlanError: nothing worked.
    """
    from shoal.core.web import WebSite

    best = study.best
    return WebSite("shoal.plan").render_alone(
        "landscape.html",
        title=title,
        why=f"Best of {len(study.trials)} of {study.space.size} configurations: "
        f"{_spelt(best.config)}, {best.value:.4g} {unit}.",
        pictures=_charts(study, unit),
        tables=tables(study, unit),
    )


def _charts(study: TuningResult, unit: str) -> list[Chart]:
    """Every trial over each axis of numbers, and the best at each of its values."""
    charts = []
    whole = [trial for trial in study.feasible if trial.share >= 1]
    for axis in study.space.axes:
        if len(axis.values) < 2:
            continue
        places = _places(axis)
        x = [places[trial.config[axis.name]] for trial in whole]
        y = [trial.value or 0.0 for trial in whole]
        best = {at: max(v for a, v in zip(x, y, strict=True) if a == at) for at in sorted(set(x))}
        charts.append(
            Chart(
                title=axis.name,
                description=f"{unit} of every trial over {axis.name}",
                x_label=axis.name if _numbers(axis) else f"{axis.name}: {_listed(axis)}",
                y_label=unit,
                series=[
                    Series("trials", x, y, line=False, points=True),
                    Series("best", list(best), list(best.values())),
                ],
                log_x=_numbers(axis),
                height=240,
            )
        )
    return charts


def _numbers(axis: Axis) -> bool:
    return all(
        isinstance(v, int | float) and not isinstance(v, bool) and v > 0 for v in axis.values
    )


def _places(axis: Axis) -> dict[Setting, float]:
    if _numbers(axis):
        return {value: float(value) for value in axis.values}
    return {value: float(place) for place, value in enumerate(axis.values)}


def _listed(axis: Axis) -> str:
    return ", ".join(f"{place} is {value}" for place, value in enumerate(axis.values))


def _spelt(config: Mapping[str, Setting]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in config.items())


def tables(study: TuningResult, unit: str) -> list[LandscapeTable]:
    """Peaks, turns, what matters, and all trials."""
    land = Landscape.of(study)
    names = study.space.names
    spread, freedom = land.noise
    noise = f"{100 * spread:.1f} % from one measurement to the next" if freedom else "not known"
    try:
        effects = land.effects(seed=study.seed)
        hint = "Share of the variance over the whole space, of a forest fitted to the trials."
    except MissingExtraError as missing:
        effects, hint = {}, str(missing)
    return [
        LandscapeTable(
            "Peaks",
            "Configurations whose neighbours along every axis are all significantly worse; "
            f"the noise is {noise}.",
            names,
            _rows(names, land.peaks()),
        ),
        LandscapeTable(
            "Turns",
            "Where more of one knob helps first and hurts then (peak), or hurts first (valley).",
            ("knob", "kind", *names),
            tuple(
                (turn.axis, "peak" if turn.peak else "valley", *_cells(names, turn.config))
                for turn in land.turns()
            ),
        ),
        LandscapeTable(
            "What matters",
            hint,
            ("knobs", "share"),
            tuple((" with ".join(who), f"{100 * share:.1f} %") for who, share in effects.items()),
        ),
        LandscapeTable(
            "Trials",
            "Best first; those that failed say why.",
            (unit, *names, "measurements"),
            tuple(
                (
                    trial.failure if trial.value is None else f"{trial.value:.4g}",
                    *_cells(names, trial.config),
                    str(max(1, len(trial.samples)))
                    + ("" if trial.share >= 1 else f" with {trial.share:.0%} of the requests"),
                )
                for trial in sorted(
                    study.trials,
                    key=lambda one: (one.value is None, -one.share, -(one.value or 0.0)),
                )
            ),
        ),
    ]


def _cells(names: Sequence[str], config: Mapping[str, Setting]) -> tuple[str, ...]:
    return tuple(str(config[name]) for name in names)


def _rows(
    names: Sequence[str], configs: Sequence[Mapping[str, Setting]]
) -> tuple[tuple[str, ...], ...]:
    return tuple(_cells(names, config) for config in configs)

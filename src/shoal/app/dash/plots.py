"""Charts as the values that uPlot draws in the browser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.core.svg import COLOURS, Chart


def plots(charts: Sequence[Chart]) -> dict[str, Any]:
    """Charts as plain JSON values, in their order."""
    return {"plots": [_plot(chart) for chart in charts]}


def window(query: Mapping[str, str]) -> tuple[float, float] | None:
    """The steps that an address asks for by ``from`` and ``to``; all of them if it does not."""
    try:
        first, last = float(query["from"]), float(query["to"])
    except (KeyError, ValueError):
        return None
    return (first, last) if first < last else None


def _plot(chart: Chart) -> dict[str, Any]:
    """One chart: places, and a column of values for each line and each end of a band."""
    lines = [(one.x, one.y) for one in chart.series]
    edges = [(band.x, edge) for band in chart.bands for edge in (band.low, band.high)]
    at, columns = aligned(
        [list(_points(x, y, chart.log_x, chart.log_y)) for x, y in [*lines, *edges]]
    )
    colours = {one.name: number % len(COLOURS) for number, one in enumerate(chart.series)}
    rest = columns[len(lines) :]
    return {
        "title": chart.title,
        "description": chart.description,
        "x": chart.x_label,
        "y": chart.y_label,
        "log": [chart.log_x, chart.log_y],
        "cover": [list(chart.cover_x), list(chart.cover_y)],
        "at": at,
        "series": [
            {
                "name": one.name,
                "values": values,
                "colour": colours[one.name],
                "line": one.line,
                "points": one.points,
                "dashed": one.dashed,
                # At a value that is not finite the line breaks; where it has none, it goes on.
                "broken": not all(map(math.isfinite, one.y)),
            }
            for one, values in zip(chart.series, columns, strict=False)
        ],
        "bands": [
            {"colour": colours.get(band.name, 0), "low": low, "high": high}
            for band, low, high in zip(chart.bands, rest[::2], rest[1::2], strict=True)
        ],
    }


def _points(
    xs: Sequence[float], ys: Sequence[float], log_x: bool, log_y: bool
) -> Iterator[tuple[float, float | None]]:
    """Points of a line; a value that cannot be drawn is None."""
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(x) and (x > 0 or not log_x):
            yield float(x), float(y) if math.isfinite(y) and (y > 0 or not log_y) else None


def aligned(
    lines: Sequence[Sequence[tuple[float, float | None]]],
) -> tuple[list[float], list[list[float | None]]]:
    """The places of all lines in order, and each line's values there, None where it has none.

    A place that one line has several times, such as an upright stroke, stands there as often.
    """
    grouped: list[dict[float, list[float | None]]] = []
    times: dict[float, int] = {}
    for line in lines:
        values: dict[float, list[float | None]] = {}
        for x, y in line:
            values.setdefault(x, []).append(y)
        grouped.append(values)
        for x, ys in values.items():
            times[x] = max(times.get(x, 0), len(ys))
    order = sorted(times)
    none: list[float | None] = [None]
    columns: list[list[float | None]] = [[] for _ in grouped]
    for column, values in zip(columns, grouped, strict=True):
        for x in order:
            ys = values.get(x, [])
            column += ys + none * (times[x] - len(ys))
    return [x for x in order for _ in range(times[x])], columns

"""Line charts as SVG text, alone or below each other, without any dependency.

The picture takes its ink from ``currentColor``, so it is legible on light and dark
pages, and it has a title and a description for screen readers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from shoal.core.errors import ConfigError, require

_Place = Callable[[float], float]

# Of the legend, in px: a line's height, a mark and the space behind it, a letter, and the space
# between two names.
_LINE, _MARK, _LETTER, _GAP = 18, 16, 6.6, 14

# Colours that differ for the colour-blind, on light and on dark (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class Series:
    """A named line, a cloud of points, or both.

    Args:
        name: for the legend.
        x: places.
        y: values, as many; those that are not finite are left out.
        line: join the points.
        points: mark the points.
        dashed: draw the line in dashes.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = True
    points: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Band:
    """A filled interval around the series of the same name, or of its own.

    Args:
        name: name of the series whose colour it takes.
        x: places.
        low: lower ends.
        high: upper ends.
    """

    name: str
    x: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of several series on one pair of axes.

    Args:
        title: heading, also for screen readers.
        description: what the picture shows, in a sentence, for screen readers.
        x_label: name and unit of the horizontal axis.
        y_label: name and unit of the vertical axis.
        series: lines and points.
        bands: intervals.
        log_x: logarithmic horizontal axis.
        log_y: logarithmic vertical axis.
        cover_x: places that the horizontal axis has in any case.
        cover_y: values that the vertical axis has in any case.
        legend: name the series, where there are several.
        width: of the picture, in px.
        height: of the picture, in px.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bands: Sequence[Band] = ()
    description: str = ""
    log_x: bool = False
    log_y: bool = False
    cover_x: Sequence[float] = ()
    cover_y: Sequence[float] = ()
    legend: bool = True
    width: int = 640
    height: int = 360
    _margin: tuple[int, int, int, int] = field(default=(34, 16, 46, 64), repr=False)

    def render(self) -> str:
        """The SVG element as text.

        Raises:
            ConfigError: lengths differ, nothing can be drawn, or a logarithmic axis has
                no value above zero.
        """
        for series in self.series:
            require(
                len(series.x) == len(series.y),
                f"chart.{series.name}",
                f"{len(series.x)} x and {len(series.y)} y",
                expected="equally many",
            )
        xs = [v for s in self.series for v, w in zip(s.x, s.y, strict=True) if self._shown(v, w)]
        ys = [w for s in self.series for v, w in zip(s.x, s.y, strict=True) if self._shown(v, w)]
        for band in self.bands:
            ys += [w for w in (*band.low, *band.high) if self._finite(w, self.log_y)]
            xs += [v for v in band.x if self._finite(v, self.log_x)]
        if not xs or not ys:
            raise ConfigError(
                f"chart {self.title!r}: no point can be drawn; give finite values"
                + (", above 0 on a logarithmic axis" if self.log_x or self.log_y else "")
            )
        x_axis = _Axis.of([*xs, *self.cover_x], self.log_x)
        y_axis = _Axis.of([*ys, *self.cover_y], self.log_y)
        top, right, bottom, left = self._margin
        named = [s.name for s in self.series if s.name]
        legend = self._lines(named) if self.legend and len(named) > 1 else []
        top += _LINE * len(legend)
        box = (left, top, self.width - right, self.height - bottom)

        def px(value: float) -> float:
            return box[0] + x_axis.share(value) * (box[2] - box[0])

        def py(value: float) -> float:
            return box[3] - y_axis.share(value) * (box[3] - box[1])

        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape(self.description or self._describe())}</desc>",
            f'<text x="{self.width / 2:.0f}" y="18" text-anchor="middle" font-weight="600">'
            f"{escape(self.title)}</text>",
        ]
        out += self._grid(x_axis, y_axis, box, px, py)
        colour = {s.name: COLOURS[i % len(COLOURS)] for i, s in enumerate(self.series)}
        for band in self.bands:
            out.append(self._band(band, colour.get(band.name, COLOURS[0]), px, py))
        for series in self.series:
            out += self._line(series, colour[series.name], px, py)
        out += self._legend(legend, colour, box)
        return "\n".join([*out, "</svg>", ""])

    def _finite(self, value: float, log: bool) -> bool:
        return math.isfinite(value) and (value > 0 or not log)

    def _shown(self, x: float, y: float) -> bool:
        return self._finite(x, self.log_x) and self._finite(y, self.log_y)

    def _describe(self) -> str:
        names = ", ".join(s.name for s in self.series if s.name)
        return f"Line chart of {self.y_label} over {self.x_label}" + (f": {names}" if names else "")

    def _grid(
        self,
        x_axis: _Axis,
        y_axis: _Axis,
        box: tuple[int, int, int, int],
        px: _Place,
        py: _Place,
    ) -> list[str]:
        left, top, right, bottom = box
        out = []
        for value in y_axis.ticks:
            y = py(value)
            out.append(
                f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="currentColor" '
                'stroke-opacity="0.15"/>'
                f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
            )
        for value in x_axis.ticks:
            x = px(value)
            out.append(
                f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 4}" '
                'stroke="currentColor"/>'
                f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{_number(value)}</text>'
            )
        out.append(
            f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="currentColor"/>'
            f'<text x="{(left + right) / 2:.0f}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x_label)}</text>"
            f'<text transform="translate(14 {(top + bottom) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.y_label)}</text>'
        )
        return out

    def _band(self, band: Band, colour: str, px: _Place, py: _Place) -> str:
        rows = [
            (x, low, high)
            for x, low, high in zip(band.x, band.low, band.high, strict=True)
            if self._shown(x, low) and self._shown(x, high)
        ]
        there = [f"{px(x):.1f},{py(high):.1f}" for x, _, high in rows]
        back = [f"{px(x):.1f},{py(low):.1f}" for x, low, _ in reversed(rows)]
        points = " ".join([*there, *back])
        return f'<polygon points="{points}" fill="{colour}" fill-opacity="0.18"/>'

    def _line(self, series: Series, colour: str, px: _Place, py: _Place) -> list[str]:
        places = [
            (px(x), py(y)) for x, y in zip(series.x, series.y, strict=True) if self._shown(x, y)
        ]
        out = []
        dash = ' stroke-dasharray="6 4"' if series.dashed else ""
        if series.line and len(places) > 1:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            out.append(
                f'<polyline points="{joined}" fill="none" stroke="{colour}" '
                f'stroke-width="1.8"{dash}/>'
            )
        if series.points or len(places) == 1:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        return out

    def _lines(self, names: Sequence[str]) -> list[list[tuple[float, str]]]:
        """Lines of the legend: the place of each mark, and the name behind it."""
        lines: list[list[tuple[float, str]]] = [[]]
        x = start = float(self._margin[3])
        for name in names:
            width = _MARK + _LETTER * len(name)
            if lines[-1] and x + width > self.width:
                lines.append([])
                x = start
            lines[-1].append((x, name))
            x += width + _GAP
        return lines

    def _legend(
        self,
        lines: Sequence[Sequence[tuple[float, str]]],
        colour: dict[str, str],
        box: tuple[int, int, int, int],
    ) -> list[str]:
        out = []
        for number, line in enumerate(lines, 1):
            y = box[1] - 10 - _LINE * (len(lines) - number)
            out += [
                f'<rect x="{x:.0f}" y="{y - 8}" width="12" height="4" fill="{colour[name]}"/>'
                f'<text x="{x + _MARK:.0f}" y="{y}">{escape(name)}</text>'
                for x, name in line
            ]
        return out


def stacked(charts: Sequence[Chart]) -> str:
    """Charts below each other, in one SVG element.

    Raises:
        ConfigError: there is none, or one cannot be drawn.
    """
    require(bool(charts), "stacked charts", 0, expected="at least one")
    width, height = max(c.width for c in charts), sum(c.height for c in charts)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="group">'
    ]
    y = 0
    for chart in charts:
        out.append(f'<g transform="translate(0 {y})">\n{chart.render()}</g>')
        y += chart.height
    return "\n".join([*out, "</svg>", ""])


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], log: bool) -> _Axis:
        low, high = min(values), max(values)
        if log:
            ticks = _log_ticks(low, high)
            span = math.log(high / low) or 1.0
            return cls(low * math.exp(-0.03 * span), high * math.exp(0.03 * span), True, ticks)
        if low == high:
            pad = abs(low) / 2 or 1.0
            low, high = low - pad, high + pad
        pad = 0.03 * (high - low)
        ticks = _ticks(low, high)
        return cls(low - pad, high + pad, False, ticks)

    def share(self, value: float) -> float:
        """Place of ``value`` between the ends, 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def _ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers, four to nine of them."""
    rough = (high - low) / 5
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * k for k in (1, 2, 2.5, 5, 10) if size * k >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(i * step for i in range(first, last + 1))


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = high / low
    steps: tuple[float, ...] = (1,) if span > 1e3 else (1, 2, 5)
    if span < 4:
        ticks = _ticks(low, high) if high > low else (low,)
        return tuple(t for t in ticks if t > 0)
    marks = [m * 10.0**d for d, m in itertools.product(decades, steps)]
    return tuple(m for m in marks if low * 0.999 <= m <= high * 1.001)


def _number(value: float) -> str:
    size = abs(value)
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}"

"""Rows of coloured boxes as SVG text: heat maps, and spans of time.

The pictures have ink, title and description as those of :mod:`shoal.core.svg`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from shoal.core.errors import require
from shoal.core.svg import COLOURS

_TOP, _LEFT, _ROW, _GAP = 34, 96, 24, 3
# Rows beyond these are not drawn, and that is stated.
_MOST = 256


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """Rows and columns of numbers, dark where one is large in its column.

    Args:
        title: heading, also for screen readers.
        description: what the picture shows, in a sentence, for screen readers.
        rows: their names, from top to bottom.
        columns: their names.
        values: a number for each row and column; one that is not finite is left out.
        unit: of the numbers.
    """

    title: str
    description: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float]]
    unit: str = "s"

    def render(self) -> str:
        """The SVG element as text.

        Raises:
            ConfigError: there is nothing to draw, or values do not fit the names.
        """
        require(
            bool(self.rows and self.columns),
            f"heat map {self.title!r}",
            "nothing",
            expected="at least one row and one column",
        )
        sizes = {len(row) for row in self.values}
        require(
            len(self.values) == len(self.rows) and sizes == {len(self.columns)},
            f"heat map {self.title!r}",
            f"{len(self.values)} rows of {sorted(sizes)} values",
            expected=f"{len(self.rows)} rows of {len(self.columns)}",
        )
        cell = 84
        shown = self.rows[:_MOST]
        width = _LEFT + cell * len(self.columns) + 16
        height = _TOP + 20 + _ROW * len(shown) + 14
        out = _head(width, height, self.title, self.description)
        for number, name in enumerate(self.columns):
            x = _LEFT + cell * number + cell / 2
            out.append(
                f'<text x="{x:.0f}" y="{_TOP + 12}" text-anchor="middle">{escape(name)}</text>'
            )
        most = [
            max((row[n] for row in self.values if math.isfinite(row[n])), default=0.0)
            for n in range(len(self.columns))
        ]
        for line, name in enumerate(shown):
            y = _TOP + 20 + _ROW * line
            out.append(_name(name, y))
            for number, value in enumerate(self.values[line]):
                if not math.isfinite(value):
                    continue
                share = value / most[number] if most[number] > 0 else 0.0
                x = _LEFT + cell * number
                # Light to dark of one hue: readable without distinguishing colours.
                ink = "#fff" if share > 0.6 else "#111"
                out.append(
                    f'<rect x="{x + 1}" y="{y + 1}" width="{cell - 2}" height="{_ROW - 2}" '
                    f'fill="hsl(16 80% {96 - 55 * share:.0f}%)"/>'
                    f'<text x="{x + cell / 2:.0f}" y="{y + 16}" text-anchor="middle" '
                    f'fill="{ink}">{_spell(value, self.unit)}</text>'
                )
        return _joined(out, len(self.rows) - len(shown))


class Bar(NamedTuple):
    """A box in a row.

    Args:
        kind: which colour, and what the legend calls it.
        begin: left edge.
        end: right edge.
    """

    kind: str
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True)
class BarChart:
    """Rows of bars on one axis from 0 on, such as what ranks did when.

    Args:
        title: heading, also for screen readers.
        description: what the picture shows, in a sentence, for screen readers.
        rows: name and bars, from top to bottom.
        unit: of the axis.
        width: of the picture, px.
    """

    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Bar]]]
    unit: str = "s"
    width: int = 720

    def render(self) -> str:
        """The SVG element as text.

        Raises:
            ConfigError: there is nothing to draw.
        """
        shown = self.rows[:_MOST]
        kinds = list(dict.fromkeys(bar.kind for _, bars in self.rows for bar in bars))
        require(bool(kinds), f"bars {self.title!r}", "no bar", expected="at least one")
        colours = {kind: COLOURS[n % len(COLOURS)] for n, kind in enumerate(kinds)}
        whole = max((bar.end for _, bars in self.rows for bar in bars), default=0.0) or 1.0
        space = self.width - _LEFT - 16
        height = _TOP + 24 + _ROW * len(shown) + 30
        out = _head(self.width, height, self.title, self.description)
        x = float(_LEFT)
        for kind in kinds:
            out.append(
                f'<rect x="{x:.0f}" y="{_TOP + 2}" width="12" height="10" fill="{colours[kind]}"/>'
                f'<text x="{x + 16:.0f}" y="{_TOP + 12}">{escape(kind)}</text>'
            )
            x += 34 + 6.6 * len(kind)
        for line, (name, bars) in enumerate(shown):
            y = _TOP + 24 + _ROW * line
            out.append(_name(name, y))
            # Of bars that overlap, the later one is lower, so both are seen.
            for number, bar in enumerate(bars):
                left = _LEFT + bar.begin / whole * space
                size = max(0.5, (bar.end - bar.begin) / whole * space)
                drop = _GAP * (number % 2)
                text = f"{bar.kind} {_spell(bar.end - bar.begin, self.unit)}"
                out.append(
                    f'<rect x="{left:.1f}" y="{y + 2 + drop}" width="{size:.1f}" '
                    f'height="{_ROW - 4 - _GAP}" fill="{colours[bar.kind]}">'
                    f"<title>{escape(text)}</title></rect>"
                )
        y = _TOP + 24 + _ROW * len(shown)
        for share in (0.0, 0.5, 1.0):
            anchor = ("start", "middle", "end")[round(2 * share)]
            out.append(
                f'<text x="{_LEFT + share * space:.0f}" y="{y + 16}" text-anchor="{anchor}">'
                f"{_spell(share * whole, self.unit)}</text>"
            )
        out.append(
            f'<path d="M{_LEFT} {_TOP + 24}V{y}H{_LEFT + space}" fill="none" '
            'stroke="currentColor"/>'
        )
        return _joined(out, len(self.rows) - len(shown))


def _head(width: int, height: int, title: str, description: str) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f'<text x="{width / 2:.0f}" y="18" text-anchor="middle" font-weight="600">'
        f"{escape(title)}</text>",
    ]


def _name(name: str, y: float) -> str:
    return f'<text x="{_LEFT - 8}" y="{y + 16:.0f}" text-anchor="end">{escape(name)}</text>'


def _joined(out: list[str], left_out: int) -> str:
    notes = [f"<desc>{left_out} more rows are not drawn</desc>"] if left_out else []
    return "\n".join([*out, *notes, "</svg>", ""])


def _spell(value: float, unit: str) -> str:
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.4g} {unit}"

"""Stacked bars as SVG text: what several wholes consist of, beside each other.

Ink comes from ``currentColor``, as in :mod:`shoal.core.svg`; title and description are for
screen readers, and every piece says its own number when pointed at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape

from shoal.core.errors import require
from shoal.core.svg import COLOURS

_RIGHT, _BAR, _GAP, _LETTER = 90, 20, 10, 7.2
# More than a chart's lines need; the last two differ in lightness.
_COLOURS = (*COLOURS, "#6B6B6B", "#F0E442")


@dataclass(frozen=True)
class StackedBars:
    """Horizontal bars, one a row, each a stack of named parts.

    Args:
        title: heading, also for screen readers.
        rows: name of a bar -> part -> its value; a part has one colour in all bars.
        show: a value as text, with its unit.
        limit: a line across all bars, such as the memory there is.
        limit_name: what that line is.
        width: of the picture, in px.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]
    show: Callable[[float], str]
    limit: float | None = None
    limit_name: str = "limit"
    width: int = 960

    def render(self) -> str:
        """The SVG element as text.

        Raises:
            ConfigError: there is no bar, or a value is negative or not finite.
        """
        require(bool(self.rows), f"bars {self.title!r}", 0, expected="at least one bar")
        for name, parts in self.rows.items():
            for part, value in parts.items():
                require(
                    math.isfinite(value) and value >= 0,
                    f"bars {self.title!r}.{name}.{part}",
                    value,
                    expected="a finite number, 0 or more",
                )
        names = list(dict.fromkeys(part for parts in self.rows.values() for part in parts))
        colours = {part: _COLOURS[i % len(_COLOURS)] for i, part in enumerate(names)}
        longest = max((sum(parts.values()) for parts in self.rows.values()), default=0.0)
        left = _LETTER * max(map(len, self.rows)) + 12
        scale = (self.width - left - _RIGHT) / (max(longest, self.limit or 0.0) or 1.0)
        line = None if self.limit is None else left + self.limit * scale
        legend, y = self._legend(names, colours)
        top, body = y, []
        for name, parts in self.rows.items():
            body += self._bar(name, parts, colours, scale, (left, y), line)
            y += _BAR + _GAP
        if self.limit is not None and line is not None:
            text = f"{self.limit_name}: {self.show(self.limit)}"
            anchor = "end" if line > self.width / 2 else "start"
            body.append(
                f'<line x1="{line:.1f}" y1="{top - 6}" x2="{line:.1f}" y2="{y}" '
                f'stroke="currentColor" stroke-dasharray="4 3"/>'
                f'<text x="{line:.1f}" y="{y + 14}" '
                f'text-anchor="{anchor}">{escape(text)}</text>'
            )
            y += 20
        result = "; ".join(
            f"{name}: {self.show(sum(parts.values()))}" for name, parts in self.rows.items()
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {y + 6}" '
                f'width="{self.width}" height="{y + 6}" role="img" '
                'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(result)}</desc>",
                f'<text x="0" y="16" font-weight="600" font-size="14">{escape(self.title)}</text>',
                *legend,
                *body,
                "</svg>",
                "",
            ]
        )

    def _legend(self, names: list[str], colours: Mapping[str, str]) -> tuple[list[str], int]:
        """The names with their colours, on as many lines as they need; and where they end."""
        out, x, y = [], 0.0, 38
        for name in names:
            wide = 16 + _LETTER * len(name) + 14
            if x and x + wide > self.width:
                x, y = 0.0, y + 18
            out.append(
                f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" fill="{colours[name]}"/>'
                f'<text x="{x + 16:.1f}" y="{y}">{escape(name)}</text>'
            )
            x += wide
        return out, y + 18

    def _bar(
        self,
        name: str,
        parts: Mapping[str, float],
        colours: Mapping[str, str],
        scale: float,
        corner: tuple[float, int],
        line: float | None,
    ) -> list[str]:
        x, y = corner
        middle = y + _BAR - 6
        out = [f'<text x="{x - 8:.1f}" y="{middle}" text-anchor="end">{escape(name)}</text>']
        for part, value in parts.items():
            wide = value * scale
            if wide > 0:
                result = escape(f"{part}: {self.show(value)}")
                out.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" '
                    f'fill="{colours[part]}"><title>{result}</title></rect>'
                )
            x += wide
        whole = self.show(sum(parts.values()))
        if line is not None and x < line < x + 12 + _LETTER * len(whole):
            x = line  # not across the limit
        return [*out, f'<text x="{x + 6:.1f}" y="{middle}">{escape(whole)}</text>']

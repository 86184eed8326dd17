"""Timelines of a pipeline as pictures: SVG, and one HTML page that needs no other file.

A row is a rank, a box a pass: its colour says the kind, its shade the stage on the rank, its number
the micro-batch. Two timelines, such as predicted and measured, stand above each other on one scale
of time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.web import WebSite
from shoal.cost.pipeline.simulator import Timeline
from shoal.ir.schedule import KINDS

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "EF": "embedding",
    "EB": "gradient of the embedding",
    "S": "output layer, S",
    "T": "output layer, T",
}
# Distinguishable by the colour-blind (Okabe and Ito, 2008).
_COLOURS = {
    "F": "#0072B2",
    "B": "#D55E00",
    "I": "#E69F00",
    "W": "#009E73",
    "EF": "#7A3E9D",
    "EB": "#CC79A7",
    "S": "#F0E442",
    "T": "#8C8C8C",
}
# A browser still scrolls a picture of so many boxes without effort.
MOST_BOXES = 20_000
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_LEFT, _RIGHT, _DIGIT = 58, 12, 6.4
# Ink and paper of a picture that stands alone; on a page it takes the page's.
_ALONE = (
    "<style>svg{color:#1b2130;background:#ffffff}"
    "@media(prefers-color-scheme:dark){svg{color:#e7eaf2;background:#0f1219}}</style>"
)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One or two timelines as an SVG drawing, which a page's ``draw`` takes too.

    Args:
        title: heading, also for screen readers.
        timelines: heading -> timeline, from top to bottom.
        unit: of time; "s" is shown as s, ms or µs, whichever is near.
        width: of the picture, in px.
    """

    title: str
    timelines: Mapping[str, Timeline]
    unit: str = "s"
    width: int = 1100

    def render(self) -> str:
        """The SVG element as text.

        Raises:
            PlanError: there is no pass, or there are too many to draw.
        """
        return self._render("")

    def render_alone(self) -> str:
        """The same as a file of its own, light or dark as the reader's system is."""
        return self._render(_ALONE)

    def _render(self, style: str) -> str:
        number = sum(map(len, self.timelines.values()))
        require(
            0 < number <= MOST_BOXES,
            f"picture of {self.title}",
            f"{number} passes",
            expected=f"1 to {MOST_BOXES}; draw fewer ranks or micro-batches, or write a trace "
            "for Perfetto, which shows millions",
            error=PlanError,
        )
        body, y = [], 58.0
        for name, timeline in self.timelines.items():
            rows, y = self._panel(name, timeline, y)
            body += rows
        height = y + 34
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height:.0f}" '
                f'width="{self.width}" height="{height:.0f}" role="img" '
                'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
                f"<title>{escape(self.title)}</title>",
                f"<desc>{escape(self._describe())}</desc>{style}",
                f'<text x="{_LEFT}" y="18" font-weight="600" font-size="14">'
                f"{escape(self.title)}</text>",
                *self._legend(),
                *body,
                *self._axis(y),
                "</svg>",
                "",
            ]
        )

    @cached_property
    def _span(self) -> float:
        return max(timeline.makespan for timeline in self.timelines.values()) or 1.0

    @cached_property
    def _unit(self) -> tuple[float, str]:
        if self.unit != "s":
            return 1.0, self.unit
        return next((pair for pair in _UNITS if self._span >= pair[0]), _UNITS[-1])

    def _x(self, moment: float) -> float:
        return _LEFT + moment / self._span * (self.width - _LEFT - _RIGHT)

    def _time(self, seconds: float) -> str:
        size, unit = self._unit
        return f"{seconds / size:.4g} {unit}".rstrip()

    def _describe(self) -> str:
        return "; ".join(
            f"{name}: {timeline.ranks} ranks, {self._time(timeline.makespan)}, "
            f"bubble {100 * timeline.bubble:.1f} % of the work"
            for name, timeline in self.timelines.items()
        )

    def _panel(self, name: str, timeline: Timeline, top: float) -> tuple[list[str], float]:
        """The rows of one timeline, and where they end."""
        pitch = 24 if timeline.ranks <= 16 else 13 if timeline.ranks <= 64 else 5
        tall = pitch - (3 if pitch > 5 else 1)
        text = f"{name}: {self._time(timeline.makespan)}, bubble {100 * timeline.bubble:.1f} %"
        out = [f'<text x="{_LEFT}" y="{top + 10:.0f}" font-weight="600">{escape(text)}</text>']
        top += 18
        end = self._x(timeline.makespan)
        every = 1 if pitch > 5 else 16
        for rank in range(timeline.ranks):
            y = top + rank * pitch
            out.append(
                f'<rect x="{_LEFT}" y="{y:.1f}" width="{end - _LEFT:.2f}" height="{tall}" '
                'fill-opacity="0.07"/>'
            )
            if rank % every == 0:
                out.append(
                    f'<text x="{_LEFT - 6}" y="{y + tall / 2 + 4:.1f}" text-anchor="end">'
                    f"rank {rank}</text>"
                )
        shades = _shades(timeline)
        for rank, op, start, stop in timeline.events():
            x, wide = self._x(start), self._x(stop) - self._x(start)
            y = top + rank * pitch
            chunk, chunks = shades.get((rank, op.stage), (0, 1)) if op.kind in "FBIW" else (0, 1)
            colour = _mixed(_COLOURS[op.kind], 0.5 * chunk / max(1, chunks - 1))
            where = "shard" if op.kind not in "FBIW" else "stage"
            tip = (
                f"rank {rank}: {KIND_NAMES[op.kind]}, {where} {op.stage}, micro-batch {op.mb}, "
                f"{self._time(start)} to {self._time(stop)}"
            )
            out.append(
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(wide, 0.4):.2f}" height="{tall}" '
                f'fill="{colour}" stroke="currentColor" stroke-opacity="0.35" '
                f'stroke-width="0.5"><title>{escape(tip)}</title></rect>'
            )
            if tall >= 10 and wide >= _DIGIT * len(str(op.mb)) + 3:
                out.append(
                    f'<text x="{x + wide / 2:.2f}" y="{y + tall / 2 + 3.6:.1f}" font-size="10" '
                    f'text-anchor="middle" pointer-events="none" fill="{_ink(colour)}">'
                    f"{op.mb}</text>"
                )
        return out, top + timeline.ranks * pitch + 14

    def _legend(self) -> list[str]:
        present = {code for t in self.timelines.values() for code in np.unique(t.kind).tolist()}
        out, x, y = [], float(_LEFT), 34
        for code, kind in enumerate(KINDS):
            if code not in present:
                continue
            words = f"{kind} {KIND_NAMES[kind]}"
            if x + 18 + 6.2 * len(words) > self.width - _RIGHT:
                x, y = float(_LEFT), y + 16
            out.append(
                f'<rect x="{x:.0f}" y="{y - 9}" width="12" height="11" fill="{_COLOURS[kind]}" '
                'stroke="currentColor" stroke-opacity="0.35" stroke-width="0.5"/>'
                f'<text x="{x + 16:.0f}" y="{y}">{escape(words)}</text>'
            )
            x += 34 + 6.2 * len(words)
        return out

    def _axis(self, y: float) -> list[str]:
        size, unit = self._unit
        rough = self._span / size / 8
        scale = 10.0 ** np.floor(np.log10(rough))
        step = next(scale * k for k in (1, 2, 2.5, 5, 10) if scale * k >= rough)
        out = [
            f'<path d="M{_LEFT} {y:.1f}H{self.width - _RIGHT}" stroke="currentColor" '
            'stroke-opacity="0.5"/>'
        ]
        for tick in range(int(self._span / size / step + 1e-9) + 1):
            x = self._x(tick * step * size)
            out.append(
                f'<path d="M{x:.1f} {y:.1f}v4" stroke="currentColor"/>'
                f'<text x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle">{tick * step:.4g}</text>'
            )
        label = f"time in {unit}" if unit else "time"
        out.append(
            f'<text x="{self.width - _RIGHT}" y="{y + 31:.1f}" text-anchor="end">'
            f"{escape(label)}</text>"
        )
        return out


def svg(timelines: Mapping[str, Timeline], *, title: str, unit: str = "s") -> str:
    """The picture as an SVG file; see :class:`Picture`."""
    return Picture(title=title, timelines=timelines, unit=unit).render_alone()


def page(timelines: Mapping[str, Timeline], *, title: str, unit: str = "s") -> str:
    """The picture and its numbers as one HTML page without links to other files.

    Raises:
        PlanError: there is no pass, or there are too many to draw.
    """
    rows = [
        {
            "name": name,
            "rank": rank,
            "busy": timeline.busy[rank],
            "idle": timeline.makespan - timeline.busy[rank],
            "passes": int(np.count_nonzero(timeline.rank == rank)),
        }
        for name, timeline in timelines.items()
        for rank in range(timeline.ranks)
    ]
    return WebSite("shoal.cost").render_alone(
        "pipeline.html",
        title=title,
        picture=Picture(title=title, timelines=timelines, unit=unit),
        timelines=timelines,
        rows=rows,
        unit=unit,
    )


def _shades(timeline: Timeline) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, stage) -> the stage's place among those of the rank, and their number."""
    of_stage = np.isin(timeline.kind, [KINDS.index(kind) for kind in ("F", "B", "I", "W")])
    pairs = np.unique(np.stack([timeline.rank, timeline.stage])[:, of_stage], axis=1).T.tolist()
    stages: dict[int, list[int]] = {}
    for rank, stage in pairs:
        stages.setdefault(rank, []).append(stage)
    return {
        (rank, stage): (place, len(mine))
        for rank, mine in stages.items()
        for place, stage in enumerate(mine)
    }


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _mixed(colour: str, white: float) -> str:
    """``colour`` with a share of white."""
    return "#" + "".join(f"{round(c + (255 - c) * white):02X}" for c in _channels(colour))


def _ink(colour: str) -> str:
    """Black or white, whichever is easier to read on ``colour``."""
    linear = [((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (light + 0.05) ** 2 > 1.05 * 0.05 else "#FFFFFF"

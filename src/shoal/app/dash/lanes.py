"""Lanes over time as SVG text: places of a run, and what its ranks did.

Colours come from the style sheet by class, so that they differ on light and dark pages; every
kind has its own height or pattern, too. However long the time, a lane has at most as many
pieces as it has pixels.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from shoal.core.tables import cut
from shoal.core.web.site import seconds

_WIDTH, _LEFT, _RIGHT = 1120, 150, 14
_SPACE = _WIDTH - _LEFT - _RIGHT
# Pieces nearer than this many pixels are drawn as one.
_NEAR = 0.8
_MARKS = 12


class LaneSpan(NamedTuple):
    """A stretch of time of a rank; kind is compute, phase, flight, wait or stuck. Times in ns."""

    kind: str
    begin: int
    end: int
    text: str


class LaneStay(NamedTuple):
    """A start on one place, in wall-clock seconds; bad where the fault was named there."""

    place: int
    begin: float
    end: float
    text: str
    bad: bool = False


@dataclass(frozen=True)
class Lanes:
    """What ranks did between two times, a lane each.

    Args:
        title: for screen readers.
        begin: left edge, ns.
        end: right edge, ns.
        lanes: rank -> what it did.
        marks: rank -> what was named about it.
        steps: when steps began, with their names.
        last: the right edge is where the records end.
    """

    title: str
    begin: int
    end: int
    lanes: Mapping[int, Sequence[LaneSpan]]
    marks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    steps: Sequence[tuple[int, str]] = ()
    last: bool = False

    def render(self) -> str:
        """The SVG element as text."""
        lane, top = 40, 30
        height = top + lane * len(self.lanes) + 30
        text = f"{len(self.lanes)} lanes, {seconds((self.end - self.begin) / 1e9)} wide. "
        text += "; ".join(f"rank {rank}: {', '.join(words)}" for rank, words in self.marks.items())
        parts = [_head(height, "timeline-ranks", self.title, text), _HATCH]
        parts += self._grid(top, height - 30)
        for number, (rank, spans) in enumerate(self.lanes.items()):
            parts.append(self._lane(rank, spans, top + lane * number))
        parts.append(self._axis(height - 30))
        return "".join(parts) + "</svg>"

    def _x(self, at: float) -> float:
        share = (at - self.begin) / (self.end - self.begin)
        return _LEFT + _SPACE * min(1.0, max(0.0, share))

    def _grid(self, top: int, bottom: int) -> list[str]:
        parts, free = [], 0.0
        for at, text in self.steps:
            x = self._x(at)
            parts.append(f'<path class="tl-step" d="M{x:.1f} {top - 8}V{bottom}"/>')
            room = _WIDTH - 110 if self.last else _WIDTH
            if x >= free and x + 7.5 * len(text) < room:
                parts.append(f'<text class="tl-note" x="{x + 3:.1f}" y="16">{escape(text)}</text>')
                free = x + 7.5 * len(text) + 10
        return parts

    def _lane(self, rank: int, spans: Sequence[LaneSpan], y: int) -> str:
        words = self.marks.get(rank, ())
        parts = [f'<path class="tl-line" d="M0 {y + 39.5}H{_WIDTH}"/>']
        if words:
            parts.append(f'<rect class="tl-named" x="0" y="{y}" width="{_WIDTH}" height="39"/>')
            short = cut(words[0], 22)
            parts.append(
                f'<text class="tl-fault" x="8" y="{y + 32}">◆ {escape(short)}'
                f"<title>{escape('; '.join(words))}</title></text>"
            )
        parts.append(
            f'<text class="tl-name" x="8" y="{y + (17 if words else 24)}">rank {rank}</text>'
        )
        # (top, height) of each kind; later kinds lie over earlier ones.
        boxes = {
            "compute": (8, 18),
            "phase": (8, 18),
            "wait": (12, 14),
            "stuck": (8, 18),
            "flight": (29, 5),
        }
        for kind, (down, high) in boxes.items():
            for left, right, text in self._merged([span for span in spans if span.kind == kind]):
                width = max(right - left, 0.6)
                title = f"<title>{escape(text)}</title>" if width >= 2 else ""
                box = f'x="{left:.1f}" y="{y + down}" width="{width:.1f}" height="{high}"'
                parts.append(f'<rect class="tl-{kind}" {box}>{title}</rect>')
                if kind == "stuck":
                    parts.append(f'<rect class="tl-over" fill="url(#timeline-ranks-hatch)" {box}/>')
        return "".join(parts)

    def _merged(self, spans: Sequence[LaneSpan]) -> list[tuple[float, float, str]]:
        """Pieces of a lane in px, near ones joined; a piece names its longest."""
        results: list[tuple[float, float, str]] = []
        longest, count = 0, 0
        for span in sorted(spans, key=lambda one: one.begin):
            left, right = self._x(span.begin), self._x(span.end)
            length = span.end - span.begin
            text = f"{span.text}, {seconds(length / 1e9)}"
            if results and left - results[-1][1] < _NEAR and right - left < 40:
                start, stop, said = results[-1]
                count += 1
                if length > longest:
                    longest, said = length, text
                said = said.partition(" (and ")[0] + f" (and {count} more)"
                results[-1] = (start, max(stop, right), said)
            else:
                longest, count = length, 0
                results.append((left, right, text))
        return results

    def _axis(self, y: int) -> str:
        parts = []
        whole = (self.end - self.begin) / 1e9
        for tick in _ticks(whole):
            x = self._x(self.begin + tick * 1e9)
            anchor = ' text-anchor="middle"' if _LEFT < x < _WIDTH - 40 else ""
            if x > _WIDTH - 40:
                anchor = ' text-anchor="end"'
            parts.append(f'<path class="tl-tick" d="M{x:.1f} {y}v5"/>')
            parts.append(
                f'<text class="tl-note" x="{x:.1f}" y="{y + 19}"{anchor}>'
                f"{_elapsed(tick, whole)}</text>"
            )
        if self.last:
            parts.append(
                f'<path class="tl-end" d="M{_WIDTH - _RIGHT} 22V{y}"/>'
                f'<text class="tl-note" x="{_WIDTH - _RIGHT}" y="16" text-anchor="end">'
                "the records end</text>"
            )
        return "".join(parts)


@dataclass(frozen=True)
class PlaceHistory:
    """Which start ran on which place and when, in wall-clock seconds.

    Args:
        stays: a start on a place each.
        excluded: place -> when it was excluded, and why.
        marks: when starts ended by a fault, with what was named.
        live: the run goes on.
    """

    stays: Sequence[LaneStay]
    excluded: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    marks: Sequence[tuple[float, str]] = ()
    live: bool = False

    def render(self) -> str:
        """The SVG element as text."""
        every = sorted({stay.place for stay in self.stays})
        # Where there are many, those with a story come first, then as many as can be read.
        shown = sorted(sorted(every, key=lambda place: (place not in self.excluded, place))[:32])
        begin = min((stay.begin for stay in self.stays), default=0.0)
        end = max((stay.end for stay in self.stays), default=0.0)
        whole = max(end - begin, 1e-3)

        def x(at: float) -> float:
            return _LEFT + _SPACE * min(1.0, max(0.0, (at - begin) / whole))

        lane, top = 28, 34
        bottom = top + lane * len(shown)
        gone = [f"place {place} excluded: {why}" for place, (_, why) in self.excluded.items()]
        said = f"{len(every)} places over {seconds(whole)}. {'; '.join(gone)}"
        parts = [_head(bottom + 30, "timeline-places", "Starts on their places", said)]
        lanes = {place: top + lane * number for number, place in enumerate(shown)}
        for place, y in lanes.items():
            parts.append(f'<path class="tl-line" d="M0 {y + 27.5}H{_WIDTH}"/>')
            parts.append(f'<text class="tl-name" x="8" y="{y + 18}">place {place}</text>')
        for stay in self.stays:
            if stay.place not in lanes:
                continue
            y, one, two = lanes[stay.place], x(stay.begin), x(stay.end)
            kind = "tl-stay tl-stay-bad" if stay.bad else "tl-stay"
            parts.append(
                f'<rect class="{kind}" x="{one:.1f}" y="{y + 6}" rx="3" '
                f'width="{max(two - one - 1.5, 1.5):.1f}" height="16">'
                f"<title>{escape(stay.text)}, {seconds(stay.end - stay.begin)}</title></rect>"
            )
        for place, (at, why) in self.excluded.items():
            if place not in lanes:
                continue
            y, one = lanes[place], x(at)
            text = f"✕ {why}: excluded"
            size = 7.2 * len(text) + 12
            near = one > _WIDTH - _RIGHT - size
            anchor = "end" if near else "start"
            # The dashes begin behind the words.
            line = one if near else one + size
            parts.append(f'<path class="tl-out" d="M{line:.1f} {y + 14}H{_WIDTH - _RIGHT}"/>')
            parts.append(
                f'<text class="tl-fault" x="{one - 8 if near else one + 6:.1f}" y="{y + 18}" '
                f'text-anchor="{anchor}">{escape(text)}</text>'
            )
        free = 0.0
        for at, text in self.marks[-_MARKS:]:
            one = x(at)
            parts.append(f'<path class="tl-end" d="M{one:.1f} 22V{bottom}"/>')
            size = 8.0 * (len(text) + 2)
            start = min(one - 5, _WIDTH - size)
            if start >= free:
                parts.append(
                    f'<text class="tl-fault" x="{start:.1f}" y="16">◆ {escape(text)}</text>'
                )
                free = start + size + 8
        for at, text, anchor in _clocks(begin, whole):
            parts.append(
                f'<text class="tl-note" x="{x(at):.1f}" y="{bottom + 20}" '
                f'text-anchor="{anchor}">{text}</text>'
            )
        if len(every) > len(shown):
            parts.append(
                f'<text class="tl-note" x="8" y="{bottom + 20}">{len(every) - len(shown)} more'
                "</text>"
            )
        return "".join(parts) + "</svg>"


_HATCH = (
    '<defs><pattern id="timeline-ranks-hatch" width="6" height="6" '
    'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="tl-hatch" d="M0 0V6"/></pattern></defs>'
)


def _ticks(whole: float) -> list[float]:
    """Round numbers from 0 to ``whole``, some eight of them."""
    rough = whole / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough)
    return [step * number for number in range(int(whole / step) + 1)]


def _elapsed(tick: float, whole: float) -> str:
    """A mark of a time that begins at 0; marks of one axis differ."""
    if not tick:
        return "0"
    if whole < 90:
        return seconds(tick)
    if whole < 5400:
        return f"{int(tick) // 60}:{int(tick) % 60:02d} min"
    return f"{int(tick) // 3600}:{int(tick) // 60 % 60:02d} h"


def _clocks(begin: float, whole: float) -> list[tuple[float, str, str]]:
    """(time, words, anchor) of five marks of the wall clock that differ from each other."""
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = begin + share * whole
        there = time.localtime(at)
        if whole > 86400:
            text = time.strftime("%m-%d %H:%M", there)
        elif share and whole < 20:  # as clocks they would be the same
            text = f"+{seconds(share * whole)}"
        else:
            text = time.strftime("%H:%M:%S", there)
        marks.append((at, text, {0.0: "start", 1.0: "end"}.get(share, "middle")))
    return marks


def _head(height: int, name: str, title: str, notes: str) -> str:
    return (
        f'<svg class="timeline" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-t {name}-d" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(notes)}</desc>'
    )

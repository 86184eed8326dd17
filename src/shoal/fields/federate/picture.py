"""Pictures of a run: who worked when, and how accuracy came with time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from shoal.core.svg import COLOURS, Chart, Series

# Clients and jobs that a picture shows, and its measures in px.
_CLIENTS, _JOBS = 40, 400
_LEFT, _TOP, _ROW, _BAR, _WIDTH = 70, 64, 22, 14, 960


@dataclass(kw_only=True)
class Span:
    """A job from its assignment to the aggregation of its update.

    Args:
        client: that works.
        number: of the job.
        steps: local ones.
        begun: s.
        arrived: s; None if its update has not.
        used: when it was aggregated, s; None if it was not.
        version: that it made.
        late: the client began another job before this one's update was used.
    """

    client: str
    number: int
    steps: int
    begun: float
    arrived: float | None = None
    used: float | None = None
    version: int = 0
    late: bool = False


@dataclass
class FederationTimeline:
    """The jobs of a run.

    Args:
        spans: by number.
        versions: when each version of the model was made, s.
    """

    spans: dict[int, Span] = field(default_factory=dict)
    versions: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> FederationTimeline:
        """From the events of a run; those that a resumed run did again count once."""
        made, last = cls(), {}
        for event in events:
            kind = event["kind"]
            if kind == "resume":
                made._forget_after(event["now"])
                last = {span.client: span for span in made.spans.values()}
            elif kind == "assign":
                span = Span(
                    client=event["client"], number=event["number"], steps=event["steps"],
                    begun=event["now"],
                )  # fmt: skip
                before = last.get(span.client)
                if before is not None and before.arrived is not None and before.used is None:
                    before.late = True
                made.spans[span.number] = last[span.client] = span
            elif kind == "arrive":
                made.spans[event["number"]].arrived = event["now"]
            elif kind == "aggregate":
                made.versions.append(event["now"])
                for number in event["numbers"]:
                    made.spans[number].used = event["now"]
                    made.spans[number].version = event["version"]
        return made

    def _forget_after(self, now: float) -> None:
        self.versions = [at for at in self.versions if at <= now]
        self.spans = {number: one for number, one in self.spans.items() if one.begun <= now}
        for span in self.spans.values():
            if span.arrived is not None and span.arrived > now:
                span.arrived = None
            if span.used is not None and span.used > now:
                span.used, span.version, span.late = None, 0, False

    def render(self, names: Sequence[str], title: str) -> str:
        """The first jobs of the first clients as SVG."""
        shown = list(names[:_CLIENTS])
        spans = [one for one in self.spans.values() if one.client in shown][:_JOBS]
        ends = [max(filter(None, (one.begun, one.arrived, one.used))) if one.begun or one.arrived
                else 0.0 for one in spans]  # fmt: skip
        end = max(ends, default=0.0) or 1.0
        scale = (_WIDTH - _LEFT - 12) / end
        height = _TOP + _ROW * len(shown) + 40

        def px(at: float) -> float:
            return _LEFT + at * scale

        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            f"<title>{escape(title)}</title>",
            f"<desc>{len(spans)} jobs of {len(shown)} clients in {end:.3g} s; "
            f"{sum(one.late for one in spans)} updates came late</desc>",
            f'<text x="0" y="16" font-weight="600" font-size="14">{escape(title)}</text>',
            '<text x="0" y="36">Bars: jobs, one colour for each aggregation, with their local '
            "steps. Thin lines: waiting for the group. Circles: late. Upright lines: a new "
            "model.</text>",
        ]
        bottom = _TOP + _ROW * len(shown)
        out += [
            f'<line x1="{px(at):.1f}" y1="{_TOP - 6}" x2="{px(at):.1f}" y2="{bottom}" '
            'stroke="currentColor" stroke-width="0.6" stroke-opacity="0.5"/>'
            for at in self.versions
            if at <= end
        ]
        for row, name in enumerate(shown):
            y = _TOP + _ROW * row + _BAR - 3
            out.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
        for one in spans:
            out += _bar(one, px, _TOP + _ROW * shown.index(one.client), end)
        for tick in range(5):
            at = end * tick / 4
            out.append(
                f'<text x="{px(at):.1f}" y="{bottom + 18}" text-anchor="middle">{at:.3g} s</text>'
            )
        return "\n".join([*out, "</svg>", ""])


def _bar(one: Span, px: Any, y: int, end: float) -> list[str]:
    """The bar of a job, the line of its waiting, and the mark of one that is late."""
    arrived = end if one.arrived is None else one.arrived
    colour = COLOURS[one.version % len(COLOURS)] if one.used is not None else "#999999"
    wide = max(px(arrived) - px(one.begun) - 1, 0.8)
    words = f"{one.client}, job {one.number}: {one.steps} steps, {one.begun:.3f} to {arrived:.3f} s"
    out = [
        f'<rect x="{px(one.begun):.1f}" y="{y}" width="{wide:.1f}" height="{_BAR}" '
        f'fill="{colour}" fill-opacity="0.8"><title>{escape(words)}</title></rect>'
    ]
    if wide > 7.2 * len(str(one.steps)) + 4:
        out.append(
            f'<text x="{px(one.begun) + 3:.1f}" y="{y + _BAR - 3}" font-size="10">'
            f"{one.steps}</text>"
        )
    if one.used is not None and one.arrived is not None and not one.late:
        out.append(
            f'<line x1="{px(arrived):.1f}" y1="{y + _BAR / 2}" x2="{px(one.used):.1f}" '
            f'y2="{y + _BAR / 2}" stroke="{colour}" stroke-width="2"/>'
        )
    if one.late:
        out.append(
            f'<circle cx="{px(arrived):.1f}" cy="{y + _BAR / 2}" r="4" fill="none" '
            'stroke="currentColor" stroke-width="1.5"/>'
        )
    return out


def accuracy_chart(rows: Sequence[Mapping[str, float]], target: float | None, title: str) -> str:
    """Accuracy of the versions that were tested, against time, as SVG."""
    seconds = [row["seconds"] for row in rows]
    series = [Series("accuracy", seconds, [row["accuracy"] for row in rows], points=True)]
    if target is not None:
        series.append(Series("target", [0.0, max(seconds)], [target, target], dashed=True))
    return Chart(
        title=title, x_label="time, s", y_label="accuracy", series=series, cover_x=(0.0,)
    ).render()  # fmt: skip

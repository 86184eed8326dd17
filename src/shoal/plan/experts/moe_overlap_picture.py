"""One layer's three streams as bars over time: uncut, and in the chunks that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.core.svg import COLOURS
from shoal.cost.training.moe_tasks import MoePass
from shoal.plan.experts.moe_overlap import STREAMS, TASKS, PassChunks, choose, timeline

_LEFT, _WIDE, _ROW, _GAP, _TITLE = 110, 760, 22, 4, 26
_PANEL = _TITLE + len(STREAMS) * (_ROW + _GAP) + 10
# A number needs so many px.
_NUMBER = 12.0


def streams(forward: MoePass, backward: MoePass, slice_s: float = 0.0) -> str:
    """An SVG: forward and backward pass of a layer, uncut above, as chosen below.

    A row is a stream, a bar a task of a chunk, whose number it bears; all have one scale.
    """
    chosen = choose(forward), choose(backward, slice_s)
    uncut = (PassChunks(1, 0, 0.0, "", 1.0),) * 2
    panels = [_times(forward, backward, chunks, slice_s) for chunks in (uncut, chosen)]
    most = max(panel[-1] for panel in panels) or 1.0
    words = [
        f"{chunks[0].r} chunk{'s' if chunks[0].r > 1 else ''} forward, {chunks[1].r} backward: "
        f"{1e3 * panel[-1]:.3g} ms"
        for chunks, panel in zip((uncut, chosen), panels, strict=True)
    ]
    height = len(panels) * _PANEL + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDE + 20} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape('; '.join(words))}</title>",
        "<style>text{fill:#222}.n{fill:#fff;font-size:10px}@media (prefers-color-scheme: dark)"
        "{svg{background:#0f1219}text{fill:#eee}}</style>",
    ]
    for place, (chunks, title) in enumerate(zip((uncut, chosen), words, strict=True)):
        out += _panel(place * _PANEL, title, (forward, backward), chunks, slice_s, _WIDE / most)
    at = _LEFT
    for number, task in enumerate(TASKS if slice_s else TASKS[:-1]):
        out.append(
            f'<rect x="{at}" y="{height - 24}" width="12" height="12" rx="2" '
            f'fill="{COLOURS[number]}"/><text x="{at + 17}" y="{height - 14}">{task}</text>'
        )
        at += 105
    return "\n".join([*out, "</svg>"]) + "\n"


def _times(
    forward: MoePass, backward: MoePass, chunks: Sequence[PassChunks], slice_s: float
) -> tuple[float, float]:
    """When the forward and when the backward pass ends."""
    first = timeline(forward, chunks[0].r, ahead=chunks[0].ahead).makespan
    then = timeline(backward, chunks[1].r, slice_s, ahead=chunks[1].ahead).makespan
    return first, first + then


def _panel(
    top: int,
    title: str,
    both: tuple[MoePass, MoePass],
    chunks: Sequence[PassChunks],
    slice_s: float,
    scale: float,
) -> list[str]:
    out = [f'<text x="4" y="{top + 17}">{escape(title)}</text>']
    for row, name in enumerate(STREAMS):
        y = top + _TITLE + row * (_ROW + _GAP) + 15
        out.append(f'<text x="4" y="{y}">{escape(name)}</text>')
    start = 0.0
    for which, (pass_, cut) in enumerate(zip(both, chunks, strict=True)):
        result = timeline(pass_, cut.r, slice_s * which, ahead=cut.ahead)
        for event in result.events():
            width = scale * (event.end - event.start)
            if not width:
                continue
            x = _LEFT + scale * (start + event.start)
            y = top + _TITLE + event.rank * (_ROW + _GAP)
            task = TASKS[event.op.stage]
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(0.5, width - 0.5):.2f}" height="{_ROW}" '
                f'fill="{COLOURS[event.op.stage]}"><title>{task}, chunk {event.op.mb}: '
                f"{1e6 * (event.end - event.start):.0f} us</title></rect>"
            )
            if width > _NUMBER and task != "gradients":
                out.append(
                    f'<text class="n" x="{x + width / 2:.2f}" y="{y + 15}" '
                    f'text-anchor="middle">{event.op.mb}</text>'
                )
        start += result.makespan
        if not which:
            x = _LEFT + scale * start
            end = top + _TITLE + len(STREAMS) * (_ROW + _GAP)
            out.append(
                f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{top + _TITLE - 4}" y2="{end}" '
                'stroke="currentColor" stroke-dasharray="3 3"/>'
            )
    return out

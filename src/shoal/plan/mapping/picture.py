"""The map of a fast memory as a picture."""

from __future__ import annotations

from xml.sax.saxutils import escape

import numpy as np

from shoal.core.sizes import human_bytes
from shoal.core.svg import COLOURS
from shoal.plan.mapping.layout import Mapping, Rectangle


def picture(mapping: Mapping) -> str:
    """Buffers in fast memory as rectangles, modelled time across and addresses upwards, as SVG."""
    c = mapping.compiled
    left, top, width, height = 76, 34, 860, 380
    ends = np.concatenate([[0], np.cumsum(mapping.durations())]) / max(1, mapping.ticks)
    rows = []
    for one in mapping.rectangles:
        x, right = left + width * ends[one.start], left + width * ends[one.end + 1]
        tall = height * int(c.size[one.buffer]) / c.room
        y = top + height * (1 - one.address / c.room) - tall
        name = c.names[one.buffer]
        way = "made" if c.write[one.decision] else "copied"
        rows.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(right - x, 0.5):.1f}" '
            f'height="{max(tall, 0.5):.1f}" fill="{COLOURS[one.buffer % len(COLOURS)]}" '
            f'fill-opacity="{0.75 if way == "made" else 0.45}" stroke="currentColor" '
            f'stroke-width="0.4"><title>{escape(_describe(mapping, one, way))}</title></rect>'
        )
        if right - x > 7 * len(name) and tall > 12:
            rows.append(
                f'<text x="{(x + right) / 2:.1f}" y="{y + tall / 2 + 4:.1f}" '
                f'text-anchor="middle" font-size="10">{escape(name)}</text>'
            )
    bottom = top + height
    share = 100.0 * (1 - mapping.ticks / c.all_slow)
    title = (
        f"{c.program.name} by {mapping.mapper}: {1e6 * mapping.seconds:.4g} us, "
        f"{share:.1f} % less than from slow memory alone"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 16} '
            f'{bottom + 44}" width="{left + width + 16}" height="{bottom + 44}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="currentColor">',
            f"<title>{escape(title)}</title>",
            "<desc>Buffers in fast memory: time across, addresses upwards. Pale ones were copied "
            "from slow memory.</desc>",
            f'<text x="{left}" y="20" font-weight="600">{escape(title)}</text>',
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" '
            'stroke="currentColor" stroke-opacity="0.4"/>',
            *rows,
            f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
            f'<text x="{left - 6}" y="{top + 10}" text-anchor="end">'
            f"{human_bytes(c.tiers.fast_bytes)}</text>",
            f'<text x="{left}" y="{bottom + 18}">0</text>',
            f'<text x="{left + width}" y="{bottom + 18}" text-anchor="end">'
            f"{1e6 * mapping.seconds:.4g} us</text>",
            f'<text x="{left + width / 2:.0f}" y="{bottom + 34}" text-anchor="middle">'
            "modelled time</text>",
            "</svg>",
            "",
        ]
    )


def _describe(mapping: Mapping, one: Rectangle, way: str) -> str:
    c = mapping.compiled
    steps = c.program.instructions
    return (
        f"{c.names[one.buffer]}, {human_bytes(int(c.size[one.buffer]) * c.tiers.alignment)}, "
        f"{way}: {steps[one.start].name} to {steps[one.end].name}"
    )

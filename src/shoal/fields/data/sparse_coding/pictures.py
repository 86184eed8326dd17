"""Pictures of what was learned: components as a grid, the free energy over the iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shoal.core.svg import Chart, Series
from shoal.fields.data.sparse_coding.protocols import Floats

# Components of a picture, pixels of a side, and columns.
_SHOWN, _SIDE, _ACROSS, _GAP, _TOP = 100, 64, 10, 6, 30


def energy_chart(free_energy: Sequence[float]) -> str:
    """The free energy over the iterations, as SVG text."""
    chart = Chart(
        title="Free energy of a vector",
        description="The lower bound of the log likelihood of a vector, over the iterations.",
        x_label="iteration",
        y_label="free energy (nats)",
        series=[Series("free energy", range(1, len(free_energy) + 1), free_energy, points=True)],
    )
    return chart.render()


def component_grid(W: Floats) -> str:
    """Components [H, D] as SVG text: squares where D is a square, else strips.

    Blue is negative and orange positive; each component has its own scale.
    """
    H, D = W.shape
    edge = math.isqrt(D)
    rows, columns = (edge, edge) if edge * edge == D else (1, D)
    cell = _SIDE / columns
    high = cell * rows if rows > 1 else 12.0
    shown = min(H, _SHOWN)
    across = min(_ACROSS, shown)
    lines = -(-shown // across)
    width = across * (_SIDE + _GAP) + _GAP
    height = _TOP + lines * (high + _GAP) + _GAP
    title = f"{shown} of {H} components"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12" fill="currentColor" '
        'shape-rendering="crispEdges">',
        f"<title>{title}</title>",
        "<desc>Each square is a component; orange is positive, blue negative.</desc>",
        f'<text x="{_GAP}" y="18" font-weight="600">{title}</text>',
    ]
    for number, row in enumerate(W[:shown]):
        x = _GAP + number % across * (_SIDE + _GAP)
        y = _TOP + number // across * (high + _GAP)
        out.append(f'<g transform="translate({x} {y:.2f})">')
        out.append(f'<rect width="{_SIDE}" height="{high:.2f}" fill="#f4f4f4"/>')
        out += _cells(row.reshape(rows, columns), cell, high / rows)
        out.append("</g>")
    return "\n".join([*out, "</svg>", ""])


def _cells(picture: Floats, wide: float, high: float) -> list[str]:
    """Rectangles of those numbers that can be seen."""
    shares = picture / max(float(np.abs(picture).max()), np.finfo(float).tiny)
    result = []
    for i, j in np.argwhere(np.abs(shares) > 0.02):
        share = shares[i, j]
        hue = 24 if share > 0 else 212
        result.append(
            f'<rect x="{j * wide:.2f}" y="{i * high:.2f}" width="{wide:.2f}" height="{high:.2f}" '
            f'fill="hsl({hue} 85% {96 - 52 * abs(share):.0f}%)"/>'
        )
    return result

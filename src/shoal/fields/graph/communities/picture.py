"""A picture of a community: similar vertices attract each other, groups have colours."""

from __future__ import annotations

from html import escape

import numpy as np

from shoal.core.random import generator
from shoal.core.svg import COLOURS
from shoal.fields.graph.communities.signature_graph import CommunityView

_WIDTH, _HEIGHT, _MARGIN, _TOP = 720, 560, 60, 44
# Beyond it names are written to the left.
_RIGHT = 0.7 * _WIDTH
# Edges drawn for each vertex, the heaviest; steps of the layout; names that are written.
_EDGES, _STEPS, _NAMED = 4, 300, 60


def placed(weights: np.ndarray, seed: int) -> np.ndarray:
    """Places of vertices in the unit square, float64 [n, 2].

    Source: Fruchterman and Reingold, Graph Drawing by Force-directed Placement, 1991; edges attract
    in proportion to their weight.

    Args:
        weights: float64 [n, n], symmetric.
        seed: of the places in which they begin.
    """
    n = len(weights)
    places = generator(seed, purpose="layout").random((n, 2))
    pull = weights / max(float(weights.max(initial=0.0)), 1e-12)
    distance = 1 / np.sqrt(n)
    for step in range(_STEPS):
        apart = places[:, None] - places
        length = np.maximum(np.sqrt((apart**2).sum(axis=2)), 1e-3)
        force = distance**2 / length**2 - pull * length / distance
        move = (apart * force[..., None]).sum(axis=1) - 0.5 * distance * (places - 0.5)
        size = np.maximum(np.sqrt((move**2).sum(axis=1)), 1e-9)
        heat = 0.1 * (1 - step / _STEPS)
        places += move * (np.minimum(size, heat) / size)[:, None]
    low, high = places.min(axis=0), places.max(axis=0)
    return np.asarray((places - low) / np.maximum(high - low, 1e-9))


def network(view: CommunityView, seeds: int, seed: int = 0) -> str:
    """The SVG element of a community as text.

    Args:
        view: of its members, seeds first.
        seeds: how many of them are; they have a ring.
        seed: of the layout.
    """
    n = len(view.names)
    shown = view.weights * (np.argsort(np.argsort(-view.weights, axis=1), axis=1) < _EDGES)
    shown = np.maximum(shown, shown.T)
    places = placed(shown, seed)
    x = _MARGIN + places[:, 0] * (_WIDTH - 2 * _MARGIN)
    y = _TOP + places[:, 1] * (_HEIGHT - _TOP - _MARGIN)
    title = f"community of {n} vertices around {seeds} seeds"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="system-ui, sans-serif" '
        'font-size="10" fill="currentColor">',
        f"<title>{title}</title>",
        "<desc>Vertices, joined to those most similar to them, in colours of groups; seeds have a "
        "ring.</desc>",
        f'<text x="{_WIDTH / 2:.0f}" y="20" text-anchor="middle" font-size="12" '
        f'font-weight="600">{title}</text>',
    ]
    most = max(float(view.weights.max(initial=0.0)), 1e-12)
    for a, b in zip(*np.nonzero(np.triu(shown)), strict=True):
        out.append(
            f'<line x1="{x[a]:.1f}" y1="{y[a]:.1f}" x2="{x[b]:.1f}" y2="{y[b]:.1f}" '
            f'stroke="currentColor" stroke-opacity="{0.1 + 0.6 * shown[a, b] / most:.2f}"/>'
        )
    order = {group: at for at, group in enumerate(dict.fromkeys(view.groups.tolist()))}
    for at in range(n):
        colour = COLOURS[order[int(view.groups[at])] % len(COLOURS)]
        ring = ' stroke="currentColor" stroke-width="2"' if at < seeds else ""
        name = escape(str(view.names[at]))
        out.append(
            f'<circle cx="{x[at]:.1f}" cy="{y[at]:.1f}" r="5" fill="{colour}"{ring}>'
            f"<title>{name}</title></circle>"
        )
        if at < _NAMED:
            # Names near the right edge end at their vertex, so that none is cut off.
            anchor, side = (' text-anchor="end"', -7) if x[at] > _RIGHT else ("", 7)
            out.append(f'<text x="{x[at] + side:.1f}" y="{y[at] + 3:.1f}"{anchor}>{name}</text>')
    return "\n".join([*out, "</svg>"])

"""Ranks by node, coloured by who shares what: grids of attention and of experts to look at."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.core.svg import COLOURS
from shoal.ir import Parallel

_BOX, _GAP, _LETTER, _TOP = 26, 4, 7.0, 44
# Nodes that are drawn; more look the same.
_NODES = 8


def grids(split: Parallel, per_node: int) -> str:
    """An SVG: the tensor-parallel groups, and those of the experts, folded and inside dp.

    A row is a node, a box a rank; ranks of one colour and one number exchange with each other.
    """
    inside = split.model_copy(update={"fold": False})
    panels = [
        ("attention: who shares a layer (tp)", split.attention().groups("tp")),
        ("experts, folded: who shares them (ep)", split.experts().groups("ep")),
    ]
    if split.dp % split.ep == 0 and split.etp == 1:
        panels.append(("experts, inside dp", inside.experts().groups("ep")))
    wide = per_node * (_BOX + _GAP)
    each = max(wide, int(max(len(title) for title, _ in panels) * _LETTER)) + 40
    nodes = min(_NODES, -(-split.world // per_node))
    height = _TOP + nodes * (_BOX + _GAP) + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {60 + each * len(panels)} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(_words(split))}</title>",
        "<style>text{fill:#222}.n{fill:#fff}@media (prefers-color-scheme: dark)"
        "{svg{background:#0f1219}text{fill:#eee}}</style>",
    ]
    out += [
        f'<text x="4" y="{_TOP + node * (_BOX + _GAP) + 18}">node {node}</text>'
        for node in range(nodes)
    ]
    for place, (title, groups) in enumerate(panels):
        out += _panel(60 + place * each, title, groups, per_node, nodes)
    more = -(-split.world // per_node) - nodes
    if more > 0:
        out.append(f'<text x="4" y="{height - 6}">and {more} nodes more</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _panel(
    left: int, title: str, groups: Sequence[Sequence[int]], per_node: int, nodes: int
) -> list[str]:
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    out = [f'<text x="{left}" y="20">{escape(title)}</text>']
    for rank in sorted(group_of):
        node, place = divmod(rank, per_node)
        if node >= nodes:
            break
        number = group_of[rank]
        x, y = left + place * (_BOX + _GAP), _TOP + node * (_BOX + _GAP)
        out.append(
            f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" rx="3" '
            f'fill="{COLOURS[number % len(COLOURS)]}"><title>rank {rank}, group {number}</title>'
            f'</rect><text class="n" x="{x + _BOX / 2}" y="{y + 18}" text-anchor="middle">{number}'
            "</text>"
        )
    return out


def _words(split: Parallel) -> str:
    return (
        f"{split.world} ranks: attention pp{split.pp} dp{split.dp} cp{split.cp} tp{split.tp}, "
        f"experts pp{split.pp} edp{split.edp} ep{split.ep} etp{split.etp}"
    )

"""Devices by cluster and node, coloured by stage: an order of ranks to look at."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from shoal.core.svg import COLOURS

if TYPE_CHECKING:
    from shoal.plan.topology.order import RankOrder

_BOX, _GAP, _TOP, _LEFT = 30, 4, 40, 150
# Nodes that are drawn; more look the same.
_NODES = 24


def picture(order: RankOrder) -> str:
    """An SVG: a row is a node, a box a device with its rank, a colour a stage."""
    clusters, grid = order.clusters, order.grid
    nodes = sum(cluster.nodes for cluster in clusters.clusters)
    shown = min(nodes, _NODES)
    height = _TOP + shown * (_BOX + _GAP) + 30
    wide = max(_LEFT + clusters.devices_per_node * (_BOX + _GAP) + 20, 420)
    title = (
        f"{clusters.name}: pp={grid.pp} dp={grid.dp} tp={grid.tp}, "
        f"{order.crossing} of {len(order.groups('dp'))} dp groups between clusters"
    )
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>text{fill:#222}.n{fill:#fff;text-anchor:middle}"
        "@media (prefers-color-scheme: dark){svg{background:#0f1219}text{fill:#eee}}</style>",
        f'<text x="4" y="20">{escape(title)}</text>',
    ]
    nics = [cluster.nic for cluster in clusters.clusters for _ in range(cluster.nodes)]
    for node in range(shown):
        y = _TOP + node * (_BOX + _GAP)
        label = f"{order.host(node)} {nics[node]}"
        out.append(f'<text x="4" y="{y + 19}">{escape(label)}</text>')
    for rank, device in enumerate(order.devices):
        place = clusters.places[device]
        if place.node >= shown:
            continue
        stage = rank // grid.per_stage
        x, y = _LEFT + place.device * (_BOX + _GAP), _TOP + place.node * (_BOX + _GAP)
        out += [
            f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_BOX}" rx="3" '
            f'fill="{COLOURS[stage % len(COLOURS)]}"><title>rank {rank}, stage {stage}</title>'
            "</rect>",
            f'<text class="n" x="{x + _BOX // 2}" y="{y + 19}">{rank}</text>',
        ]
    more = f"; {nodes - shown} nodes more" if nodes > shown else ""
    out.append(f'<text x="4" y="{height - 8}">numbers are ranks, colours are stages{more}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"

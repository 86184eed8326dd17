"""A page with the graph of contained tables: what is kept, and what is rebuilt from what."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from shoal.core.sizes import human_bytes
from shoal.core.svg import COLOURS
from shoal.fields.data.lake.retention import RetentionPlan
from shoal.fields.data.lake.tables import Lake

_ROW, _WIDTH, _LEFT, _RIGHT = 22, 1000, 20, 540
# Kept tables that are drawn; the table below has all.
_SHOWN = 60


def lake_page(lake: Lake, plan: RetentionPlan, problems: Mapping[int, str]) -> str:
    """HTML, complete in itself.

    Args:
        lake: the tables.
        plan: what is kept.
        problems: table -> why it is kept though it is contained.
    """
    children: dict[int, list[int]] = {}
    for child, parent in plan.rebuilt.items():
        children.setdefault(parent, []).append(child)
    order = sorted(children, key=lambda at: -sum(lake.tables[c].num_bytes for c in children[at]))
    rows = [
        f"<tr><td>{escape(table.name)}</td><td>{table.rows:,}</td>"
        f"<td>{human_bytes(table.num_bytes)}</td><td>"
        + (escape(f"from {lake.tables[plan.rebuilt[at]].name}") if at in plan.rebuilt else "keep")
        + f"</td><td>{escape(problems.get(at, ''))}</td></tr>"
        for at, table in enumerate(lake.tables)
    ]
    return (
        "<!doctype html><meta charset='utf-8'><title>Contained tables</title>"
        "<style>body{font:14px sans-serif;margin:2em;color-scheme:light dark}"
        "td,th{text-align:left;padding:2px 12px 2px 0}</style>"
        f"<h1>{len(plan.rebuilt):,} of {len(lake.tables):,} tables can be rebuilt</h1>"
        f"<p>{plan.cost:.4g} USD a month, {plan.all_kept:.4g} if all are kept. "
        "Nothing has been deleted.</p>"
        + _graph(lake, {parent: children[parent] for parent in order[:_SHOWN]})
        + "<table><tr><th>table<th>rows<th>size<th>keep or rebuild<th></tr>"
        + "".join(rows)
        + "</table>\n"
    )


def _graph(lake: Lake, children: Mapping[int, list[int]]) -> str:
    """Kept tables on the left, on the right what is rebuilt from each."""
    if not children:
        return ""
    parts, at = [], 1
    for parent, some in children.items():
        middle = _ROW * (at + (len(some) - 1) / 2)
        parts.append(_text(_LEFT, middle, lake.tables[parent].name, COLOURS[0]))
        for child in some:
            y = _ROW * at
            parts.append(_text(_RIGHT, y, lake.tables[child].name, COLOURS[1]))
            parts.append(
                f"<path d='M{_RIGHT - 110},{middle - 4:.0f} L{_RIGHT - 8},{y - 4}' fill='none' "
                "stroke='currentColor' stroke-opacity='0.4'/>"
            )
            at += 1
    return (
        f"<svg width='{_WIDTH}' height='{_ROW * (at + 1)}' role='img'>"
        "<title>kept tables and those rebuilt from them</title>" + "".join(parts) + "</svg>"
    )


def _text(x: float, y: float, text: str, colour: str) -> str:
    short = text if len(text) <= 52 else "…" + text[-51:]
    return f"<text x='{x}' y='{y:.0f}' fill='{colour}'>{escape(short)}</text>"

"""Pictures of a run without a server: what averaging does to the layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.core.svg import Chart, Series

LayerRows = dict[str, list[dict[str, float]]]
"""Layer -> a row for each round, see :func:`layers_by_round`."""

# Layers that are drawn at most.
_DRAWN = 6


def layers_by_round(notes: Iterable[Mapping[str, Any]]) -> LayerRows:
    """Means over the nodes of what averages did to each layer.

    Args:
        notes: of all nodes; those that are no averages are passed over.

    Returns:
        Layer -> rows with ``round``, and ``own``, ``plain``, ``merged``, ``correlation`` as of
        :func:`~shoal.fields.federate.gossip.averaging.spread`.
    """
    found: dict[tuple[str, int], list[Mapping[str, float]]] = defaultdict(list)
    for note in notes:
        for name, said in note.get("layers", {}).items():
            found[name, note["round"]].append(said)
    result: LayerRows = defaultdict(list)
    for name, round_ in sorted(found, key=lambda key: key[1]):
        many = found[name, round_]
        means = {key: sum(one[key] for one in many) / len(many) for key in many[0]}
        result[name].append({"round": float(round_), **means})
    return dict(result)


def variance_picture(layers: LayerRows) -> str:
    """Variance of the layers after each average, on a logarithmic axis."""
    return _picture(
        layers, "merged", "Variance of weights after each average", "variance", log_y=True
    )


def correlation_picture(layers: LayerRows) -> str:
    """Mean correlation of the models that were averaged."""
    return _picture(
        layers, "correlation", "Mean correlation of the models that are averaged", "correlation"
    )


def _picture(layers: LayerRows, key: str, title: str, label: str, log_y: bool = False) -> str:
    drawn = [
        Series(
            name=name,
            x=[row["round"] for row in rows],
            y=[row[key] for row in rows],
            points=len(rows) == 1,
        )
        for name, rows in list(layers.items())[:_DRAWN]
    ]
    return Chart(
        title=title,
        description=f"{title}, by layer and round: means over the nodes.",
        x_label="round",
        y_label=label,
        series=drawn,
        log_y=log_y,
    ).render()

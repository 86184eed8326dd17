"""Edges of graphs and shards, as a builder of signatures takes them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from shoal.core.errors import require
from shoal.fields.graph.communities.adjacency import Side, sets_of
from shoal.fields.graph.communities.building import SignatureBuilder
from shoal.fields.graph.communities.protocols import CommunityError
from shoal.fields.graph.graph import CSRGraph


def add_graph(
    builder: SignatureBuilder, graph: CSRGraph, side: Side, least_degree: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Sign a graph's vertices; their names, and what is known of the others."""
    sets = sets_of(graph, side)
    ends, degrees = sets.indptr.astype(np.int64), np.diff(sets.indptr).astype(np.int64)
    enough = degrees >= least_degree
    names = np.arange(graph.num_nodes) if graph.ids is None else graph.ids
    keys, members = graph.keys(), sets.indices
    rows = np.flatnonzero(enough)
    if not enough.all():
        members = members[np.repeat(enough, degrees)]
        ends = np.concatenate([[0], np.cumsum(degrees[enough])])
    if graph.ids is not None:
        members = keys[members]
    builder.put(rows, ends, members)
    order = np.argsort(names[~enough], kind="stable")
    return names[rows], {
        "others": names[~enough][order],
        "other_degrees": degrees[~enough][order],
    }


def shards_of(edges: Any) -> Iterator[tuple[int, Any]]:
    """Shards with their numbers.

    Raises:
        CommunityError: the edges are of another form.
    """
    require(
        hasattr(edges, "__iter__"), "edges", type(edges).__name__, expected="a CSRGraph, or pairs "
        "of sources and targets", error=CommunityError,
    )  # fmt: skip
    return enumerate(edges)


def add_shard(builder: SignatureBuilder, shard: Any, number: int, side: Side) -> None:
    """Add a shard of edges between numbers.

    Raises:
        CommunityError: it is none.
    """
    source, target = _ends(shard, number, "iu")
    if side != "in":
        builder.add(source, target)
    if side != "out":
        builder.add(target, source)


def add_named(
    builder: SignatureBuilder, edges: Iterable[tuple[Any, Any]], kind: str, side: Side
) -> np.ndarray:
    """Add shards of edges between names; the names that have a set, ascending."""
    if kind != "U":
        for number, shard in shards_of(edges):
            add_shard(builder, shard, number, side)
        return builder.ids
    shards = [_ends(shard, number, "U") for number, shard in shards_of(edges)]
    if not shards:
        return np.zeros(0, "U1")
    source, target = (np.concatenate(ends) for ends in zip(*shards, strict=True))
    names, place = np.unique(np.concatenate([source, target]), return_inverse=True)
    ends = np.zeros(len(names) + 1, np.int64)
    keys = CSRGraph(ends, np.zeros(0, np.int32), ids=names).keys()
    source, target = place[: len(source)], place[len(source) :]
    if side != "in":
        builder.add(source, keys[target])
    if side != "out":
        builder.add(target, keys[source])
    return np.asarray(names[builder.ids])


def _ends(shard: Any, number: int, kinds: str) -> tuple[np.ndarray, np.ndarray]:
    """Sources and targets of a shard.

    Raises:
        CommunityError: they are none.
    """
    where = f"edges[{number}]"
    expected = "names" if kinds == "U" else "whole numbers from 0"
    try:
        source, target = (np.asarray(one) for one in shard)
    except (TypeError, ValueError) as cause:
        raise CommunityError(f"{where}: expected sources and targets: {cause}") from cause
    for name, end in (("source", source), ("target", target)):
        fits = end.ndim == 1 and len(end) == len(source)
        fits = fits and (end.dtype.kind in kinds or not len(end))
        if fits and kinds != "U" and len(end):
            fits = int(end.min()) >= 0 and int(end.max()) < 2**63
        require(
            bool(fits), f"{where}.{name}", f"{end.dtype} {list(end.shape)}",
            expected=f"{expected} [{len(source) if source.ndim else 'E'}]", error=CommunityError,
        )  # fmt: skip
    kind: Any = str if kinds == "U" else np.int64
    source, target = source.astype(kind), target.astype(kind)
    apart = source != target  # nobody is a neighbour of its own
    return source[apart], target[apart]

"""What rows send that travel to experts by way of other ranks: the hops, and the bytes of each.

Every rank has rows for every other one. Sent straight, a rank of N nodes with G ranks each sends
(N - 1) G small messages between nodes. By node they become few and long:

========  ==========================================  =====================================
dispatch  hops                                        messages of a rank between nodes
========  ==========================================  =====================================
flat      to the target                               (N - 1) G
2dh       in the node to the rank with the target's   N - 1
          place there; to its peer on the target's
          node
1dh       in the node to its first rank (what stays   N - 1 of the first rank of each node,
          goes to the target); between first ranks;   none of others
          in the node to the target
========  ==========================================  =====================================

All send the same bytes between nodes, and more inside them: 2dh the rows of other places, 1dh
those for other nodes, twice.

Shapes: R = N G ranks that share out experts, numbered node by node.

Source: Pan et al., FSMoE, 2025, section 3 (1DH and 2DH all-to-all); Nie et al., HetuMoE, 2022
(over one rank of a node); Hwang et al., Tutel, 2023 (in two dimensions).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import PlanError, require

_Groups = tuple[tuple[int, ...], ...]


class ExpertExchange(NamedTuple):
    """Bytes that the busiest rank sends or gets in one direction of one layer and micro-batch.

    Args:
        near: to ranks of its own node.
        far: to ranks of other nodes.
        peers: ranks that it sends to.
    """

    near: float
    far: float
    peers: int


def by_node(
    groups: Sequence[Sequence[int]], per_node: int | None, dispatch: str
) -> tuple[_Groups, _Groups]:
    """Groups cut in those of one node, and in those with one place in their nodes.

    Args:
        groups: of ranks, a partition.
        per_node: ranks of a node; None where all are on one, or where it is not known.
        dispatch: who asks, for the error.

    Raises:
        PlanError: it is not known who shares a node, or a group has more ranks on some nodes.
    """
    where = "parallel.expert_dispatch"
    if per_node is None:
        raise PlanError(
            f"{where} = {dispatch}: all ranks are on one node, or it is not known which of them "
            "share one; use flat, or start several nodes with as many ranks each"
        )
    near: list[tuple[int, ...]] = []
    far: list[tuple[int, ...]] = []
    for group in groups:
        nodes = [tuple(ranks) for _, ranks in groupby(group, lambda rank: rank // per_node)]
        sizes = [len(ranks) for ranks in nodes]
        require(
            len(set(sizes)) == 1,
            where,
            dispatch,
            expected=f"flat for ranks {', '.join(map(str, group))}, of which "
            f"{', '.join(map(str, sizes))} are on one node each; or an ep with as many ranks on "
            f"every node of {per_node}",
            error=PlanError,
        )
        near += nodes
        far += zip(*nodes, strict=True)
    return tuple(near), tuple(far)


def holders(dispatch: str, nodes: int, local: int) -> tuple[NDArray[np.int64], ...]:
    """After every hop, which rank [R, R] has the rows from each source (row) to each target.

    Hops are inside a node, between nodes, and inside a node.
    """
    source, target = np.indices((nodes * local,) * 2)
    if dispatch == "2dh":
        return source // local * local + target % local, target
    same = source // local == target // local
    return (
        np.where(same, target, source // local * local),
        np.where(same, target, target // local * local),
        target,
    )


def exchange(
    groups: Sequence[Sequence[int]], row_bytes: float, rows: float, per_node: int | None
) -> ExpertExchange:
    """What ranks send that spread their rows evenly over their group.

    Args:
        groups: of ranks, each a partition's.
        row_bytes: of one row.
        rows: of a rank, before it is known where they go.
        per_node: ranks of a node; None for one node.
    """
    most = ExpertExchange(0.0, 0.0, 0)
    for size, far in _reached(tuple(map(tuple, groups)), per_node):
        each = rows * row_bytes / size
        expert_exchange = ExpertExchange(each * (size - 1 - far), each * far, size - 1)
        most = max(most, expert_exchange, key=lambda one: (one.far, one.near))
    return most


def once_a_node(
    groups: Sequence[Sequence[int]],
    row_bytes: float,
    tokens: float,
    top_k: int,
    limit: tuple[int, int],
    per_node: int | None,
) -> ExpertExchange:
    """What ranks send whose tokens cross once to each node that has experts of theirs.

    A token goes to the rank with its sender's place on that node, which hands it on to the ranks
    of its experts. Of N nodes it reaches N (1 - (1 - 1 / N)^k), or of those that its router may
    choose; results are summed there before they come back.

    Source: DeepSeek-AI, DeepEP, 2025 (normal kernels); DeepSeek-V3 Technical Report, 2024, 3.2.2.

    Args:
        groups: of ranks, each a partition's.
        row_bytes: of one token.
        tokens: of a rank.
        top_k: experts of a token.
        limit: groups of experts that a token may reach, and all groups.
        per_node: ranks of a node; None for one node.
    """
    most = ExpertExchange(0.0, 0.0, 0)
    for size, far in _reached(tuple(map(tuple, groups)), per_node):
        here = size - far
        nodes = size / here
        free = min(nodes, limit[0] * max(1.0, nodes / limit[1]))
        met = free * (1.0 - (1.0 - 1.0 / free) ** top_k)
        sent = tokens * row_bytes
        near = sent * top_k * (here - 1) / here
        one = ExpertExchange(near, sent * met * (nodes - 1.0) / nodes, round(nodes) - 1 + here - 1)
        most = max(most, one, key=lambda one: (one.far, one.near))
    return most


@functools.lru_cache(maxsize=4096)
def _reached(groups: _Groups, per_node: int | None) -> tuple[tuple[int, int], ...]:
    """(ranks of a group, of them on other nodes than a rank), every pair once."""
    result: dict[tuple[int, int], None] = {}
    for group in groups:
        size = len(group)
        here = Counter(0 if per_node is None else rank // per_node for rank in group)
        result |= dict.fromkeys((size, size - count) for count in here.values())
    return tuple(result)


def hops(
    groups: Sequence[Sequence[int]],
    row_bytes: float,
    rows: float,
    per_node: int | None,
    dispatch: str = "flat",
) -> list[ExpertExchange]:
    """What the busiest rank sends or gets in every hop, of ranks that spread their rows evenly.

    Args:
        groups: of ranks, each a partition's.
        row_bytes: of one row.
        rows: of a rank, before it is known where they go.
        per_node: ranks of a node; None for one node.
        dispatch: flat, 1dh or 2dh.

    Raises:
        PlanError: groups that do not lie evenly on nodes, other than flat.
    """
    if dispatch == "flat":
        return [exchange(groups, row_bytes, rows, per_node)]
    near, far = by_node(groups, per_node, dispatch)
    local, nodes = len(near[0]), len(far[0])
    each = rows * row_bytes / (local * nodes)
    there = each * (nodes - 1) * local
    if dispatch == "2dh":
        return [
            ExpertExchange(each * nodes * (local - 1), 0.0, local - 1),
            ExpertExchange(0.0, there, nodes - 1),
        ]
    # A node's first rank gets what the others have for other nodes, beside what stays.
    return [
        ExpertExchange((each + there) * (local - 1), 0.0, local - 1),
        ExpertExchange(0.0, there * local, nodes - 1),
        ExpertExchange(there * (local - 1), 0.0, local - 1),
    ]


def routed(
    groups: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    row_bytes: float,
    per_node: int | None,
    dispatch: str = "flat",
) -> tuple[float, float]:
    """Bytes (near, far) that all ranks together send to experts of a known routing, one way.

    Args:
        groups: of ranks that share out the experts, in the order of the experts.
        counts: rank -> expert -> rows.
        row_bytes: of one row.
        per_node: ranks of a node; None for one node.
        dispatch: flat, 1dh or 2dh.

    Raises:
        PlanError: a group that the experts cannot be shared by, or that does not lie evenly on
            nodes.
    """
    if dispatch != "flat":
        by_node(groups, per_node, dispatch)
    near = far = 0.0
    for group in groups:
        node = [0 if per_node is None else rank // per_node for rank in group]
        place = [at - node.index(one) for at, one in enumerate(node)]
        for rank, own in enumerate(counts[rank] for rank in group):
            require(
                len(own) % len(group) == 0,
                "ep",
                len(group),
                expected=f"a divisor of {len(own)} experts",
                error=PlanError,
            )
            each = len(own) // len(group)
            for other in range(len(group)):
                sent = row_bytes * sum(own[other * each : (other + 1) * each])
                apart = node[rank] != node[other]
                far += sent * apart
                if dispatch == "2dh":
                    near += sent * (place[rank] != place[other])
                elif apart:
                    via = (place[rank] > 0) + (place[other] > 0)
                    near += sent * via * (dispatch == "1dh")
                else:
                    near += sent * (rank != other)
    return near, far

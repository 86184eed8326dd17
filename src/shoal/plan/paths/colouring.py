"""Deal the edges of a bipartite multigraph to colours so that no vertex feels the difference.

The vertices are leaves that send and leaves that receive, an edge is a piece of a flow, and a
colour is a spine. A vertex with d edges gets d / n of each of n colours, rounded down or up:
with as many colours as the highest degree, that is König's edge colouring. An even number of
colours is halved along Euler trails; of an odd one, a single colour is taken off as an integral
flow, which exists because the fractional one does.

Source: König, Über Graphen und ihre Anwendung auf Determinantentheorie und Mengenlehre, 1916;
de Werra, Equitable Colorations of Graphs, 1971; Gabow and Kariv, Algorithms for Edge Coloring
Bipartite Graphs and Multigraphs, 1982 (Euler splitting).
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

from shoal.core.errors import require


def assign(count_AB: np.ndarray, colours: int) -> np.ndarray:
    """How many edges of each pair get each colour, [colours, A, B].

    The sums of every row and column of every colour are the row's or column's sum over
    ``colours``, rounded down or up; exact where it divides.

    Args:
        count_AB: edges between each pair, integers of at least 0, [A, B].
        colours: how many, at least 1.

    Raises:
        ConfigError: no colour.
    """
    require(colours >= 1, "colours", colours, expected="at least 1")
    out = np.zeros((colours, *count_AB.shape), np.int64)
    _assign(np.asarray(count_AB, np.int64), out)
    return out


def _assign(count_AB: np.ndarray, out: np.ndarray) -> None:
    colours = len(out)
    if colours == 1:
        out[0] = count_AB
    elif not count_AB.any():
        out[:] = 0
    elif colours % 2 == 0:
        first = _half(count_AB)
        _assign(first, out[: colours // 2])
        _assign(count_AB - first, out[colours // 2 :])
    else:
        one = _one_colour(count_AB, colours)
        out[0] = one
        _assign(count_AB - one, out[1:])


def _half(count_AB: np.ndarray) -> np.ndarray:
    """One half of the edges; at every vertex it is half of them, rounded down or up."""
    half = count_AB // 2
    rows, columns = np.nonzero(count_AB % 2)
    if not len(rows):
        return half
    senders = count_AB.shape[0]
    # What is left is simple: each vertex's neighbours, as a set to take from.
    near: list[set[int]] = [set() for _ in range(sum(count_AB.shape))]
    for a, b in zip(rows.tolist(), (columns + senders).tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)
    # Trails begin where the number of edges is odd, so that they end at another such vertex;
    # what remains is circuits. An edge walked away from a sender goes to the first half, one
    # walked towards it to the other: at every vertex passed, one each.
    odd = [v for v, others in enumerate(near) if len(others) % 2]
    for begin in odd:
        if len(near[begin]) % 2:  # no earlier trail ended here
            _walk(begin, near, half)
    for begin in range(senders):
        while near[begin]:
            _walk(begin, near, half)
    return half


def _walk(at: int, near: list[set[int]], half: np.ndarray) -> None:
    """Follow a trail to its end, taking its edges away."""
    senders = len(half)
    while near[at]:
        after = near[at].pop()
        near[after].discard(at)
        if at < senders:
            half[at, after - senders] += 1
        at = after


def _one_colour(count_AB: np.ndarray, colours: int) -> np.ndarray:
    """Edges of one colour: of each vertex, its share of them, rounded down or up.

    A feasible flow with lower bounds: sender -> pair -> receiver.
    """
    A, B = count_AB.shape
    rows, columns = count_AB.sum(1), count_AB.sum(0)
    low_A, low_B = rows // colours, columns // colours
    high_A, high_B = -(-rows // colours), -(-columns // colours)
    # Vertices: senders, receivers, source, sink, and those that enforce the lower bounds.
    source, sink, give, take = A + B, A + B + 1, A + B + 2, A + B + 3
    a, b = np.nonzero(count_AB)
    heads = [np.full(A, source), a, b_first := np.arange(A, A + B)]
    tails = [np.arange(A), b + A, np.full(B, sink)]
    room = [high_A - low_A, count_AB[a, b], high_B - low_B]
    # The lower bound of source -> sender is owed to the sender by ``give``.
    heads += [np.full(A, give), np.array([source])]
    tails += [np.arange(A), np.array([take])]
    room += [low_A, np.array([low_A.sum()])]
    heads += [b_first, np.array([give]), np.array([sink])]
    tails += [np.full(B, take), np.array([sink]), np.array([source])]
    room += [low_B, np.array([low_B.sum()]), np.array([count_AB.sum()])]
    head, tail = np.concatenate(heads), np.concatenate(tails)
    size = A + B + 4
    rooms = np.concatenate(room).astype(np.int32)
    graph = csr_array(coo_array((rooms, (head, tail)), shape=(size, size)))
    result = maximum_flow(graph, give, take)
    assert result.flow_value == low_A.sum() + low_B.sum(), "the fractional flow is feasible"
    flow = result.flow.toarray()[:A, A : A + B]
    return np.asarray(np.maximum(flow, 0), np.int64)

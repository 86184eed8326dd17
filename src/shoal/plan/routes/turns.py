"""Plain plans: the stages of every micro-batch in turn, and passes by a fixed priority.

What a user would write down without a solver, so what a planner must never be worse than. It is
also where the search for something better begins.

Source: Graham, Bounds on Multiprocessing Timing Anomalies, 1969 (list scheduling).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

from shoal.plan.routes.path import RoutePass, RouteProblem

Priority = Callable[[str, int, int], tuple[int, ...]]
"""(kind of pass, micro-batch, passes that it has left) -> what comes first is least."""

PRIORITIES: dict[str, Priority] = {
    "backward first": lambda kind, mb, left: (kind == "F", mb),
    "forward first": lambda kind, mb, left: (kind != "F", mb),
    "oldest first": lambda kind, mb, left: (mb,),
    "least left first": lambda kind, mb, left: (left, mb),
    "most left first": lambda kind, mb, left: (-left, mb),
}


def in_turn(problem: RouteProblem) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Routes whose stages take turns: nodes that every micro-batch visits, in order.

    Four ways to take turns: windows that move on over the stages visited, the same over the
    stages skipped, and all choices of stages one after the other, forwards and backwards. The
    stages of a route ascend; a way that does not visit the stages evenly, or finds no links, is
    left out.
    """
    others, count = len(problem.stages) - 1, problem.keep - 1
    skipped = others - count
    ways: list[list[frozenset[int]]] = [
        [frozenset(_window(mb, count, others)) for mb in range(problem.microbatches)],
        [
            frozenset(range(1, others + 1)) - frozenset(_window(mb, skipped, others))
            for mb in range(problem.microbatches)
        ],
    ]
    # More choices than micro-batches cannot be visited evenly by taking them in order.
    choices = list(islice(combinations(range(1, others + 1), count), problem.microbatches + 1))
    if len(choices) <= problem.microbatches:
        for order in (choices, choices[::-1]):
            ways.append([frozenset(order[mb % len(order)]) for mb in range(problem.microbatches)])
    seen = []
    low, high = problem.visits
    for way in ways:
        visits = [sum(stage in one for one in way) for stage in range(1, others + 1)]
        if way in seen or any(not low <= n <= high for n in visits):
            continue
        seen.append(way)
        routes = _nodes(problem, way)
        if routes is not None:
            yield routes


def _window(mb: int, size: int, others: int) -> list[int]:
    return [1 + (mb * size + i) % others for i in range(size)]


def _nodes(
    problem: RouteProblem, way: Sequence[frozenset[int]]
) -> tuple[tuple[int, ...], ...] | None:
    """Nodes for the stages of every micro-batch: little to do until then, and near each other."""
    load = {node: 0.0 for nodes in problem.stages for node in nodes}
    routes = []
    for mb, chosen in enumerate(way):
        start = problem.start(mb)
        # Node -> (cost so far, nodes until then): the shortest way through layers.
        reached: dict[int, tuple[float, tuple[int, ...]]] = {start: (0.0, (start,))}
        for stage in sorted(chosen):
            following = {}
            for node in problem.stages[stage]:
                if problem.in_flight[node]:
                    here = load[node] + problem.forward[node] + problem.backward[node]
                    cost, nodes = min(
                        (cost + problem.hop(a, node) + here, nodes)
                        for a, (cost, nodes) in reached.items()
                    )
                    following[node] = (cost, (*nodes, node))
            if not following:
                return None
            reached = following
        cost, nodes = min(
            (cost + problem.hop(a, start), nodes) for a, (cost, nodes) in reached.items()
        )
        if cost == math.inf:
            return None
        for node in nodes:
            load[node] += problem.forward[node] + problem.backward[node]
        routes.append(nodes)
    return tuple(routes)


def scheduled(
    problem: RouteProblem, routes: Sequence[Sequence[int]], priority: Priority
) -> tuple[tuple[RoutePass, ...], ...] | None:
    """Schedule the passes of given routes greedily by start time; priorities break ties.

    Args:
        problem: nodes and micro-batches.
        routes: nodes that every micro-batch visits, in order.
        priority: of passes that can begin at the same time.

    Returns:
        The passes of every micro-batch, in order of time; None where micro-batches wait for each
        other's memory for ever, which routes with swapped stages can.
    """
    length = {"F": problem.forward, "B": problem.backward, "H": problem.head}
    steps = [
        [*(("F", n) for n in route), ("H", route[0]), *(("B", n) for n in reversed(route))]
        for route in routes
    ]
    done: list[list[RoutePass]] = [[] for _ in routes]
    free = {node: 0 for nodes in problem.stages for node in nodes}
    # Node -> micro-batch -> when its activations go; infinite until their backward has begun.
    held: dict[int, dict[int, float]] = {node: {} for node in free}
    for _ in range(sum(map(len, steps))):
        best: tuple[float, tuple[int, ...], int] | None = None
        for mb, (ahead, behind) in enumerate(zip(steps, done, strict=True)):
            if len(behind) == len(ahead):
                continue
            kind, node = ahead[len(behind)]
            tick: float = 0
            if behind:
                tick = behind[-1].end + (problem.links[behind[-1].node][node] or 0)
            if length[kind][node]:
                tick = max(tick, free[node])
            if kind == "F":
                room = problem.in_flight[node]
                leaving = sorted(held[node].values(), reverse=True)
                if len(leaving) >= room:
                    tick = max(tick, leaving[room - 1])
            if tick < math.inf and (best is None or tick <= best[0]):
                result = (tick, priority(kind, mb, len(ahead) - len(behind)), mb)
                best = result if best is None else min(best, result)
        if best is None:
            return None
        begin, mb = int(best[0]), best[2]
        kind, node = steps[mb][len(done[mb])]
        end = begin + length[kind][node]
        done[mb].append(RoutePass(kind, node, begin, end))
        free[node] = max(free[node], end) if end > begin else free[node]
        if kind == "F":
            held[node] = {other: at for other, at in held[node].items() if at > begin}
            held[node][mb] = math.inf
        elif kind == "B":
            held[node][mb] = end
    return tuple(map(tuple, done))

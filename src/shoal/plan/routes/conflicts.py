"""Routes of all micro-batches that do not get in each other's way: conflict-based search.

The tree's root lets every micro-batch take its own best route. A node of the tree whose
routes are in conflict is split: each of its children forbids one of those that take part
what it did, and only that micro-batch is planned anew. Conflicts are looked for in this
order: a stage that too many or too few micro-batches visit (C2), activations that a node
cannot hold (T1), two passes on a node at one time (T2). The best node of the tree comes
first, so the first one without conflict is the best plan there is.

Since a tree can grow without end, the search stops after so many nodes, and a feasible
plan is there before it begins: the best of the plain plans in which stages take turns, and
of micro-batches one after the other around what is planned already; from each of them, again
and again some micro-batches are planned anew, as long as that helps.

Source: Sharon et al., Conflict-Based Search for Optimal Multi-Agent Pathfinding, 2015;
Andreychuk et al., Multi-Agent Pathfinding with Continuous Time, 2019 (intervals of starts);
Li et al., Anytime Multi-Agent Path Finding via Large Neighborhood Search, 2021;
Blagoev et al., SkipPipe, 2025 (the constraints).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.random import generator
from shoal.plan.routes.path import RouteLimits, RoutePass, RouteProblem, Windows, best_route
from shoal.plan.routes.turns import PRIORITIES, in_turn, scheduled

# Micro-batches that are planned anew at a time.
_NEIGHBOURHOOD = 5


@dataclass(frozen=True)
class Routes:
    """The passes of every micro-batch.

    Args:
        passes: by micro-batch, in order of time.
        optimal: no other plan ends earlier.
        expanded: number of visited nodes of the constraint tree.
    """

    passes: tuple[tuple[RoutePass, ...], ...]
    optimal: bool = False
    expanded: int = 0

    @cached_property
    def makespan(self) -> int:
        """Tick at which the last backward pass ends."""
        return max(route[-1].end for route in self.passes)

    @cached_property
    def key(self) -> tuple[int, int]:
        """What is made small: the end of the last micro-batch, then the sum of all ends."""
        return self.makespan, sum(route[-1].end for route in self.passes)

    def nodes(self, mb: int) -> tuple[int, ...]:
        """Nodes that a micro-batch visits, in order."""
        return tuple(p.node for p in self.passes[mb] if p.kind == "F")


def plan_routes(problem: RouteProblem, *, effort: int = 100, seed: int = 0) -> Routes:
    """The best plan that so much effort finds.

    Args:
        problem: nodes and micro-batches.
        effort: nodes of the constraint tree, and attempts to improve a plan.
        seed: of the attempts.

    Raises:
        PlanError: no plan exists; names the constraint that cannot be met.
    """
    _check(problem)
    plain = _plain(problem)
    results = [_improved(problem, routes, effort, seed) for routes in plain]
    ordered = [
        routes
        for one in results
        for routes in _scheduled(problem, [one.nodes(mb) for mb in range(problem.microbatches)])
    ]
    best = min((*plain, *results, *ordered), key=lambda routes: routes.key)
    return search(problem, most=effort, known=best)


def _plain(problem: RouteProblem) -> list[Routes]:
    """Where the search begins: the best plan whose stages take turns, and one by one.

    Raises:
        PlanError: there is neither.
    """
    turns = [routes for nodes in in_turn(problem) for routes in _scheduled(problem, nodes)]
    best = [min(turns, key=lambda routes: routes.key)] if turns else []
    passes = _placed(problem, range(problem.microbatches), {})
    if passes is not None:
        best.append(Routes(tuple(passes[mb] for mb in range(problem.microbatches))))
    if not best:
        raise PlanError(
            f"routes of {problem.microbatches} micro-batches through {problem.keep} of "
            f"{len(problem.stages)} stages: none found whose stages are visited evenly (C2) by "
            "way of the links and memories (T1) there are; give more links, or more memory"
        )
    return best


def _scheduled(problem: RouteProblem, routes: Sequence[Sequence[int]]) -> Iterator[Routes]:
    """Plans of the same routes by every priority of passes."""
    for priority in PRIORITIES.values():
        passes = scheduled(problem, routes, priority)
        if passes is not None:
            yield Routes(passes)


def random_routes(problem: RouteProblem, *, seed: int = 0) -> Routes:
    """Stages and nodes drawn at random, evenly, and passes as early as they then can be.

    Raises:
        PlanError: no plan exists; names the constraint that cannot be met.
    """
    _check(problem)
    random = generator(seed, purpose="random routes")
    counts = [0] * len(problem.stages)
    passes: dict[int, tuple[RoutePass, ...]] = {}
    for mb in range(problem.microbatches):
        left = problem.microbatches - mb - 1
        while True:
            drawn = random.permutation(len(problem.stages) - 1)[: problem.keep - 1] + 1
            chosen = frozenset(int(s) for s in drawn)
            if _even(problem, counts, left)(chosen):
                break
        for stage in chosen:
            counts[stage] += 1
        start = problem.start(mb)
        for _ in range(1000):
            route = (
                start,
                *(int(random.choice(problem.stages[stage])) for stage in sorted(chosen)),
            )
            result = _after(problem, mb, passes, route=route)
            if result is not None:
                break
        else:
            raise PlanError(f"micro-batch {mb}: no linked nodes in stages {sorted(chosen)}")
        passes[mb] = result
    return Routes(tuple(passes[mb] for mb in range(problem.microbatches)))


def _check(problem: RouteProblem) -> None:
    """Refuse what no plan can do."""
    count, keep = len(problem.stages), problem.keep
    require(
        problem.microbatches >= 1,
        "microbatches",
        problem.microbatches,
        expected="at least 1",
        error=PlanError,
    )
    require(1 <= keep <= count, "keep", keep, expected=f"1 to {count}, the stages", error=PlanError)
    low, high = problem.visits
    for stage, nodes in enumerate(problem.stages):
        needed = problem.microbatches if stage == 0 else low
        blocked = nodes if stage else tuple(n for n in nodes if problem.in_flight[n] == 0)
        room = max(problem.in_flight[n] for n in blocked) if blocked else 1
        visited = (
            "all micro-batches (C1)" if stage == 0 else f"{low} to {high} micro-batches each (C2)"
        )
        require(
            room > 0 or needed == 0,
            f"in_flight of the nodes of stage {stage}",
            0,
            expected=f"at least 1 on {'each' if stage == 0 else 'one'} of nodes "
            f"{', '.join(map(str, nodes))}, because this stage is visited by {visited}; the "
            "binding constraint is their memory (T1)",
            hint="put the stage on nodes with more memory, or cut the model into more stages",
            error=PlanError,
        )
    for mb in range(min(problem.microbatches, len(problem.stages[0]))):
        start = problem.start(mb)
        require(
            problem.rest(start, keep - 1, start) < float("inf"),
            f"routes from node {start} of stage 0",
            "none",
            expected=f"links through {keep} stages and back",
            hint="give more links",
            error=PlanError,
        )


def _even(
    problem: RouteProblem, counts: Sequence[int], left: int
) -> Callable[[frozenset[int]], bool]:
    """Whether, after a visit to these stages, ``left`` micro-batches can still even out C2."""
    low, high = problem.visits
    hops = problem.keep - 1

    def allowed(stages: frozenset[int]) -> bool:
        least = most = 0
        for stage in range(1, len(problem.stages)):
            count = counts[stage] + (stage in stages)
            if count > high or low - count > left:
                return False
            least += max(0, low - count)
            most += min(high - count, left)
        return least <= left * hops <= most

    return allowed


def _reserved(
    problem: RouteProblem, passes: Mapping[int, tuple[RoutePass, ...]]
) -> tuple[dict[tuple[str, int], Windows], dict[int, Windows]]:
    """When nodes are busy for a pass of each kind, and when they hold all that they can."""
    taken: dict[int, list[RoutePass]] = {}
    held: dict[int, list[tuple[int, int]]] = {}
    for route in passes.values():
        opened = {}
        for one in route:
            taken.setdefault(one.node, []).append(one)
            if one.kind == "F":
                opened[one.node] = one.start
            elif one.kind == "B":
                held.setdefault(one.node, []).extend([(opened[one.node], 1), (one.end, -1)])
    busy: dict[tuple[str, int], Windows] = {}
    for node, ones in taken.items():
        lengths = {"F": problem.forward, "B": problem.backward, "H": problem.head}
        for kind, length in lengths.items():
            if length[node]:
                busy[kind, node] = sorted(
                    (one.start - length[node] + 1, one.end) for one in ones if one.end > one.start
                )
    full: dict[int, Windows] = {}
    for node, changes in held.items():
        inside, since = 0, None
        for tick, change in sorted(changes, key=lambda c: (c[0], c[1])):
            inside += change
            if inside >= problem.in_flight[node] and since is None:
                since = tick
            elif inside < problem.in_flight[node] and since is not None:
                if tick > since:
                    full.setdefault(node, []).append((since, tick))
                since = None
    return busy, full


def _after(
    problem: RouteProblem,
    mb: int,
    passes: Mapping[int, tuple[RoutePass, ...]],
    *,
    allowed: Callable[[frozenset[int]], bool] | None = None,
    route: Sequence[int] | None = None,
) -> tuple[RoutePass, ...] | None:
    """The best route around those of others; where none is found soon, behind all of them."""
    busy, full = _reserved(problem, passes)
    start = problem.start(mb)
    result = best_route(problem, start, RouteLimits(busy, full), allowed=allowed, route=route)
    if result is None:
        end = max((one[-1].end for one in passes.values()), default=0)
        alone = RouteLimits({("F", start): [(0, end)]})
        result = best_route(problem, start, alone, allowed=allowed, route=route)
    return result


def _placed(
    problem: RouteProblem, order: Sequence[int], passes: Mapping[int, tuple[RoutePass, ...]]
) -> dict[int, tuple[RoutePass, ...]] | None:
    """Those of ``order`` one after the other around what is placed."""
    placed = dict(passes)
    counts = [0] * len(problem.stages)
    for route in placed.values():
        for one in route:
            counts[problem.stage_of[one.node]] += one.kind == "F"
    for at, mb in enumerate(order):
        result = _after(problem, mb, placed, allowed=_even(problem, counts, len(order) - at - 1))
        if result is None:
            return None
        placed[mb] = result
        for one in result:
            counts[problem.stage_of[one.node]] += one.kind == "F"
    return placed


def _improved(problem: RouteProblem, routes: Routes, effort: int, seed: int) -> Routes:
    """Plan some micro-batches anew, the last ones more often, and keep what is not worse."""
    random = generator(seed, purpose="improve routes")
    best, count = routes, problem.microbatches
    for _ in range(effort):
        ends = np.array([route[-1].end for route in best.passes], float)
        weight = ends - ends.min() + 0.2 * max(1.0, float(ends.max() - ends.min()))
        chosen = random.choice(
            count, size=min(count, _NEIGHBOURHOOD), replace=False, p=weight / weight.sum()
        )
        fixed = {mb: best.passes[mb] for mb in range(count) if mb not in chosen}
        passes = _placed(problem, [int(mb) for mb in chosen], fixed)
        if passes is not None:
            result = Routes(tuple(passes[mb] for mb in range(count)))
            if result.key <= best.key:
                best = result
    return best


def search(problem: RouteProblem, *, most: int, known: Routes | None = None) -> Routes:
    """Conflict-based search.

    Args:
        problem: nodes and micro-batches.
        most: nodes of the constraint tree.
        known: a plan that is returned if no better one is found.

    Raises:
        PlanError: none was found, and none is known.
    """
    mbs = range(problem.microbatches)
    limits = RouteLimits()
    first: list[tuple[RoutePass, ...]] = []
    for mb in mbs:
        result = best_route(problem, problem.start(mb), limits)
        if result is None:
            break
        first.append(result)
    tree: list[tuple[tuple[int, int], int, Routes, tuple[RouteLimits, ...]]] = []
    if len(first) == len(mbs):
        root = Routes(tuple(first))
        tree.append((root.key, 0, root, (limits,) * len(mbs)))
    number, expanded = 1, 0
    while tree and expanded < most:
        _, _, routes, limited = heapq.heappop(tree)
        if known is not None and routes.makespan >= known.makespan:
            return Routes(known.passes, True, expanded)
        expanded += 1
        split = list(_split(problem, routes, limited))
        if not split:
            return Routes(routes.passes, True, expanded)
        for mb, stricter in split:
            result = best_route(problem, problem.start(mb), stricter)
            if result is None:
                continue
            passes = (*routes.passes[:mb], result, *routes.passes[mb + 1 :])
            child = Routes(passes)
            if known is None or child.makespan < known.makespan:
                heapq.heappush(
                    tree,
                    (child.key, number, child, (*limited[:mb], stricter, *limited[mb + 1 :])),
                )
                number += 1
    if known is None:
        raise PlanError(f"no routes without conflict in {expanded} nodes of the constraint tree")
    return Routes(known.passes, not tree, expanded)


def _split(
    problem: RouteProblem, routes: Routes, limited: Sequence[RouteLimits]
) -> Iterator[tuple[int, RouteLimits]]:
    """(micro-batch, its stricter limits) of each child; nothing where there is no conflict."""
    low, high = problem.visits
    mbs = range(problem.microbatches)
    visited = [frozenset(problem.stage_of[n] for n in routes.nodes(mb)) for mb in mbs]
    for stage in range(1, len(problem.stages)):
        inside = [mb for mb in mbs if stage in visited[mb]]
        if len(inside) > high:
            # One of any high + 1 micro-batches stays away, whatever the plan.
            yield from ((mb, limited[mb].without(stage)) for mb in inside[: high + 1])
            return
        outside = [mb for mb in mbs if stage not in visited[mb]]
        if len(inside) < low:
            need = len(mbs) - low + 1
            yield from ((mb, limited[mb].through(stage)) for mb in outside[:need])
            return
    crowd = _crowd(problem, routes)
    if crowd is not None:
        node, tick, who = crowd
        # One of them is elsewhere at the moment before the first one leaves.
        yield from ((mb, limited[mb].also_full(node, (tick, tick + 1))) for mb in who)
        return
    meeting = _meeting(routes)
    if meeting is not None:
        (a, one), (b, other) = meeting
        # Whenever both begin in these intervals, they overlap.
        yield a, limited[a].also_busy(one.kind, one.node, (one.start, other.end))
        yield b, limited[b].also_busy(other.kind, other.node, (other.start, one.end))


def _crowd(problem: RouteProblem, routes: Routes) -> tuple[int, int, list[int]] | None:
    """(node, tick, micro-batches) of the first activations too many."""
    numbers: tuple[int, int, list[int]] | None = None
    held: dict[int, list[tuple[int, int, int]]] = {}
    for mb, route in enumerate(routes.passes):
        opened = {one.node: one.start for one in route if one.kind == "F"}
        for one in route:
            if one.kind == "B":
                held.setdefault(one.node, []).append((opened[one.node], one.end, mb))
    for node, spans in sorted(held.items()):
        room = problem.in_flight[node]
        for since, _, _ in sorted(spans):
            inside = [(end, mb) for begin, end, mb in spans if begin <= since < end]
            if len(inside) > room:
                chosen = sorted(inside)[-(room + 1) :]
                tick = chosen[0][0] - 1
                if numbers is None or tick < numbers[1]:
                    numbers = node, tick, [mb for _, mb in chosen]
                break
    return numbers


def _meeting(routes: Routes) -> tuple[tuple[int, RoutePass], tuple[int, RoutePass]] | None:
    """The first two passes of different micro-batches on one node at one time."""
    taken: dict[int, list[tuple[int, int, int, RoutePass]]] = {}
    for mb, route in enumerate(routes.passes):
        for one in route:
            if one.end > one.start:
                taken.setdefault(one.node, []).append((one.start, one.end, mb, one))
    first: tuple[int, tuple[int, RoutePass], tuple[int, RoutePass]] | None = None
    for _, rows in sorted(taken.items()):
        rows.sort()
        latest = rows[0]
        for row in rows[1:]:
            if row[0] < latest[1]:
                if first is None or row[0] < first[0]:
                    first = row[0], (latest[2], latest[3]), (row[2], row[3])
                break
            latest = row
    return None if first is None else (first[1], first[2])

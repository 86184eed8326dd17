"""The best route of one micro-batch through nodes that others use as well: A*.

A route begins on a node of stage 0, visits ``keep - 1`` of the other stages, one node of
each, and ends in the output layer on the node where it began; its backward passes go the
same way back. Whatever is not free is waited for.

A label of the search is a node with the stages visited and the time; since waiting is
always allowed, to begin a pass as early as possible is never worse, except where the
activations that it leaves would be in the way: there the label forks.

Source: Hart et al., A Formal Basis for the Heuristic Determination of Minimum Cost Paths,
1968; Blagoev et al., SkipPipe, 2025 (what a route is, and its constraints).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

Windows = list[tuple[int, int]]
"""Half-open intervals [from, to), by their beginning."""

_NEVER = 2**62


@dataclass(frozen=True)
class RouteProblem:
    """Nodes in stages, and micro-batches that are to visit them. Times are whole ticks.

    Args:
        stages: nodes of each stage; stage 0 holds embedding and output layer.
        microbatches: of one step; micro-batch i begins on node ``i % n`` of the n of stage 0.
        keep: stages that a micro-batch visits, stage 0 included.
        swap: a micro-batch may visit two neighbouring stages in reverse order.
        forward: by node, ticks of its stage's forward pass.
        backward: by node, ticks of its stage's backward pass.
        head: by node, ticks of the output layer, forward and backward.
        links: ticks from node to node, 0 within one; None where there is no link.
        in_flight: by node, micro-batches whose activations it holds at most.
    """

    stages: tuple[tuple[int, ...], ...]
    microbatches: int
    keep: int
    swap: bool
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    head: tuple[int, ...]
    links: tuple[tuple[int | None, ...], ...]
    in_flight: tuple[int, ...]

    def start(self, mb: int) -> int:
        """The node of stage 0 where micro-batch ``mb`` begins and ends."""
        return self.stages[0][mb % len(self.stages[0])]

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Stage of each node."""
        return {node: s for s, nodes in enumerate(self.stages) for node in nodes}

    @cached_property
    def visits(self) -> tuple[int, int]:
        """Fewest and most micro-batches that visit a stage behind stage 0: they differ by 1."""
        if len(self.stages) == 1:
            return 0, 0
        low, more = divmod(self.microbatches * (self.keep - 1), len(self.stages) - 1)
        return low, low + bool(more)

    @cached_property
    def _rest(self) -> dict[int, list[dict[int, float]]]:
        """Start node -> hops left -> node -> fewest ticks from there to the end and back."""
        return {start: self._bounds(start) for start in self.stages[0]}

    def _bounds(self, start: int) -> list[dict[int, float]]:
        nodes = [n for stage in self.stages for n in stage]
        last = {n: self.hop(n, start) + self.head[start] for n in nodes}
        bounds: list[dict[int, float]] = [last]
        lowest = -1 if self.swap else 1
        for _ in range(self.keep - 1):
            after, row = bounds[-1], {}
            for a in nodes:
                at = self.stage_of[a]
                row[a] = min(
                    (
                        self.hop(a, b) + self.forward[b] + self.backward[b] + after[b]
                        for b in nodes
                        if (t := self.stage_of[b]) and t != at and t - at >= lowest
                    ),
                    default=math.inf,
                )
            bounds.append(row)
        return bounds

    def hop(self, a: int, b: int) -> float:
        """Ticks there and back."""
        there, back = self.links[a][b], self.links[b][a]
        return math.inf if there is None or back is None else there + back

    def rest(self, start: int, hops: int, node: int) -> float:
        """Fewest ticks that a route from ``node`` with so many hops to go can still take."""
        return self._rest[start][hops][node]


class RoutePass(NamedTuple):
    """One pass of a route on a node.

    Args:
        kind: F, B or H, the output layer there and back.
        node: where.
        start: tick.
        end: tick.
    """

    kind: str
    node: int
    start: int
    end: int


@dataclass(frozen=True)
class RouteLimits:
    """What a micro-batch must not do.

    Args:
        busy: (kind, node) -> when a pass of this kind may not begin there.
        full: node -> when the activations of this micro-batch may not lie there.
        forbidden: stages that it may not visit.
        required: stages that it has to visit.
    """

    busy: Mapping[tuple[str, int], Windows] = field(default_factory=dict)
    full: Mapping[int, Windows] = field(default_factory=dict)
    forbidden: frozenset[int] = frozenset()
    required: frozenset[int] = frozenset()

    def also_busy(self, kind: str, node: int, window: tuple[int, int]) -> RouteLimits:
        """These, and one window more."""
        windows = list(self.busy.get((kind, node), ()))
        insort(windows, window)
        busy = {**self.busy, (kind, node): windows}
        return RouteLimits(busy, self.full, self.forbidden, self.required)

    def also_full(self, node: int, window: tuple[int, int]) -> RouteLimits:
        """These, and one window more."""
        windows = list(self.full.get(node, ()))
        insort(windows, window)
        full = {**self.full, node: windows}
        return RouteLimits(self.busy, full, self.forbidden, self.required)

    def without(self, stage: int) -> RouteLimits:
        """These, and a stage that is not visited."""
        return RouteLimits(self.busy, self.full, self.forbidden | {stage}, self.required)

    def through(self, stage: int) -> RouteLimits:
        """These, and a stage that is visited."""
        return RouteLimits(self.busy, self.full, self.forbidden, self.required | {stage})


def _earliest(tick: int, windows: Windows) -> int:
    """The first moment from ``tick`` on that is in no window."""
    for low, high in windows:
        if tick < low:
            break
        if tick < high:
            tick = high
    return tick


def next_stages(
    problem: RouteProblem, top: int, gap: bool, left: int
) -> Iterator[tuple[int, int, bool]]:
    """(stage, highest stage, its lower neighbour may follow) of what may come next.

    Args:
        problem: of which the stages and ``swap`` are used.
        top: highest stage visited.
        gap: ``top`` was visited last, and the stage below it was jumped over.
        left: stages still to be visited.
    """
    count = len(problem.stages)
    if gap and problem.swap and count - 1 - top >= left - 1:
        yield top - 1, top, False
    for stage in range(top + 1, count):
        opens = stage - 1 > top
        if count - 1 - stage + (opens and problem.swap) >= left - 1:
            yield stage, stage, opens


@dataclass(frozen=True)
class _Label:
    """A route as far as it goes; ``until`` are the moments by which nodes must be free again."""

    tick: int
    back: float
    nodes: tuple[int, ...]
    starts: tuple[int, ...]
    until: tuple[int, ...]
    top: int
    gap: bool


def best_route(
    problem: RouteProblem,
    start: int,
    limits: RouteLimits,
    *,
    allowed: Callable[[frozenset[int]], bool] | None = None,
    route: Sequence[int] | None = None,
    most: int = 50_000,
) -> tuple[RoutePass, ...] | None:
    """The route that is done first, with the times of its passes.

    Args:
        problem: the nodes.
        start: node of stage 0.
        limits: what is not free.
        allowed: of the stages visited, whether they will do.
        route: the nodes, if they are given and only their times are wanted.
        most: labels that are looked at.

    Returns:
        Its passes in order of time, or None if there is none, or none was found in time.
    """
    none: Windows = []
    required = limits.required
    queue: list[tuple[float, int, int, _Label | tuple[RoutePass, ...]]] = []
    number = 0

    def push(bound: float, hops: int, label: _Label | tuple[RoutePass, ...]) -> None:
        nonlocal number
        if bound < math.inf:
            heapq.heappush(queue, (bound, hops, number, label))
            number += 1

    def visit(label: _Label, node: int, top: int, gap: bool) -> None:
        """Push the label that goes on to ``node``, once for each gap in what it may hold."""
        before = label.nodes[-1] if label.nodes else node
        link, hop = problem.links[before][node], problem.hop(before, node)
        if link is None or hop == math.inf or not problem.in_flight[node]:
            return
        hops = problem.keep - len(label.nodes) - 1
        back = label.back + (hop - link) + problem.backward[node]
        busy, full = limits.busy.get(("F", node), none), limits.full.get(node, none)
        tick = label.tick + link
        for low, high in (*full, (_NEVER, _NEVER)):
            begin = _earliest(tick, busy)
            if begin < low:
                after = _Label(
                    begin + problem.forward[node],
                    back,
                    (*label.nodes, node),
                    (*label.starts, begin),
                    (*label.until, low),
                    top,
                    gap,
                )
                bound = after.tick + back + problem.rest(start, hops, node)
                push(bound, hops, after)
            tick = max(tick, high)

    visit(_Label(0, 0.0, (), (), (), 0, False), start, 0, False)
    for _ in range(most):
        if not queue:
            return None
        _, hops, _, label = heapq.heappop(queue)
        if not isinstance(label, _Label):
            return label
        if hops == 0:
            stages = frozenset(problem.stage_of[n] for n in label.nodes[1:])
            if required <= stages and (allowed is None or allowed(stages)):
                done = _return(problem, label, limits)
                if done is not None:
                    push(done[-1].end, -1, done)
            continue
        if route is not None:
            node = route[len(label.nodes)]
            visit(label, node, problem.stage_of[node], False)
            continue
        for stage, top, gap in next_stages(problem, label.top, label.gap, hops):
            if stage not in limits.forbidden:
                for node in problem.stages[stage]:
                    visit(label, node, top, gap)
    return None


def _return(
    problem: RouteProblem, label: _Label, limits: RouteLimits
) -> tuple[RoutePass, ...] | None:
    """The passes of a whole route; None if its activations would be in the way."""
    none: Windows = []
    passes = [
        RoutePass("F", node, begin, begin + problem.forward[node])
        for node, begin in zip(label.nodes, label.starts, strict=True)
    ]
    home = label.nodes[0]
    tick = _earliest(
        label.tick + (problem.links[label.nodes[-1]][home] or 0), limits.busy.get(("H", home), none)
    )
    passes.append(RoutePass("H", home, tick, tick + problem.head[home]))
    tick += problem.head[home]
    before = home
    for node, until in zip(reversed(label.nodes), reversed(label.until), strict=True):
        tick = _earliest(
            tick + (problem.links[before][node] or 0), limits.busy.get(("B", node), none)
        )
        passes.append(RoutePass("B", node, tick, tick + problem.backward[node]))
        tick += problem.backward[node]
        if tick > until:
            return None
        before = node
    return tuple(passes)

"""Planned routes are never worse than plain turns that the planner's own check calls legal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal_routes import violation

from shoal.core.errors import PlanError
from shoal.plan.routes.conflicts import Routes, plan_routes
from shoal.plan.routes.path import RoutePass, RouteProblem
from shoal.plan.routes.turns import PRIORITIES, in_turn, scheduled


def problem_of(p: int, keep: int, microbatches: int, **changes: object) -> RouteProblem:
    return RouteProblem(
        **{
            "stages": tuple((node,) for node in range(p)),
            "microbatches": microbatches,
            "keep": keep,
            "swap": False,
            "forward": (1,) * p,
            "backward": (2,) * p,
            "head": (0,) * p,
            "links": ((0,) * p,) * p,
            "in_flight": (p,) * p,
            **changes,  # type: ignore[arg-type]
        }
    )


def round_robin(problem: RouteProblem, *, forward_first: bool) -> Routes:
    """Micro-batch i visits the next ``keep - 1`` stages after those of i - 1; tick by tick."""
    others, count = len(problem.stages) - 1, problem.keep - 1
    steps: list[list[tuple[str, int]]] = []
    for mb in range(problem.microbatches):
        nodes = [0, *sorted(1 + (mb * count + i) % others for i in range(count))]
        steps.append([*(("F", n) for n in nodes), ("H", 0), *(("B", n) for n in reversed(nodes))])
    done: list[list[RoutePass]] = [[] for _ in steps]
    for tick in range(3 * len(problem.stages) * problem.microbatches + 1):
        for node in range(len(problem.stages)):
            while True:
                ready = [
                    (steps[mb][len(row)][0] == "F", mb)
                    for mb, row in enumerate(done)
                    if len(row) < len(steps[mb])
                    and steps[mb][len(row)][1] == node
                    and (not row or row[-1].end <= tick)
                ]
                busy = any(one.node == node and one.end > tick for row in done for one in row)
                held = sum(
                    one.kind == "F" and one.node == node for row in done for one in row
                ) - sum(
                    one.kind == "B" and one.node == node and one.end <= tick
                    for row in done
                    for one in row
                )
                ready = [
                    (forward, mb)
                    for forward, mb in ready
                    if not (forward and held >= problem.in_flight[node])
                ]
                heads = [mb for _, mb in ready if steps[mb][len(done[mb])][0] == "H"]
                if heads:
                    done[heads[0]].append(RoutePass("H", node, tick, tick))
                    continue
                if ready and not busy:
                    forward, mb = min(ready, key=lambda one: (one[0] != forward_first, one[1]))
                    done[mb].append(RoutePass("FB"[not forward], node, tick, tick + 2 - forward))
                break
    return Routes(tuple(map(tuple, done)))


def check(p: int, keep: int, microbatches: int) -> None:
    problem = problem_of(p, keep, microbatches)
    planned = plan_routes(problem, effort=5)
    assert violation(problem, planned) == ""
    for forward_first in (False, True):
        plain = round_robin(problem, forward_first=forward_first)
        assert violation(problem, plain) == ""
        assert planned.makespan <= plain.makespan


@pytest.mark.parametrize("microbatches", [5, 6, 8, 12, 16])
def test_never_worse_than_round_robin_where_it_was(microbatches: int) -> None:
    check(4, 3, microbatches)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_never_worse_than_round_robin(data: st.DataObject) -> None:
    p = data.draw(st.integers(2, 7), "p")
    keep = data.draw(st.integers(2, p), "keep")
    check(p, keep, data.draw(st.integers(max(1, -(-(p - 1) // (keep - 1))), 10), "microbatches"))


def test_a_node_without_memory_is_never_visited() -> None:
    """Where all passes take no time, "behind everything" is no moment that a plan may wait for."""
    nothing: dict[str, object] = {"forward": (0,) * 3, "backward": (0,) * 3}
    only = problem_of(
        3,
        2,
        1,
        stages=((0,), (1, 2)),
        links=((0, 0, None), (0, 0, None), (None, None, 0)),
        in_flight=(1, 0, 1),
        **nothing,
    )
    with pytest.raises(PlanError, match="memories"):
        plan_routes(only)
    linked = problem_of(3, 2, 1, stages=((0,), (1, 2)), in_flight=(1, 0, 1), **nothing)
    assert plan_routes(linked).nodes(0) == (0, 2)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_plain_plans_keep_the_constraints(data: st.DataObject) -> None:
    """On unequal nodes, several to a stage, with links and little memory; and none is better."""
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=2, max_size=4), "sizes")
    count = sum(sizes)

    def numbers(low: int, high: int) -> tuple[int, ...]:
        return tuple(data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))

    ends = [sum(sizes[: s + 1]) for s in range(len(sizes))]
    link = st.one_of(st.none(), st.integers(0, 4), st.integers(0, 4))
    links = [[0 if a == b else data.draw(link) for b in range(count)] for a in range(count)]
    problem = problem_of(
        count,
        data.draw(st.integers(2, len(sizes)), "keep"),
        data.draw(st.integers(1, 6), "microbatches"),
        stages=tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)),
        swap=data.draw(st.booleans(), "swap"),
        forward=numbers(0, 3),
        backward=numbers(0, 4),
        head=numbers(0, 2),
        links=tuple(map(tuple, links)),
        in_flight=numbers(0, 3),
    )
    try:
        planned = plan_routes(problem, effort=3)
    except PlanError:
        # A route may take a stage twice as far where it is the only one linked; turns may not.
        assert not any(problem.in_flight) or planless(problem)
        return
    assert violation(problem, planned) == ""
    for nodes in in_turn(problem):
        for name, priority in PRIORITIES.items():
            passes = scheduled(problem, nodes, priority)
            assert passes is not None, name
            assert violation(problem, Routes(passes)) == "", name
            assert planned.key <= Routes(passes).key, name


def planless(problem: RouteProblem) -> bool:
    """No plain plan either, or node 0 of stage 0 can hold nothing."""
    blocked = any(problem.in_flight[node] == 0 for node in problem.stages[0])
    return blocked or not list(in_turn(problem))

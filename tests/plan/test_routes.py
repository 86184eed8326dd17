"""Routes through slow networks: as good as trying everything, always legal."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from legal_routes import violation

from shoal.core.errors import ConfigError, MachineError, PlanError
from shoal.plan.routes.arrange import arrange, arrangement_cost, bottleneck, default_sizes
from shoal.plan.routes.conflicts import (
    Routes,
    plan_routes,
    random_routes,
    search,
)
from shoal.plan.routes.network import REGIONS, WAN, NodeLink, WanNetwork, WanNode
from shoal.plan.routes.path import RouteLimits, RouteProblem, best_route
from shoal.plan.routes.plan import RouteTask, plan

FOUR_NODES = (
    ((0,), (1,), (2,), (3,)),
    ((0,), (1, 2), (3,)),
    ((0,), (1,), (2, 3)),
    ((0, 1), (2,), (3,)),
    ((0,), (1, 2, 3)),
    ((0, 3), (1, 2)),
)


@st.composite
def small(draw: st.DrawFn) -> RouteProblem:
    """At most three micro-batches on four nodes."""
    stages = draw(st.sampled_from(FOUR_NODES))
    keep = draw(st.integers(min(2, len(stages)), min(3, len(stages))))
    few = st.integers(1, 4)

    def row() -> tuple[int, ...]:
        return tuple(draw(few) for _ in range(4))

    far = [[0 if a == b else draw(st.integers(0, 6)) for b in range(4)] for a in range(4)]
    return RouteProblem(
        stages=stages,
        microbatches=draw(st.integers(1, 3)),
        keep=keep,
        swap=draw(st.booleans()),
        forward=row(),
        backward=row(),
        head=tuple(draw(st.integers(0, 2)) for _ in range(4)),
        links=tuple(tuple(row) for row in far),
        in_flight=tuple(draw(st.integers(1, 3)) for _ in range(4)),
    )


def all_routes(problem: RouteProblem, mb: int) -> list[tuple[int, ...]]:
    """Every route of a micro-batch, written down without the solver."""
    routes = []
    others = range(1, len(problem.stages))
    for chosen in itertools.permutations(others, problem.keep - 1):
        order, at = list(chosen), 0
        while at + 1 < len(order):
            if problem.swap and order[at] == order[at + 1] + 1:
                order[at], order[at + 1] = order[at + 1], order[at]
                at += 1
            at += 1
        if order == sorted(order):
            routes += [
                (problem.start(mb), *nodes)
                for nodes in itertools.product(*(problem.stages[s] for s in chosen))
            ]
    return routes


def shortest(problem: RouteProblem, routes: tuple[tuple[int, ...], ...], below: float) -> float:
    """Least makespan of these routes over all orders of their passes, if it is below a bound."""
    chains = []
    for route in routes:
        home = route[0]
        chain = [(node, problem.forward[node], 1) for node in route]
        chain.append((home, problem.head[home], 0))
        chain += [(node, problem.backward[node], -1) for node in reversed(route)]
        chains.append(chain)
    best = below
    seen: set[object] = set()
    tails = []
    for chain in chains:
        tail = [0] * (len(chain) + 1)
        for i in reversed(range(len(chain))):
            after = problem.links[chain[i][0]][chain[i + 1][0]] if i + 1 < len(chain) else 0
            tail[i] = chain[i][1] + (after or 0) + tail[i + 1]
        tails.append(tail)

    def go(done: tuple[int, ...], ready: tuple[int, ...], free: tuple[int, ...]) -> None:
        nonlocal best
        if max(ready[m] + tails[m][done[m]] for m in range(len(chains))) >= best:
            return
        if (done, ready, free) in seen:
            return
        seen.add((done, ready, free))
        if all(done[m] == len(chains[m]) for m in range(len(chains))):
            best = max(ready)
            return
        for m, chain in enumerate(chains):
            if done[m] == len(chain):
                continue
            node, length, holds = chain[done[m]]
            if holds == 1:
                inside = sum(
                    step
                    for n, _, step in itertools.chain(
                        *(c[:d] for c, d in zip(chains, done, strict=True))
                    )
                    if n == node
                )
                if inside >= problem.in_flight[node]:
                    continue
            # A pass that takes no time needs no room between others.
            begin = max(ready[m], free[node]) if length else ready[m]
            end = begin + length
            arrives = end
            if done[m] + 1 < len(chain):
                arrives += problem.links[node][chain[done[m] + 1][0]] or 0
            go(
                tuple(d + (i == m) for i, d in enumerate(done)),
                tuple(arrives if i == m else r for i, r in enumerate(ready)),
                tuple(max(f, end) if n == node and length else f for n, f in enumerate(free)),
            )

    go((0,) * len(chains), (0,) * len(chains), (0,) * 4)
    return best


def brute_force(problem: RouteProblem) -> float:
    low, high = problem.visits
    best = math.inf
    every = [all_routes(problem, mb) for mb in range(problem.microbatches)]
    for routes in itertools.product(*every):
        counts = [0] * len(problem.stages)
        for node in itertools.chain(*routes):
            counts[problem.stage_of[node]] += 1
        if all(low <= count <= high for count in counts[1:]):
            best = min(best, shortest(problem, routes, best))
    return best


@settings(max_examples=20, deadline=None)
@given(small())
@pytest.mark.slow
def test_solver_is_as_good_as_trying_everything(problem: RouteProblem) -> None:
    routes = plan_routes(problem, effort=20)
    # The hardest of these problems that is known takes 25,131 steps to be proven.
    exact = search(problem, most=100_000, known=routes)
    assert violation(problem, routes) == ""
    assert violation(problem, exact) == ""
    assert exact.optimal
    assert exact.makespan == brute_force(problem)
    assert routes.makespan >= exact.makespan


def test_search_alone_finds_the_optimum() -> None:
    problem = RouteProblem(
        stages=FOUR_NODES[2],
        microbatches=3,
        keep=2,
        swap=False,
        forward=(1, 2, 2, 3),
        backward=(2, 3, 3, 3),
        head=(1, 0, 0, 0),
        links=((0, 4, 1, 9), (4, 0, 1, 1), (1, 1, 0, 2), (9, 1, 2, 0)),
        in_flight=(2, 1, 1, 1),
    )
    match = search(problem, most=5000)
    assert match.optimal
    assert match.makespan == brute_force(problem)
    with pytest.raises(PlanError, match="constraint tree"):
        search(problem, most=1)


def wide(seed: int, **changes: object) -> RouteProblem:
    """Ten nodes in four stages."""
    random = np.random.default_rng(seed)
    links = random.integers(0, 40, (10, 10))
    np.fill_diagonal(links, 0)
    problem = RouteProblem(
        stages=((0, 1, 2, 3), (4, 5), (6, 7), (8, 9)),
        microbatches=10,
        keep=3,
        swap=bool(seed % 2),
        forward=tuple(random.integers(5, 15, 10).tolist()),
        backward=tuple(random.integers(10, 30, 10).tolist()),
        head=(6,) * 10,
        links=tuple(map(tuple, links.tolist())),
        in_flight=tuple(random.integers(1, 5, 10).tolist()),
    )
    return replace(problem, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_large_plans_keep_every_constraint_and_beat_chance(seed: int) -> None:
    problem = wide(seed)
    first, more = plan_routes(problem, effort=0), plan_routes(problem, effort=20)
    drawn = random_routes(problem, seed=seed)
    for routes in (first, more, drawn):
        assert violation(problem, routes) == ""
    assert more.makespan <= first.makespan
    assert more.makespan < drawn.makespan
    assert plan_routes(problem, effort=20) == more


def test_violations_are_found() -> None:
    problem = wide(1)
    routes = plan_routes(problem, effort=0)
    alike = Routes((routes.passes[0],) * problem.microbatches)
    assert "visits stages" in violation(problem, alike)
    early = tuple(one._replace(start=0) for one in routes.passes[0])
    assert "too early" in violation(problem, Routes((early, *routes.passes[1:])))
    same = replace(problem, stages=((0,), *problem.stages[1:]), microbatches=3)
    assert violation(same, Routes((routes.passes[0],) * 3)) != ""


def test_a_full_node_is_waited_for_or_left() -> None:
    problem = wide(0, swap=False)
    free = best_route(problem, 0, RouteLimits())
    assert free is not None
    node = free[1].node
    later = best_route(problem, 0, RouteLimits().also_full(node, (0, 10**6)))
    assert later is not None
    assert all(one.node != node for one in later)
    only = [one.node for one in free if one.kind == "F"]
    timed = best_route(problem, 0, RouteLimits().also_full(node, (0, 10**6)), route=only)
    assert timed is not None
    assert timed[1].start == 10**6


@pytest.mark.parametrize("keep", [2, 3, 4])
@pytest.mark.parametrize("swap", [False, True])
def test_orders_are_those_that_may_be(keep: int, swap: bool) -> None:
    """Every stage sequence of the solver, and no other."""
    problem = wide(0, keep=keep, swap=swap, stages=((0,), (1,), (2,), (3,), (4,)))
    seen = set()
    for route in all_routes(problem, 0):
        result = best_route(problem, 0, RouteLimits(), route=route)
        assert result is not None
        seen.add(route)
    blocked = RouteLimits()
    reached = set()
    # Forbid what was found, by its set of stages and order, until nothing is left.
    for route in sorted(seen):
        stages = frozenset(route[1:])
        limits = blocked
        for stage in stages:
            limits = limits.through(stage)
        best = best_route(problem, 0, limits, allowed=lambda s, want=stages: s == want)
        assert best is not None
        nodes = tuple(one.node for one in best if one.kind == "F")
        assert nodes in seen
        reached.add(frozenset(nodes[1:]))
    assert reached == {frozenset(route[1:]) for route in seen}


def test_bottleneck_is_the_best_pairing() -> None:
    random = np.random.default_rng(0)
    for rows, columns in ((1, 1), (2, 3), (3, 3), (4, 2)):
        cost = random.integers(0, 50, (rows, columns)).astype(float)
        tall = cost.T if rows > columns else cost
        brute = min(
            max(tall[i][j] for i, j in enumerate(chosen))
            for chosen in itertools.permutations(range(tall.shape[1]), tall.shape[0])
        )
        assert bottleneck(cost.tolist()) == brute
    assert bottleneck([[math.inf]]) == math.inf


def test_arrangement_is_the_best_of_all() -> None:
    network = WanNetwork.wan(7)
    sizes = (3, 2, 2)
    result = arrange(network, sizes, sync_bytes=1e8, boundary_bytes=1e7)

    def cost(stages: tuple[tuple[int, ...], ...]) -> float:
        return sum(arrangement_cost(network, stages, sync_bytes=1e8, boundary_bytes=1e7))

    every = {
        tuple(sorted(order[:3])) + tuple(sorted(order[3:5])) + tuple(sorted(order[5:]))
        for order in itertools.permutations(range(7))
    }
    best = min(cost((order[:3], order[3:5], order[5:])) for order in every)
    assert cost(result) == pytest.approx(best)
    assert [len(stage) for stage in result] == list(sizes)
    assert result == arrange(network, sizes, sync_bytes=1e8, boundary_bytes=1e7)


def test_sizes_share_the_load() -> None:
    assert default_sizes(20, 6, 4) == (5, 3, 3, 3, 3, 3)
    assert default_sizes(20, 6, 6) == (4, 4, 3, 3, 3, 3)
    assert default_sizes(3, 1, 1) == (3,)
    with pytest.raises(PlanError, match="at least 6, one for each stage"):
        default_sizes(5, 6, 4)


def test_table_has_every_pair_of_regions_once() -> None:
    pairs = {frozenset(pair) for pair in itertools.combinations(REGIONS, 2)}
    assert {frozenset(pair) for pair in WAN} == pairs
    assert len(WAN) == len(pairs)
    network = WanNetwork.wan(12)
    a = [node.region for node in network.nodes].index("tokyo")
    b = [node.region for node in network.nodes].index("london")
    assert network.seconds(a, b, 366e6 / 8) == pytest.approx(0.210 + 1.0)
    assert network.seconds(0, 10, 2e9 / 8) == pytest.approx(0.010 + 1.0)
    assert network.seconds(3, 3, 1e9) == 0.0


def test_network_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(
        "nodes:\n- {name: a, region: oregon}\n- {name: b, region: tokyo}\n- {name: c, speed: 2}\n"
        "links:\n- {between: [a, c], latency_s: 0.5, bandwidth: 1000}\n"
    )
    network = WanNetwork.load(file)
    assert network.seconds(2, 0, 500) == 1.0
    assert network.seconds(1, 2, 1) == math.inf
    assert network.seconds(0, 1, 0) == pytest.approx(0.096)
    network.save(file)
    assert WanNetwork.load(file) == network
    file.write_text("nodes:\n- {name: a, region: oregonn}\n")
    with pytest.raises(MachineError, match="did you mean 'oregon'"):
        WanNetwork.load(file)
    with pytest.raises(MachineError, match="that no other node has"):
        WanNetwork(nodes=(WanNode(name="a"), WanNode(name="a")))
    with pytest.raises(MachineError, match="the name of a node"):
        WanNetwork(
            nodes=(WanNode(name="a"),),
            links=(NodeLink(between=("a", "x"), latency_s=0, bandwidth=1),),
        )


def islands(*links: tuple[str, str]) -> WanNetwork:
    return WanNetwork(
        nodes=tuple(WanNode(name=name) for name in "abcd"),
        links=tuple(NodeLink(between=pair, latency_s=0.1, bandwidth=1e8) for pair in links),
    )


def test_nodes_out_of_reach_are_refused() -> None:
    with pytest.raises(PlanError, match="c, d without a way to a"):
        plan(islands(("a", "b"), ("c", "d")), RouteTask(stages=2))
    # All are connected, and yet the nodes of one stage are not.
    with pytest.raises(PlanError, match="stages of 3, 1 nodes"):
        plan(islands(("a", "b"), ("b", "c"), ("c", "d")), RouteTask(stages=2, sizes=(3, 1)))


def test_what_no_plan_can_do_names_the_constraint() -> None:
    problem = wide(0)
    tight = replace(problem, in_flight=(1,) * 6 + (0, 0) + (1, 1))
    with pytest.raises(PlanError, match=r"stage 2.*nodes 6, 7.*C2.*binding.*T1"):
        plan_routes(tight)
    with pytest.raises(PlanError, match=r"stage 0.*all micro-batches \(C1\).*T1"):
        plan_routes(replace(problem, in_flight=(0,) + (1,) * 9))
    # One node of a stage without room is simply not visited.
    partly = replace(problem, in_flight=(2,) * 6 + (0,) + (2,) * 3)
    routes = plan_routes(partly, effort=5)
    assert violation(partly, routes) == ""
    assert all(6 not in routes.nodes(mb) for mb in range(10))
    with pytest.raises(PlanError, match=r"keep = 5: expected 1 to 4"):
        plan_routes(replace(problem, keep=5))
    alone = tuple(tuple(0 if a == b else None for b in range(10)) for a in range(10))
    with pytest.raises(PlanError, match="routes from node 0"):
        plan_routes(replace(problem, links=alone))


def test_task_refuses_numbers_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="keep = 7: expected 1 to 6"):
        RouteTask(stages=6, keep=7)
    with pytest.raises(ConfigError, match="6 numbers, one for each stage"):
        RouteTask(stages=6, sizes=(1, 2))
    with pytest.raises(PlanError, match="add up to 20 nodes"):
        plan(WanNetwork.wan(20), RouteTask(stages=2, sizes=(1, 2)))


@pytest.mark.parametrize("swap", [False, True])
def test_executed_times_are_the_planned_ones(swap: bool) -> None:
    plans = plan(
        WanNetwork.wan(9), RouteTask(stages=4, keep=3, swap=swap, microbatches=6, effort=5)
    )
    assert violation(plans.problem, plans.routes) == ""
    plans.schedule.validate()
    # The clock of the solver has a thousandth of a forward pass.
    assert plans.timeline.makespan <= plans.routes.makespan * plans.tick_s * 1.01
    planned = {}
    for mb, route in enumerate(plans.routes.passes):
        for one in route:
            planned[one.kind, plans.problem.stage_of[one.node], mb] = one
    cells = plans.schedule.cell_of
    for rank, op, start, _ in plans.timeline.events():
        if cells[op.stage] == 4:
            continue
        one = planned[op.kind, cells[op.stage], op.mb]
        assert one.node == rank
        assert start <= one.start * plans.tick_s + 0.05

"""Planners of paths: the colouring holds, single paths reach spraying, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.path_jobs import times_of_jobs
from shoal.core.errors import ConfigError, PlanError
from shoal.cost.network.collectives import collective, place
from shoal.cost.network.fabric import DegradedLink, LeafSpine
from shoal.cost.network.flows import Flows, demand, link_bytes, lower_bound_s, worst_bytes
from shoal.cost.network.simulate import simulate
from shoal.plan.paths import PATH_PLANNERS
from shoal.plan.paths.c4p import C4P, measured_rates, reweighted
from shoal.plan.paths.colouring import assign
from shoal.plan.paths.compare import busiest, compare, plan_paths
from shoal.plan.paths.ecmp import ECMP
from shoal.plan.paths.greedy import GreedyPaths
from shoal.plan.paths.lp import MinMaxLP, least_worst
from shoal.plan.paths.split import SplitPaths
from shoal.plan.paths.spray import Spray


def permutation(fabric: LeafSpine, seed: int) -> Flows:
    hosts = np.arange(fabric.num_hosts)
    return Flows.of(hosts, np.random.default_rng(seed).permutation(hosts), 1e9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))
def test_every_vertex_gets_its_share_of_every_colour(
    seed: int, colours: int, senders: int, receivers: int
) -> None:
    count = np.random.default_rng(seed).integers(0, 5, (senders, receivers))
    assigned = assign(count, colours)
    assert (assigned.sum(0) == count).all()
    assert (assigned >= 0).all()
    for axis in (1, 2):
        sums, whole = assigned.sum(axis), count.sum(axis - 1)
        assert (sums >= whole // colours).all()
        assert (sums <= -(-whole // colours)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_koenig_needs_as_many_colours_as_the_highest_degree(seed: int, size: int) -> None:
    """With so many colours, each is a matching: no two of its edges meet."""
    count = np.random.default_rng(seed).integers(0, 4, (size, size))
    degree = int(max(count.sum(0).max(), count.sum(1).max(), 1))
    assigned = assign(count, degree)
    assert assigned.sum(1).max() <= 1
    assert assigned.sum(2).max() <= 1


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([(4, 3), (6, 4), (8, 8), (5, 6), (3, 7), (2, 1)]))
def test_split_reaches_spraying_and_the_lp(seed: int, shape: tuple[int, int]) -> None:
    fabric = LeafSpine(leaves=6, hosts=shape[0], spines=shape[1], latency_s=0.0)
    flows = permutation(fabric, seed)
    paths = SplitPaths().paths(flows, fabric)
    paths.check(flows, fabric)
    worst = worst_bytes(flows, paths, fabric)[0]
    assert worst == pytest.approx(worst_bytes(flows, Spray().paths(flows, fabric), fabric)[0])
    least, shares = least_worst(1e9 * demand(flows, fabric), fabric)
    assert worst / fabric.bandwidth == pytest.approx(least)
    assert shares.sum(2) == pytest.approx(1e9 * demand(flows, fabric))
    took = simulate(flows, paths, fabric).phase_s
    assert took == pytest.approx(lower_bound_s(flows, fabric))


def test_split_splits_as_little_as_it_can() -> None:
    """8 hosts over 8 spines need no splitting; 8 over 6 need three pieces, not six."""
    hosts = np.arange(64)
    away = Flows.of(hosts, (hosts + 8) % 64, 1.0)  # every flow leaves its leaf
    whole = SplitPaths().paths(away, LeafSpine(leaves=8, hosts=8, spines=8))
    assert len(whole) == 64
    cut = SplitPaths().paths(away, LeafSpine(leaves=8, hosts=8, spines=6))
    assert np.bincount(cut.flow).max() <= 3
    assert np.allclose(cut.share * 3, np.round(cut.share * 3))


def test_greedy_fails_where_split_does_not() -> None:
    fabric = LeafSpine(leaves=8, hosts=4, spines=4)
    ratios = []
    for seed in range(10):
        flows = permutation(fabric, seed)
        sprayed = worst_bytes(flows, Spray().paths(flows, fabric), fabric)
        ratios.append(
            worst_bytes(flows, GreedyPaths().paths(flows, fabric), fabric)[0] / sprayed[0]
        )
    assert max(ratios) > 1.2


@pytest.mark.parametrize("name", PATH_PLANNERS)
@pytest.mark.parametrize(
    "fabric",
    [
        LeafSpine(leaves=4, hosts=4, spines=3),
        LeafSpine(leaves=4, hosts=4, spines=4, rails=2),
        LeafSpine(leaves=4, hosts=4, spines=4, ports=2),
        LeafSpine(leaves=4, hosts=4, spines=4, health=(DegradedLink(leaf=1, spine=2, share=0.0),)),
    ],
    ids=["plain", "rails", "ports", "broken"],
)
def test_bytes_are_conserved(name: str, fabric: LeafSpine) -> None:
    """What leaves a leaf and what reaches one is what its flows ask for, phase after phase."""
    if name == "split" and not fabric.uniform:
        with pytest.raises(PlanError, match="lp and c4p plan around"):
            plan_paths(name, permutation(fabric, 0), fabric)
        return
    flows = collective("all_to_all", place(fabric, "random", seed=1), 1e6).flows
    paths = plan_paths(name, flows, fabric, seed=3)
    up, down = link_bytes(flows, paths, fabric)
    size = flows.size[paths.flow] * paths.share
    first, last = paths.ends(flows, fabric)
    away = paths.spine != -1
    assert up.sum(1) == pytest.approx(np.bincount(first[away], size[away], fabric.leaves))
    assert down.sum(1) == pytest.approx(np.bincount(last[away], size[away], fabric.leaves))
    # A spine keeps nothing.
    assert up.sum(0) == pytest.approx(down.sum(0))
    assert (up[fabric.uplinks == 0] == 0).all()


def test_hashing_is_seeded() -> None:
    fabric = LeafSpine(leaves=4, hosts=4, spines=4)
    flows = permutation(fabric, 0)
    one, same, other = (ECMP().paths(flows, fabric, seed=s).spine for s in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


def test_lp_plans_around_slow_links() -> None:
    health = (DegradedLink(leaf=0, spine=0, share=0.25), DegradedLink(leaf=2, spine=1, share=0.0))
    fabric = LeafSpine(leaves=4, hosts=4, spines=4, latency_s=0.0, health=health)
    flows = permutation(fabric, 5)
    least = least_worst(1e9 * demand(flows, fabric), fabric)[0]
    paths = MinMaxLP(pieces=8).paths(flows, fabric)
    up, down = link_bytes(flows, paths, fabric)
    live = fabric.uplinks > 0
    worst = max((up[live] / fabric.uplinks[live]).max(), (down[live] / fabric.uplinks[live]).max())
    assert least <= worst * (1 + 1e-9)
    assert worst <= 1.25 * least


def test_c4p_keeps_links_within_one_of_the_mean() -> None:
    for shape in ((8, 8), (8, 6), (5, 3)):
        fabric = LeafSpine(leaves=8, hosts=shape[0], spines=shape[1])
        flows = permutation(fabric, 1)
        up, down = link_bytes(flows, C4P().paths(flows, fabric), fabric)
        for load in (up / 1e9, down / 1e9):
            assert (load.max(1) <= load.mean(1) + 1).all()


def test_c4p_leaves_bad_links_out_and_balances_receiving_ports() -> None:
    bad = LeafSpine(leaves=8, hosts=8, spines=8, health=(DegradedLink(leaf=2, spine=3, share=0.1),))
    flows = permutation(bad, 2)
    paths = C4P().paths(flows, bad)
    first, last = paths.ends(flows, bad)
    assert not ((paths.spine == 3) & ((first == 2) | (last == 2))).any()
    assert "left out 1 pairs" in paths.notes[0]
    assert busiest(flows, paths, bad) <= 2
    ports = LeafSpine(leaves=8, hosts=8, spines=8, ports=2)
    ring = collective("all_reduce", place(ports, "random", seed=4), 1e9).flows
    result = C4P().paths(ring, ports)
    assert np.bincount(result.dst_port).tolist() == [32, 32]
    assert (result.src_port == result.dst_port).all()


def test_weights_follow_what_links_give() -> None:
    """One uplink loses three quarters after planning: bytes move to the flow's other connection."""
    fabric = LeafSpine(leaves=8, hosts=4, spines=8, ports=2, latency_s=0.0)
    flows = collective("all_reduce", place(fabric, "random", seed=1), 1e9).flows
    paths = C4P().paths(flows, fabric)
    first, _ = paths.ends(flows, fabric)
    at = int(np.flatnonzero(paths.spine >= 0)[0])
    health = (DegradedLink(leaf=int(first[at]), spine=int(paths.spine[at]), share=0.25),)
    worse = LeafSpine.model_validate(fabric.model_dump() | {"health": health})
    stuck = simulate(flows, paths, worse).phase_s[0]
    rates = measured_rates(flows, paths, worse)
    moved = reweighted(paths, rates)
    moved.check(flows, worse)
    assert simulate(flows, moved, worse).phase_s[0] < 0.6 * stuck
    with pytest.raises(PlanError, match="one for each connection"):
        reweighted(paths, rates[:-1])


def test_jobs_on_one_fabric() -> None:
    planned, hashed = times_of_jobs("c4p", seed=1), times_of_jobs("ecmp", seed=1)
    assert planned.busiest == 1
    assert hashed.busiest >= 2
    assert all(h / p >= 1.15 for h, p in zip(hashed.job_s, planned.job_s, strict=True))


def test_incast_is_said() -> None:
    fabric = LeafSpine(leaves=4, hosts=2, spines=2)
    into_one = Flows.of([2, 3, 4], [0, 0, 0], 1e6)
    (note,) = SplitPaths().paths(into_one, fabric).notes
    assert "receives 3 flows" in note
    unequal = Flows.of([2, 3], [0, 1], np.array([1e6, 2e6]))
    assert "differ in size" in SplitPaths().paths(unequal, fabric).notes[0]


def test_comparison_counts_repeats() -> None:
    fabric = LeafSpine(leaves=4, hosts=4, spines=4, latency_s=0.0)
    job = collective("all_reduce", place(fabric, "random", seed=1), 16e9)
    split, spray = compare(job, fabric, ["split", "spray"])
    assert split.seconds == pytest.approx(spray.seconds) == pytest.approx(split.bound_s)
    assert split.seconds == pytest.approx(30 * 1e9 / 50e9)
    assert split.up.sum() == pytest.approx(spray.up.sum())
    assert (split.congestion, spray.busiest) == (pytest.approx(1.0), 0)


def test_leaves_without_a_common_spine_are_named() -> None:
    health = (DegradedLink(leaf=0, spine=0, share=0.0), DegradedLink(leaf=1, spine=1, share=0.0))
    fabric = LeafSpine(leaves=2, hosts=2, spines=2, health=health)
    flows = Flows.of([0, 1], [2, 3], 1e6)
    for name in ("lp", "c4p"):
        with pytest.raises(PlanError, match="no spine has links to both"):
            plan_paths(name, flows, fabric)


@pytest.mark.parametrize(
    "choice",
    [
        {"name": "split", "pieces": -1},
        {"name": "lp", "pieces": 0},
        {"name": "ecmp", "connections": -1},
        {"name": "c4p", "connections": 0},
        {"name": "c4p", "bad_below": 2.0},
    ],
    ids=str,
)
def test_options_are_checked(choice: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"path_planner.{choice['name']}"):
        PATH_PLANNERS.build(choice)

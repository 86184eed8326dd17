"""Flows over a fabric: fair rates hold their certificate, time passes as by hand, bytes stay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from max_min import certificate

from shoal.core.errors import ConfigError, MachineError, PlanError
from shoal.cost.network.collectives import ALGORITHMS, collective, jittered, place, together
from shoal.cost.network.fabric import DegradedLink, LeafSpine
from shoal.cost.network.fair import max_min_rates
from shoal.cost.network.flows import (
    SPRAYED,
    WITHIN,
    FlowPaths,
    Flows,
    link_bytes,
    lower_bound_s,
    worst_bytes,
)
from shoal.cost.network.simulate import simulate
from shoal.ir.machine import Fabric

SMALL = LeafSpine(leaves=2, hosts=2, spines=2, bandwidth=10.0, latency_s=0.0)


def pinned(flows: Flows, spines: list[int]) -> FlowPaths:
    return FlowPaths.of(np.arange(len(flows)), 1.0, np.array(spines), planner="hand")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 40), st.booleans())
def test_rates_are_max_min_fair(seed: int, count: int, weighted: bool) -> None:
    random = np.random.default_rng(seed)
    links = np.stack([random.choice(9, 3, replace=False) for _ in range(count)])
    weights = random.uniform(0.1, 1.0, links.shape) if weighted else None
    capacity = random.uniform(1.0, 9.0, 9)
    rates = max_min_rates(links, capacity, weights)
    assert certificate(links, capacity, rates, weights)
    # Less for one, or more for one, is not fair any more.
    for change in (0.9, 1.1):
        wrong = rates.copy()
        wrong[0] *= change
        assert not certificate(links, capacity, wrong, weights)


def test_rates_of_a_classic_line() -> None:
    """A long flow shares each of two links with short ones: 1/3 of the tighter, the rest left."""
    links = np.array([[0, 1], [0, 2], [0, 2], [1, 2]])
    rates = max_min_rates(links, np.array([3.0, 5.0, np.inf]))
    assert rates.tolist() == [1.0, 1.0, 1.0, 4.0]


def test_a_link_that_is_down_is_named() -> None:
    with pytest.raises(PlanError, match="flow 1: its rate would be 0 B/s"):
        max_min_rates(np.array([[0], [1]]), np.array([1.0, 0.0]))


def test_time_passes_as_by_hand() -> None:
    """Two flows on one uplink: halves until one ends, then all of it."""
    flows = Flows.of([0, 1], [2, 3], np.array([100.0, 50.0]))
    result = simulate(flows, pinned(flows, [0, 0]), SMALL)
    assert result.flow_s.tolist() == pytest.approx([15.0, 10.0])
    apart = simulate(flows, pinned(flows, [0, 1]), SMALL)
    assert apart.flow_s.tolist() == pytest.approx([10.0, 5.0])
    late = simulate(flows.starting(np.array([0.0, 4.0])), pinned(flows, [0, 0]), SMALL)
    assert late.flow_s.tolist() == pytest.approx([15.0, 14.0])
    waits = simulate(flows.starting(np.array([0.0, 40.0])), pinned(flows, [0, 0]), SMALL)
    assert waits.flow_s.tolist() == pytest.approx([10.0, 45.0])


def test_phases_do_not_meet() -> None:
    flows = Flows.of([0, 1], [2, 3], 100.0, phase=np.array([0, 1]))
    assert simulate(flows, pinned(flows, [0, 0]), SMALL).phase_s.tolist() == [10.0, 10.0]


def test_phases_together_are_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = LeafSpine(leaves=4, hosts=4, spines=3, latency_s=0.0)
    random = np.random.default_rng(3)
    flows = Flows.of(
        np.tile(np.arange(16), 5),
        np.concatenate([random.permutation(16) for _ in range(5)]),
        random.uniform(1e8, 2e8, 80),
        start_s=random.uniform(0, 1e-3, 80),
        phase=np.repeat(np.arange(5), 16),
    )
    first, last = fabric.leaf(flows.src), fabric.leaf(flows.dst)
    spine = np.where(first == last, WITHIN, random.integers(0, 3, 80))
    paths = FlowPaths.of(np.arange(80), 1.0, spine, planner="any")
    whole = simulate(flows, paths, fabric)
    for phase in range(5):
        own, rows = flows.of_phase(phase)
        alone = Flows.of(own.src, own.dst, own.size, start_s=own.start_s)
        part = FlowPaths.of(np.arange(16), 1.0, spine[rows], planner="any")
        assert simulate(alone, part, fabric).phase_s[0] == pytest.approx(whole.phase_s[phase])
    monkeypatch.setattr("shoal.cost.network.simulate._ROWS", 20)
    assert simulate(flows, paths, fabric).flow_s.tolist() == pytest.approx(whole.flow_s.tolist())
    coarse = simulate(flows, paths, fabric, resolution=0.01)
    assert coarse.events <= whole.events
    assert coarse.phase_s.tolist() == pytest.approx(whole.phase_s.tolist(), rel=0.05)


def test_spraying_takes_all_links_at_once() -> None:
    flows = Flows.of([0, 1], [2, 3], 100.0)
    spread = FlowPaths.of(np.arange(2), 1.0, np.full(2, SPRAYED), planner="spray")
    assert simulate(flows, spread, SMALL).flow_s.tolist() == pytest.approx([10.0, 10.0])
    up, down = link_bytes(flows, spread, SMALL)
    assert up.tolist() == [[100.0, 100.0], [0.0, 0.0]]
    assert down.tolist() == [[0.0, 0.0], [100.0, 100.0]]
    # A slow pair gets a smaller part of the packets, and all end together.
    lame = SMALL.model_copy(update={"health": (DegradedLink(leaf=0, spine=1, share=0.5),)})
    lame = LeafSpine.model_validate(lame.model_dump())
    slow = simulate(flows, spread, lame)
    assert slow.flow_s.tolist() == pytest.approx([200.0 / 15.0] * 2)
    assert worst_bytes(flows, spread, lame).tolist() == pytest.approx([200.0 / 1.5])


def test_nothing_beats_the_lower_bound() -> None:
    fabric = LeafSpine(leaves=4, hosts=4, spines=2, latency_s=0.0)
    flows = collective("all_reduce", place(fabric, "random", seed=2), 1e9).flows
    spread = np.where(fabric.leaf(flows.src) == fabric.leaf(flows.dst), WITHIN, SPRAYED)
    paths = FlowPaths.of(np.arange(16), 1.0, spread, planner="spray")
    bound = lower_bound_s(flows, fabric)
    assert simulate(flows, paths, fabric).phase_s == pytest.approx(bound)


def test_rails_and_ports_put_cards_on_leaves_of_their_own() -> None:
    rails = LeafSpine(leaves=4, hosts=2, spines=2, rails=2)
    assert rails.num_hosts == 8
    assert rails.leaf(np.arange(8)).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    inside = Flows.of([0], [1], 1e9)
    assert inside.inside(rails).all()
    assert simulate(inside, pinned(inside, [WITHIN]), rails).flow_s.tolist() == [0.0]
    ports = LeafSpine(leaves=4, hosts=2, spines=2, ports=2)
    assert ports.num_hosts == 4
    assert ports.port_bandwidth == 25e9
    assert ports.leaf(np.array([0, 1, 2, 3]), 1).tolist() == [1, 1, 3, 3]


def test_one_rail_of_a_machine() -> None:
    described = Fabric(
        leaves=4, hosts_per_leaf=8, spines=2, uplinks=4, rails=8, port_bandwidth=50e9
    )
    fabric = LeafSpine.of(described)
    assert (fabric.leaves, fabric.hosts, fabric.spines) == (4, 8, 8)
    assert fabric.bandwidth == fabric.uplinks[0, 0] == 50e9


@pytest.mark.parametrize("name", ALGORITHMS)
def test_collectives_send_what_they_must(name: str) -> None:
    """Bytes that a rank receives, by the collective's own arithmetic."""
    fabric = LeafSpine(leaves=4, hosts=2, spines=2)
    hosts = place(fabric, "strided")
    most = {
        "all_reduce": 2 * 7 / 8,
        "all_gather": 7 / 8,
        "reduce_scatter": 7 / 8,
        "all_to_all": 7 / 8,
        "broadcast": 7 / 8,
    }[name]
    for algorithm in ALGORITHMS[name]:
        result = collective(name, hosts, 8e6, algorithm=algorithm, fabric=fabric)
        sent = result.flows.size * result.repeats[result.flows.phase]
        total = sent.sum() / (8 * 8e6)
        assert total == pytest.approx(most), algorithm
        if algorithm != "direct":
            assert result.flows.most_ends() == 1


def test_jobs_run_together() -> None:
    fabric = LeafSpine(leaves=4, hosts=2, spines=2)
    hosts = place(fabric, "random", seed=1)
    rings = [collective("all_reduce", hosts[k : k + 4], 1e6) for k in (0, 4)]
    flows, job = together(rings)
    assert len(flows) == 8
    assert flows.size.tolist() == [2 * 3 * 1e6 / 4] * 8
    assert job.tolist() == [0] * 4 + [1] * 4
    with pytest.raises(PlanError, match="one, such as a ring's"):
        together([collective("broadcast", hosts, 1e6)])


@pytest.mark.parametrize("how", ["packed", "strided", "random"])
def test_placements_are_of_different_hosts(how: str) -> None:
    fabric = LeafSpine(leaves=4, hosts=4, spines=2)
    assert sorted(place(fabric, how).tolist()) == list(range(16))
    leaves = fabric.leaf(place(fabric, how, ranks=4))
    assert len(set(leaves.tolist())) == {"packed": 1, "strided": 4}.get(how, len(set(leaves)))


def test_bad_input_is_refused() -> None:
    with pytest.raises(MachineError, match="leaf 0 = 'no uplink'"):
        LeafSpine(leaves=2, spines=1, health=(DegradedLink(leaf=0, spine=0, share=0.0),))
    with pytest.raises(MachineError, match=r"multiple of rails x ports = 4"):
        LeafSpine(leaves=6, rails=2, ports=2)
    with pytest.raises(MachineError, match="leaf below 2"):
        LeafSpine(leaves=2, health=(DegradedLink(leaf=2, spine=0, share=0.5),))
    with pytest.raises(MachineError, match="one entry a pair"):
        LeafSpine(leaves=2, health=(DegradedLink(leaf=0, spine=0, share=0.5),) * 2)
    with pytest.raises(PlanError, match="a host below 4"):
        simulate(Flows.of([0], [9], 1.0), pinned(Flows.of([0], [9], 1.0), [0]), SMALL)
    with pytest.raises(PlanError, match=r"flows.dst = '1 values': expected 2"):
        Flows.of([0, 1], [1], 1.0)
    with pytest.raises(PlanError, match="no negative number"):
        Flows.of([0], [1], -1.0)
    flows = Flows.of([0, 1], [2, 3], 1.0)
    with pytest.raises(PlanError, match="without a spine"):
        pinned(flows, [WITHIN, 0]).check(flows, SMALL)
    with pytest.raises(PlanError, match="spine 7; there are 0 to 1"):
        pinned(flows, [7, 0]).check(flows, SMALL)
    with pytest.raises(PlanError, match=r"flow 1 has 0 of its bytes"):
        FlowPaths.of(np.array([0]), 1.0, np.array([0]), planner="half").check(flows, SMALL)
    down = LeafSpine(
        leaves=2, hosts=2, spines=2, health=(DegradedLink(leaf=0, spine=0, share=0.0),)
    )
    with pytest.raises(PlanError, match="a link of it is down"):
        pinned(flows, [0, 1]).check(flows, down)
    with pytest.raises(ConfigError, match="resolution"):
        simulate(flows, pinned(flows, [0, 1]), SMALL, resolution=1.0)
    with pytest.raises(PlanError, match="jitter of start"):
        jittered(flows, np.ones(1), start=2.0)
    with pytest.raises(PlanError, match="a power of two"):
        collective("all_reduce", [0, 1, 2], 1.0, algorithm="halving_doubling")
    with pytest.raises(PlanError, match="did you mean 'all_reduce'"):
        collective("allreduce", [0, 1], 1.0)
    with pytest.raises(PlanError, match="a host of its own"):
        collective("all_reduce", [1, 1], 1.0)
    with pytest.raises(PlanError, match="equally many on each"):
        collective("all_reduce", [0, 1, 2], 1.0, algorithm="hierarchical", fabric=SMALL)
    with pytest.raises(PlanError, match="1 to 4 hosts"):
        place(SMALL, ranks=5)

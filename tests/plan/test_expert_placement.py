"""Copies of popular experts: who gets them, and which of them computes which token."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from shoal.claims.lab.rearranged import RearrangedPlacement
from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.plan.placement.fssdp import FSSDP, sender
from shoal.plan.placement.owners import even_owners, in_order, only_owners
from shoal.plan.placement.protocols import Devices, LinkBudget, LoadForecast
from shoal.plan.placement.routing import balanced, routed


def least_busiest(loads, held):
    """By a linear program, the least that the busiest device can have."""
    experts, devices = held.shape
    places = list(zip(*np.nonzero(held), strict=True))
    cost = np.zeros(len(places) + 1)
    cost[-1] = 1.0
    sums = np.zeros((experts, len(places) + 1))
    caps = np.zeros((devices, len(places) + 1))
    caps[:, -1] = -1.0
    for number, (expert, device) in enumerate(places):
        sums[expert, number] = caps[device, number] = 1.0
    return linprog(cost, caps, np.zeros(devices), sums, loads).fun


@st.composite
def held(draw, most_experts=6, most_devices=4):
    """Loads, and who has what."""
    experts, devices = draw(st.integers(1, most_experts)), draw(st.integers(1, most_devices))
    loads = np.array(draw(st.lists(st.integers(0, 50), min_size=experts, max_size=experts)), float)
    flags = np.array(
        [draw(st.lists(st.booleans(), min_size=devices, max_size=devices)) for _ in range(experts)]
    ).reshape(experts, devices)
    for row in flags:
        row[draw(st.integers(0, devices - 1))] = True
    return loads, flags


@settings(deadline=None, max_examples=60)
@given(held())
def test_shares_make_the_busiest_device_as_idle_as_a_linear_program(given_):
    loads, flags = given_
    share = balanced(loads, flags)
    assert (share >= 0).all()
    assert not share[~flags].any()
    assert share.sum(1) == pytest.approx(loads)
    wanted = least_busiest(loads, flags)
    assert share.sum(0).max() == pytest.approx(wanted, rel=0.02, abs=0.01 * loads.sum() + 1e-9)


@settings(deadline=None, max_examples=60)
@given(held(), st.integers(0, 1000), st.booleans())
def test_every_token_goes_to_one_copy(given_, seed, nodes):
    _, flags = given_
    experts, count = flags.shape
    devices = Devices(count, 2 if nodes and count % 2 == 0 else 1)
    counts = np.random.default_rng(seed).integers(0, 20, (count, experts))
    rows = routed(counts, flags, devices)
    assert (rows >= 0).all()
    assert (rows.sum(2) == counts).all()
    assert not rows.sum(0)[~flags].any()
    share = balanced(counts.sum(0).astype(float), flags)
    assert (np.abs(rows.sum(0) - share) < 1).all()
    assert (rows == routed(counts, flags, devices)).all()


def test_the_nearest_copy_is_taken_first():
    devices = Devices(4, 2)
    flags = np.array([[True, False, True, False]])
    rows = routed(np.array([[8], [2], [3], [7]]), flags, devices)
    assert rows[:, 0].tolist() == [[8, 0, 0, 0], [2, 0, 0, 0], [0, 0, 3, 0], [0, 0, 7, 0]]


@pytest.mark.parametrize("seed", range(40))
def test_greedy_copies_are_near_the_best(seed):
    source = np.random.default_rng(seed)
    experts, slots = int(source.integers(3, 5)), int(source.integers(1, 3))
    devices = Devices(3, 1)
    loads = source.integers(1, 100, experts).astype(float)
    owner = in_order(experts, devices)
    result = FSSDP(slots=slots, slack=0.0).place(loads, owner, devices)
    assert (result.sum(0) - only_owners(owner, devices).sum(0) <= slots).all()
    free = [np.flatnonzero(owner != device) for device in range(3)]
    choices = [
        [mine for size in range(slots + 1) for mine in itertools.combinations(one, size)]
        for one in free
    ]
    best = np.inf
    for chosen in itertools.product(*choices):
        flags = only_owners(owner, devices)
        for device, extra in enumerate(chosen):
            flags[list(extra), device] = True
        best = min(best, balanced(loads, flags).sum(0).max())
    assert balanced(loads, result).sum(0).max() <= 1.25 * best


def test_no_more_is_copied_than_is_of_use_or_there_is_room_for():
    devices = Devices(4, 2)
    owner = in_order(8, devices)
    even = np.ones(8)
    popular = np.array([90.0, 1, 1, 1, 1, 1, 1, 1])
    assert (FSSDP().place(even, owner, devices, 9) == only_owners(owner, devices)).all()
    busy = LinkBudget(1.0, 2.0, 2.0)
    for slots, budget in ((0, None), (2, busy)):
        nothing = FSSDP(slots=slots).place(popular, owner, devices, budget)
        assert (nothing == only_owners(owner, devices)).all()
    copies = FSSDP(slots=1).place(popular, owner, devices)
    assert copies[0].all()
    assert copies[1:].sum() == 7
    # The owner has time for one far copy, and the node that got it for another near one.
    some = FSSDP(slots=1).place(popular, owner, devices, LinkBudget(1.0, 0.3, 0.8))
    assert some[0].tolist() == [True, False, True, True]


def test_a_node_that_has_a_copy_sends_it_on():
    devices = Devices(4, 2)
    owner = np.array([0])
    flags = only_owners(owner, devices)
    assert sender(0, 1, owner, flags, devices) == 0
    assert sender(0, 3, owner, flags, devices) == 0
    flags[0, 2] = True
    assert sender(0, 3, owner, flags, devices) == 2


def test_owners_of_popular_experts_are_apart():
    devices = Devices(4, 2)
    owner = even_owners(np.array([50.0, 40, 30, 20, 1, 1, 1, 1, 1]), devices)
    assert sorted(np.bincount(owner).tolist()) == [2, 2, 2, 3]
    assert len(set(owner[:4].tolist())) == 4
    assert owner[0] // 2 != owner[1] // 2
    for loads in (np.ones(8), np.arange(8.0)):
        assert np.bincount(even_owners(loads, devices)).tolist() == [2, 2, 2, 2]


def test_owners_change_only_where_that_pays():
    devices = Devices(4, 2)
    loads = np.array([40.0, 40, 1, 1, 1, 1, 1, 1])
    placer = FSSDP()
    first = placer.owners(loads, devices)
    assert (first == in_order(8, devices)).all()
    second = placer.owners(loads, devices, first)
    assert np.bincount(second).tolist() == [2, 2, 2, 2]
    assert second[0] // 2 != second[1] // 2  # popular ones on nodes of their own
    assert (placer.owners(loads, devices, second) == second).all()
    # A little more of one is no reason to move, unless every little counts.
    now = np.array([0, 1, 1, 0, 2, 2, 3, 3])
    uneven = np.array([40.0, 40, 2, 1, 1, 1, 1, 1])
    assert (placer.owners(uneven, devices, now) == now).all()
    assert (FSSDP(slack=0.0).owners(uneven, devices, now) != now).any()
    assert (FSSDP().every, FSSDP(resharding_every=None).every) == (100, 0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6))
def test_owners_never_change_for_the_worse(count, each, seed):
    devices = Devices(count, 1)
    loads = np.random.default_rng(seed).integers(0, 100, count * each).astype(float)
    now = in_order(count * each, devices)
    for placer in (RearrangedPlacement(), FSSDP(), FSSDP(slack=0.0)):
        new = placer.owners(loads, devices, now)
        assert np.bincount(new, loads, count).max() <= np.bincount(now, loads, count).max()


def test_loads_are_expected_by_what_was():
    known = LoadForecast(2, keep=0.5)
    known.see(np.array([4, 0]))
    assert known.loads_E.tolist() == [4, 0]
    known.see(np.array([0, 2]))
    assert known.loads_E.tolist() == [2, 1]
    with pytest.raises(ConfigError, match=r"3 experts.*one load of each of 2 experts"):
        known.see(np.zeros(3))


def test_what_cannot_be():
    placers = table("placer")
    with pytest.raises(ConfigError, match=r"fssdp.slots = -1.*at least 0"):
        placers.build({"name": "fssdp", "slots": -1})
    with pytest.raises(ConfigError, match=r"rearranged.every = 0.*1 or more"):
        RearrangedPlacement(every=0)
    with pytest.raises(ConfigError, match=r"devices = 4.*at most 3.*own no expert"):
        placers.build("owners").owners(np.ones(3), Devices(4, 1))
    with pytest.raises(ConfigError, match=r"devices of a node = 3.*divisor of 4"):
        Devices(4, 3)

"""Interleaved optimizer updates: the timeline, by hand and by its bounds; the stride's formula."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, PlanError
from shoal.plan.memory.stride import (
    HOST_ONLY,
    UpdatePattern,
    UpdateRates,
    choose,
    steady_stride,
    timeline,
)

# Seconds by hand: a sub-group of 12 takes 1 s and 1 s and 1 s on the host, 3 s + 2 s + 3 s else.
RATES = UpdateRates(host=12, device=6, convert=12, link=12)


def test_by_hand():
    alone = timeline(RATES, [12] * 3, UpdatePattern(groups=3))
    # Pushes of half a second follow the updates of 2 s.
    assert alone.seconds == pytest.approx(3 * 2 + 0.5)
    assert alone.busy_s == pytest.approx({"host": 6.0, "in": 1.5})
    mixed = timeline(RATES, [12] * 3, UpdatePattern(groups=3, stride=3))
    assert mixed.pattern.on_device() == (False, False, True)
    # The fetch ends at 3 s; the first push came at 2 s and had to wait for it.
    assert mixed.seconds == pytest.approx(5.0)
    assert mixed.flushed_s == pytest.approx(8.0)
    one_way = timeline(RATES.model_copy(update={"duplex": False}), [12] * 3, mixed.pattern)
    assert one_way.busy_s["in"] == pytest.approx(3 + 2 * 0.5 + 3)
    assert one_way.seconds >= mixed.seconds


def test_two_slots_hold_the_third_back():
    pattern = UpdatePattern(groups=3, stride=2, mirrored=True)
    assert pattern.on_device() == (True, False, True)
    all_there = UpdatePattern(groups=4, stride=4, mirrored=True)
    assert all_there.on_device() == (True, True, True, False)
    result = timeline(UpdateRates(host=1e9, device=12, convert=1e9, link=36), [12] * 4, all_there)
    # Fetches of 1 s end at 1, 2; updates at 2, 3; flushes at 3, 4: the third is fetched from 3 on.
    assert result.seconds == pytest.approx(5.0)


def test_residents_cost_no_way():
    result = timeline(RATES, [12] * 2, UpdatePattern(groups=2, residents=2))
    assert result.busy_s == {"device": pytest.approx(4.0)}
    with pytest.raises(PlanError, match="static_residents = 3: there are 2"):
        choose(RATES, [12] * 2, residents=3)
    with pytest.raises(ConfigError, match="2 sizes"):
        timeline(RATES, [12], UpdatePattern(groups=2))


@settings(max_examples=60)
@given(
    st.tuples(*[st.floats(0.1, 100.0)] * 4),
    st.lists(st.integers(1, 50), min_size=1, max_size=9),
    st.integers(0, 2),
    st.booleans(),
)
def test_no_update_is_shorter_than_its_busiest_resource(rates, sizes, residents, duplex):
    host, device, convert, link = rates
    machine = UpdateRates(host=host, device=device, convert=convert, link=link, duplex=duplex)
    residents = min(residents, len(sizes))
    best, played = choose(machine, sizes, residents=residents)
    assert len(played) >= 1 and best.seconds == min(one.seconds for one in played)
    for one in played:
        assert one.flushed_s >= max(one.busy_s.values()) * (1 - 1e-9)
        assert one.flushed_s <= sum(one.busy_s.values()) * (1 + 1e-9)
        assert sum(one.pattern.on_device()) <= len(sizes)
        assert one.seconds <= one.flushed_s


@settings(max_examples=60)
@given(st.tuples(*[st.floats(0.5, 50.0)] * 4))
def test_at_the_steady_stride_nobody_waits_long(rates):
    host, device, convert, link = rates
    machine = UpdateRates(host=host, device=device, convert=convert, link=link)
    stride = steady_stride(machine, 10)
    assert stride >= 2
    groups = 6 * stride
    result = timeline(machine, [10] * groups, UpdatePattern(groups=groups, stride=stride))
    alone = timeline(machine, [10] * groups, UpdatePattern(groups=groups))
    if result.busy_s["in"] > result.busy_s["host"]:
        return  # the formula forgets that pushes and fetches share the way
    # It ends no more than a trip after whoever has more to do: the formula adds the way of the
    # pushes to the host's time, and where they pass beside it the device may be busier.
    assert result.seconds <= max(alone.seconds, result.busy_s["device"]) + machine.device_s(10)


def test_the_published_machine():
    rates = UpdateRates(host=1.5e9, device=25e9, convert=8e9, link=12e9)
    best, played = choose(rates, [10**8] * 20)
    host = next(one for one in played if one.pattern.stride == HOST_ONLY)
    assert host.seconds / best.seconds >= 2.0
    assert best.pattern.describe() in ("every 2. on the device", "every 2. on the host") or (
        best.pattern.mirrored
    )

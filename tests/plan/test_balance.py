"""Which replica gets a request."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.plan.balance.replicas.prefix_aware import PrefixAware
from shoal.plan.balance.replicas.prefixes import Prefixes, chain

PROMPTS = st.one_of(st.text("ab", max_size=60), st.lists(st.integers(0, 1), max_size=60))


def idle(number):
    return dict.fromkeys(range(number), 0)


@given(PROMPTS, PROMPTS, st.integers(1, 7))
def test_blocks_are_alike_as_far_as_prompts_are(a, b, size):
    same = sum(x == y for x, y in zip(chain(a, size, 99), chain(b, size, 99), strict=False))
    common = 0
    if type(a) is type(b):
        while common < min(len(a), len(b)) and a[common] == b[common]:
            common += 1
    assert same == common // size
    assert len(chain(a, size, 99)) == len(a) // size
    assert chain(a, size, 3) == chain(a, size, 99)[:3]


def test_salts_are_apart():
    assert set(chain("a" * 64, 8, 9, salt="x")).isdisjoint(chain("a" * 64, 8, 9))


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=12), st.integers(0, 2)), max_size=30),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_matches_are_those_of_brute_force(sent, prompt):
    prefixes = Prefixes(10_000)
    for tokens, replica in sent:
        prefixes.add(chain(tokens, 2, 99), replica)
    matches = prefixes.matches(chain(prompt, 2, 99), [0, 1, 2])
    for replica in range(3):
        most = 0
        for blocks in range(1, len(prompt) // 2 + 1):
            begin = prompt[: 2 * blocks]
            if any(r == replica and tokens[: 2 * blocks] == begin for tokens, r in sent):
                most = blocks
        assert matches[replica] == most


def test_the_table_is_bounded_and_keeps_beginnings():
    prefixes = Prefixes(10)
    blocks = chain(list(range(100)), 2, 99)
    prefixes.add(blocks, 0)
    assert len(prefixes) == 10
    assert prefixes.matches(blocks, [0]) == {0: 10}
    prefixes.forget(0)
    assert len(prefixes) == 0


@pytest.mark.parametrize("name", ["prefix_aware", "least_loaded", "round_robin"])
def test_nobody_to_do_for_is_chosen_by_turns(name):
    balancer = table("balancer").build(name).build()
    chosen = [balancer.choose("", idle(3)) for _ in range(6)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2]
    assert {balancer.choose("", {1: 5}) for _ in range(3)} == {1}


@pytest.mark.parametrize("name", ["prefix_aware", "least_loaded"])
def test_the_idle_one_is_chosen(name):
    balancer = table("balancer").build(name).build()
    assert [balancer.choose("", {0: 2, 1: 1, 2: 9}) for _ in range(3)] == [1, 1, 1]


def test_prompts_follow_their_prefix_until_that_replica_is_busy():
    balancer = PrefixAware(block=4, open_blocks=2).build()
    prompt = "once upon a time there was a whale"
    home = balancer.choose(prompt, idle(4))
    assert {balancer.choose(prompt + str(i), idle(4)) for i in range(5)} == {home}
    blocks = len(prompt) // 4
    for load in range(9):
        chosen = balancer.choose("x", {home: load, (home + 1) % 4: 0})
        assert load == 0 or chosen != home
    fresh = PrefixAware(block=4, open_blocks=2).build()
    home = fresh.choose(prompt, idle(2))
    busy = {home: blocks // 2 - 1, 1 - home: 0}
    assert fresh.choose(prompt, busy) == home
    assert fresh.choose(prompt, {home: blocks // 2 + 1, 1 - home: 0}) == 1 - home
    fresh.forget(home)  # both had seen it by now
    assert fresh.choose(prompt, {home: 0, 1 - home: 1}) == 1 - home


def hits(name, conversations, turns):
    """Blocks of prompts found where they were sent, of conversations that take turns."""
    balancer = table("balancer").build(name).build()
    caches = [set(), set(), set()]
    value = total = 0
    for turn in range(turns):
        for number in range(conversations):
            prompt = f"{number:03d}" * 40 * (turn + 1)
            place = balancer.choose(prompt, idle(3))
            blocks = chain(prompt, 60, 99)
            total += len(blocks)
            value += sum(block in caches[place] for block in blocks)
            caches[place].update(blocks)
    return value / total


def test_conversations_stay_where_their_cache_is():
    shares = {name: hits(name, 20, 6) for name in ("prefix_aware", "round_robin")}
    assert shares["prefix_aware"] == pytest.approx(15 / 21)  # all but what is new in each turn
    assert shares["round_robin"] < 0.6


def test_load_is_spread_without_common_prefixes():
    balancer = PrefixAware().build()
    loads = idle(4)
    for number in range(400):
        loads[balancer.choose(f"{number:09d}" * 50, loads)] += 1
    assert all(abs(a - b) <= 1 for a, b in pairwise(loads.values()))


@pytest.mark.parametrize("option", ["block", "most_blocks", "entries", "open_blocks"])
def test_bad_options(option):
    with pytest.raises(ConfigError, match=f"balancer.prefix_aware.{option}"):
        PrefixAware(**{option: 0})

"""Swapping, block groups and fair scheduling, on a toy memory in which every slot is checked."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from toy_memory import Memory, next_token

from shoal.core.errors import ConfigError, ServeError
from shoal.cost.serving.simulator import SimulatedRunner, simulate
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import (
    Arrival,
    Chunk,
    Copy,
    HostLink,
    InFlight,
    Preemption,
    Request,
    SamplingParams,
    SchedulerLimits,
    Step,
    StepResult,
    Transfer,
)
from shoal.plan.batching import KV_MANAGERS, PREEMPTIONS, SCHEDULERS
from shoal.plan.batching.cache.blockgroups import GroupedBlocks
from shoal.plan.batching.cache.host import HostBlocks
from shoal.plan.batching.cache.runs import FreeRuns, joined

LIMITS = SchedulerLimits(max_running=5, max_step_tokens=12, max_position=40)
LINK = HostLink(copy_s=1e-3, bytes_per_s=1e6, block_bytes=100.0)
COST = FittedStepCost(step=1e-3, token=1e-3, prompt_pair=0, decode_key=0, chunk=0)
SYNCHRONOUS = {"name": "swap", "asynchronous": "never", "keep_host_copies": False, "join": False}


def request(name: str, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, list(prompt), len(prompt), params, **more)


def make(
    scheduler: Any, kv: Any, preempt: Any, *, tokens: int = 60, host: int = 120, **more: Any
) -> Any:
    limits = more.pop("limits", LIMITS)
    books = KV_MANAGERS.build(kv).build(tokens)
    preemption = PREEMPTIONS.build(preempt).build(
        books, limits, host_tokens=host, **{"link": LINK, "cost": COST, **more}
    )
    return SCHEDULERS.build(scheduler).build(books, limits, preemption)


VARIANTS = [
    (scheduler, kv, preempt)
    for scheduler in (
        {"name": "fair", "policy": "uniform", "frequency": 0.3},
        {"name": "fair", "policy": "markov", "frequency": 0.5},
        "fcfs",
    )
    for kv in (
        {"name": "paged", "block_size": 4},
        {"name": "paged", "block_size": 3, "prefix_reuse": False},
        {"name": "blockgroups", "block_size": 4, "init": 4},
        {"name": "contiguous", "block_size": 4},
    )
    for preempt in ("swap", SYNCHRONOUS, {"name": "swap", "asynchronous": "always"}, "auto")
]


def check(built: Any) -> None:
    built.kv.check_integrity(built.running)
    if hasattr(built.preemption, "check_integrity"):
        built.preemption.check_integrity()


def operations(scheduler: Any, kv: Any, preempt: Any, count: int, seed: int) -> int:
    """Add, run, preempt and abort at random; how often somebody was preempted."""
    draw = random.Random(seed)
    built = make(scheduler, kv, preempt, host=draw.choice([60, 80, 200]))
    memory = Memory(built.kv.block_size, seed)
    stems = [[draw.randrange(9) for _ in range(20)] for _ in range(3)]
    ended: list[list[int]] = []
    wanted: dict[str, list[int]] = {}
    preempted = 0
    for number in range(count):
        if draw.random() < 0.35 and built.num_waiting < 12:
            # Often the next turn of something that has ended.
            start = draw.choice(ended) if ended and draw.random() < 0.5 else draw.choice(stems)
            prompt = [*start[: draw.randrange(1, 26)], draw.randrange(9)]
            adapter = draw.choice([None, "a"])
            one = request(f"r{number}", prompt, draw.randrange(1, 14), adapter=adapter)
            tokens = list(prompt)
            while len(tokens) < min(len(prompt) + one.params.max_tokens, LIMITS.max_position):
                tokens.append(next_token(tokens))
            wanted[one.id] = tokens
            built.add(one)
        if draw.random() < 0.05 and built.requests:
            victim = draw.choice(list(built.requests))
            built.abort(victim)
            check(built)
        if draw.random() < 0.1 and built.running:
            victim = draw.choice(list(built.running.values()))
            built.lose(victim)
            preempted += 1
            check(built)
        step = built.plan(float(number))
        check(built)
        assert step or not built.requests, "there is work and nothing is planned"
        preempted += len(step.preempted)
        live = dict(built.requests)
        for output in built.commit(step, memory.execute(step), float(number) + 0.5):
            if output.finish:
                assert live[output.request_id].tokens == wanted[output.request_id]
                ended = [*ended[-4:], live[output.request_id].tokens]
        check(built)
    for _ in range(5000):
        if not built.requests:
            break
        step = built.plan(0.0)
        built.commit(step, memory.execute(step), 0.0)
    assert not built.requests, "somebody never ends"
    assert built.kv.num_free == built.kv.num_blocks
    return preempted


@pytest.mark.parametrize(("scheduler", "kv", "preempt"), VARIANTS, ids=str)
def test_twelve_thousand_random_operations(scheduler: Any, kv: Any, preempt: Any) -> None:
    """250 in each of 48 ways, all books checked after each, and no token lost."""
    assert operations(scheduler, kv, preempt, 250, seed=3) > 5


def test_the_oracle_sees_a_block_that_is_reused_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nobody to wait for transfers, tokens would be lost."""
    monkeypatch.setattr(InFlight, "touching", lambda self, blocks: set())
    with pytest.raises(AssertionError):
        for seed in range(20):
            kv = {"name": "paged", "block_size": 4, "prefix_reuse": False}
            scheduler = {"name": "fair", "policy": "uniform", "frequency": 0.5}
            operations(scheduler, kv, {"name": "swap", "asynchronous": "always"}, 300, seed)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_free_runs_are_maximal_and_lose_nothing(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 40))
    runs, taken = FreeRuns(number), []
    for _ in range(data.draw(st.integers(1, 40))):
        if runs.total and data.draw(st.booleans()):
            most = data.draw(st.integers(1, 12))
            first, count = runs.take(most, roomy=data.draw(st.booleans()))
            assert 1 <= count <= most
            taken.append((first, count))
        elif taken:
            first, count = taken.pop(data.draw(st.integers(0, len(taken) - 1)))
            kept = data.draw(st.integers(0, count))
            runs.give(first + kept, count - kept)
            if kept:
                taken.append((first, kept))
        runs.check_integrity()
        held = [block for first, count in taken for block in range(first, first + count)]
        assert sorted([*held, *runs.blocks()]) == list(range(number))


def test_the_shortest_run_that_is_long_enough_is_split() -> None:
    runs = FreeRuns(20)
    assert runs.take(20) == (0, 20)
    for first, count in ((0, 3), (5, 6), (13, 7)):
        runs.give(first, count)
    assert runs.take(4) == (5, 4)
    assert runs.take(50) == (13, 7)
    runs.give(3, 2)  # joins 0..2 before it; 5..8 behind it are taken
    assert runs.take(5) == (0, 5)
    assert joined([(1, 7), (2, 8), (3, 4), (9, 5)]) == (Copy(1, 7, 2), Copy(3, 4, 1), Copy(9, 5, 1))


def test_a_group_grows_in_place_and_a_spare_is_taken_back() -> None:
    kv = GroupedBlocks(10, 4, 4)
    a, b = request("a", [1]), request("b", [1])
    assert kv.allocate(a, 4)
    assert kv.allocate(b, 8)
    assert (a.blocks, b.blocks, kv.num_free) == ([0], [4, 5], 7)
    assert kv.stats()["blocks_spare"] == 5
    assert kv.allocate(b, 20)  # its spare, then what lies behind it
    assert b.blocks == [4, 5, 6, 7, 8]
    kv.check_integrity({"a": a, "b": b})
    c = request("c", [1])
    assert kv.allocate(c, 16)  # nothing is free but the spares of a and of b
    assert sorted([*a.blocks, *b.blocks, *c.blocks]) == list(range(10))
    assert kv.stats()["spares_reclaimed"] == 2
    kv.check_integrity({"a": a, "b": b, "c": c})
    assert not kv.allocate(a, 8)
    kv.free(b)
    kv.free(c)
    assert kv.allocate(a, 40)
    assert a.blocks == list(range(10)), "what was given back joined, and the group grew"


def test_a_request_wastes_less_than_a_block_beside_its_spare() -> None:
    built = make("fcfs", {"name": "blockgroups", "block_size": 4, "init": 4}, "swap", tokens=400)
    for number in range(5):
        built.add(request(f"r{number}", [1] * 7, 20))
    while built.requests:
        step = built.plan(0.0)
        held = sum(len(one.blocks) for one in built.running.values())
        for one in built.running.values():
            assert len(one.blocks) * 4 - len(one.tokens) < 4
        assert built.kv.stats()["blocks_used"] == held
        result = StepResult({c.request.id: [1] for c in step.chunks if c.yields})
        built.commit(step, result, 0.0)


def test_a_request_that_comes_back_sends_only_what_is_new() -> None:
    preempt = {"name": "swap", "asynchronous": "never"}
    built = make("fcfs", {"name": "blockgroups", "block_size": 4, "init": 4}, preempt)
    one = request("a", [1] * 10, 20)
    built.add(one)
    memory = Memory(4, 0)
    sent = []
    for turn in range(12):
        if turn in (3, 6, 7):
            built.lose(one)
        step = built.plan(0.0)
        sent += [(t.kind, sum(c.num_blocks for c in t.copies)) for t in step.transfers]
        built.commit(step, memory.execute(step), 0.0)
    # 12 tokens lie in 3 full blocks; 3 more in one that is partly full; then nothing is new
    # in between but the token of one step, in the same block.
    assert sent == [("out", 3), ("in", 3), ("out", 1), ("in", 4), ("out", 1), ("in", 4)]
    assert one.preemptions == 3


def test_the_next_turn_begins_with_what_the_last_one_left() -> None:
    built = make("fcfs", {"name": "blockgroups", "block_size": 4, "init": 4}, "swap")
    memory = Memory(4, 0)

    def serve(one: Request) -> None:
        built.add(one)
        while built.requests:
            step = built.plan(0.0)
            built.commit(step, memory.execute(step), 0.0)

    first = request("a", [1, 2, 3, 4, 5], 6)
    serve(first)
    second = request("b", [*first.tokens, 9, 9], 3)
    serve(second)
    assert second.n_cached == 8, "two full blocks of eleven tokens"
    stranger = request("c", [*first.tokens, 9, 9], 3, adapter="other")
    serve(stranger)
    assert stranger.n_cached == 0
    # A few common tokens are no reason to take a long copy apart.
    brief = request("d", [*first.tokens[:4], 7, 7], 3)
    serve(request("e", [*second.tokens, 9], 1))
    serve(brief)
    assert brief.n_cached == 0


def test_spare_copies_make_room_the_ended_and_the_least_important_first() -> None:
    host = HostBlocks(8, 4)
    ended, high, low, waiting = (request(name, range(12)) for name in "ehlw")
    for one, priority in ((ended, 0.0), (high, 1.0), (low, 2.0)):
        one.state, one.priority = "running", priority
        assert host.store(one, 8) == 0
    host.end(ended)
    assert host.store(waiting, 12) == 0  # 2 are free: one block of the ended one goes
    assert (host.covered(high), host.covered(low), host.num_free) == (8, 8, 0)
    host.check_integrity()
    assert host.store(waiting, 24) == 3
    assert (host.covered(high), host.covered(low)) == (8, 0)
    host.check_integrity()
    high.state = "arriving"
    assert host.store(waiting, 32) is None, "all there is of somebody is not given up"
    again = request("x", range(12))
    host.adopt(again)
    assert host.covered(again) == 0, "its digests are gone with its blocks"


def test_auto_takes_what_is_faster() -> None:
    kv = {"name": "blockgroups", "block_size": 4, "init": 4}

    def sent(**known: Any) -> int:
        built = make("fcfs", kv, "auto", **known)
        one = request("a", [1] * 20, 9)
        built.add(one)
        memory = Memory(4, 0)
        for _ in range(3):
            step = built.plan(0.0)
            built.commit(step, memory.execute(step), 0.0)
        built.lose(one)
        return len(built.plan(0.0).transfers)

    assert sent() == 2
    slow = HostLink(copy_s=1.0, bytes_per_s=1e6, block_bytes=100.0)
    assert sent(link=slow) == 0
    assert sent(link=None) == 0
    assert sent(host=0) == 0


def test_a_step_that_others_would_wait_in_is_not_held_up() -> None:
    """Somebody new gets blocks that are still copied out only when they are free of it."""
    kv = {"name": "paged", "block_size": 4, "prefix_reuse": False}
    built = make(
        {"name": "fair", "frequency": 0}, kv, {"name": "swap", "asynchronous": "always"}, tokens=24
    )
    built.limits = LIMITS
    for name, priority in (("a", 0.0), ("b", 2.0)):
        built.add(request(name, [1] * 6, 9, priority=priority))
    memory = Memory(4, 0)
    for _ in range(2):
        step = built.plan(0.0)
        built.commit(step, memory.execute(step), 0.0)
    built.add(request("c", [1] * 11, 2, priority=1.0))
    step = built.plan(0.0)
    assert [one.id for one in step.preempted] == ["b"]
    assert ([c.request.id for c in step.chunks], len(step.transfers)) == (["a"], 1)
    built.commit(step, StepResult({"a": [1]}), 0.0)
    assert [c.request.id for c in built.plan(0.0).chunks] == ["a"], "its blocks are not free yet"
    step = built.plan(0.0)
    built.commit(step, StepResult({"a": [1]}, done=frozenset({0})), 0.0)
    assert {c.request.id for c in built.plan(0.0).chunks} == {"a", "c"}


def test_fair_serves_sessions_alike_and_fcfs_does_not() -> None:
    def served(scheduler: Any) -> dict[str, int]:
        built = make(scheduler, {"name": "paged", "block_size": 4}, "swap", tokens=40)
        for number in range(12):
            owner = "greedy" if number < 10 else "modest"
            built.add(request(f"r{number}", [number] * 8, 20, session=owner))
        memory, counts = Memory(4, 0), {"greedy": 0, "modest": 0}
        for _ in range(40):
            step = built.plan(0.0)
            for output in built.commit(step, memory.execute(step), 0.0):
                name = "modest" if output.request_id in ("r10", "r11") else "greedy"
                counts[name] += len(output.tokens)
        return counts

    fair = served({"name": "fair", "policy": "vtc", "frequency": 0.25})
    assert fair["modest"] > 0.6 * fair["greedy"]
    assert served("fcfs")["modest"] == 0


@pytest.mark.parametrize("policy", ["markov", "uniform"])
def test_drawn_priorities_change_at_updates_only(policy: str) -> None:
    built = make(
        {"name": "fair", "policy": policy, "frequency": 0.25}, "paged", "recompute", host=0
    )
    requests = [request(f"r{n}", [n], 30) for n in range(5)]
    for one in requests:
        built.add(one)
    memory, seen = Memory(16, 0), []
    for _ in range(20):
        step = built.plan(0.0)
        seen.append(tuple(one.priority for one in requests))
        built.commit(step, memory.execute(step), 0.0)
    changes = [n for n in range(1, 20) if seen[n] != seen[n - 1]]
    assert changes
    assert all(n % 4 == 0 for n in changes)


def test_a_predicted_link_has_a_lane_for_each_direction() -> None:
    runner = SimulatedRunner(COST, HostLink(copy_s=1.0, bytes_per_s=10.0, block_bytes=10.0))
    one = request("a", [1])
    chunk = (Chunk(one, 0, 1),)
    out = Transfer(0, "out", "a", (Copy(0, 0, 2), Copy(5, 3, 1)))  # 2 copies, 3 blocks: 5 s
    back = Transfer(1, "in", "b", (Copy(0, 7, 1),))  # 2 s, beside it
    after = Transfer(2, "in", "c", (Copy(1, 0, 1),), after=(0,))  # 2 s from 5 s on
    result = runner.execute(Step(chunk, transfers=(out, back, after), at=10.0))
    assert (result.seconds, result.done) == (pytest.approx(2e-3), frozenset())
    result = runner.execute(Step(chunk, wait_for=(1,), at=11.0))
    assert (result.seconds, result.done) == (pytest.approx(1.002), {1})
    result = runner.execute(Step((), wait_for=(0, 2), at=13.0))
    assert (result.seconds, result.done) == (pytest.approx(2.0), {0})
    assert runner.execute(Step((), wait_for=(2,), at=15.0)).seconds == pytest.approx(2.0)


def test_a_simulation_swaps_and_loses_nothing() -> None:
    arrivals = [Arrival(0.01 * n, tuple(range(n, n + 12)), 16, f"s{n % 3}") for n in range(24)]
    result = {}
    for name, preempt in (("swap", "swap"), ("block", SYNCHRONOUS), ("none", "recompute")):
        built = make(
            {"name": "fair", "policy": "uniform", "frequency": 0.2},
            {"name": "blockgroups", "block_size": 4, "init": 4},
            preempt,
            host=0 if name == "none" else 400,
        )
        seen = simulate(built, COST, arrivals, link=LINK)
        assert [one.n_output for one in seen.served] == [16] * 24
        result[name] = seen
        assert (sum(one.switch_s for one in seen.served) > 0) == (name != "none")
    assert result["swap"].quantities()["total_s"] < result["block"].quantities()["total_s"]
    with pytest.raises(ServeError, match="has no link to copy over"):
        built = make("fcfs", {"name": "paged", "block_size": 4}, "swap", tokens=40)
        simulate(built, COST, arrivals)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: make("fcfs", "paged", "swap", host=39), "host_tokens = 39: expected at least 40"),
        (lambda: make("fcfs", "paged", "recompute", host=9), "preempt = recompute copies nothing"),
        (
            lambda: KV_MANAGERS.build({"name": "blockgroups", "init": 8}).build(64),
            "kv.blockgroups.init = 8: expected at most 4, the blocks of the cache",
        ),
        (lambda: KV_MANAGERS.build({"name": "blockgroups", "init": 0}), "at least 1"),
        (
            lambda: SCHEDULERS.build({"name": "fair", "frequency": -0.1}),
            r"scheduler.fair.frequency = -0.1: expected updates a step in \[0, 1\]",
        ),
        (lambda: SCHEDULERS.build({"name": "fair", "policy": "luck"}), "policy"),
        (lambda: SCHEDULERS.build({"name": "fair", "watermark": 1.0}), r"in \[0, 1\)"),
        (lambda: PREEMPTIONS.build({"name": "swap", "asynchronous": "maybe"}), "asynchronous"),
    ],
)
def test_bad_input(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wrong()


def test_preemptions_keep_their_promise() -> None:
    for name, host in (("recompute", 0), ("swap", 80), ("auto", 80), ("auto", 0)):
        assert isinstance(make("fcfs", "paged", name, host=host).preemption, Preemption)

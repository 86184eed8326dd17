"""Steps that are planned while others are under way give every request its own tokens, once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.ir import Request, SamplingParams, SchedulerLimits, StepResult
from shoal.plan.batching.schedulers.ahead import AheadScheduler

SCHEDULERS = ("fcfs", "prefill_first", "static", "fair")


def token(request: Request, place: int) -> int:
    """What follows the first ``place`` tokens of a request, whoever computes it and when."""
    return sum(request.tokens[:place]) * 31 % 97


@example("fcfs", 5, 6, [(1, 9), (10, 3), (4, 7)], [])  # one is let in again before its commit
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(SCHEDULERS),
    st.integers(1, 5),
    st.integers(3, 12),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    st.lists(st.integers(0, 60), max_size=3),
)
def test_tokens_and_books_whatever_is_under_way(scheduler, depth, blocks, sizes, aborts) -> None:
    kv = table("kv").build({"name": "paged", "block_size": 4}).build(blocks * 4)
    limits = SchedulerLimits(max_running=6, max_step_tokens=9, max_position=64)
    chosen = table("scheduler").build({"name": scheduler}).build(kv, limits)
    requests = [
        Request(f"r{n}", [n % 3, *range(prompt - 1)], prompt, SamplingParams(max_tokens=out))
        for n, (prompt, out) in enumerate(sizes)
        if prompt + out <= blocks * 4
    ]
    for request in requests:
        chosen.add(request)
    ahead, flying, gone, turn = AheadScheduler(chosen, depth), deque(), set(), 0
    while chosen.requests or flying:
        turn += 1
        assert turn < 3000
        while len(flying) < depth and (step := ahead.plan(float(turn))):
            names = [chunk.request.id for chunk in step.chunks]
            busy = {
                (chunk.request.id, chunk.request.preemptions)
                for one, counts in ahead._planned
                if one is not step
                for chunk, count in zip(one.chunks, counts, strict=True)
                if chunk.request.preemptions == count and chunk.request.state != "finished"
            }
            # Nobody is in two steps, unless the first one counts no more.
            assert not {(one.request.id, one.request.preemptions) for one in step.chunks} & busy
            assert len(set(names)) == len(names)
            given_ = {
                one.request.id: (token(one.request, one.stop),) for one in step.chunks if one.yields
            }
            flying.append((step, StepResult(given_)))
        if turn in aborts and chosen.requests:
            name = min(chosen.requests)
            gone.add(name)
            chosen.abort(name)
        if flying:
            step, result = flying.popleft()
            ahead.commit(step, result, float(turn))
            kv.check_integrity(chosen.running)
    assert kv.num_free == blocks
    for request in requests:
        for place in range(request.n_prompt, len(request.tokens)):
            assert request.tokens[place] == token(request, place)
        if request.id not in gone:
            assert request.n_generated == request.params.max_tokens


def test_several_steps_share_those_that_generate() -> None:
    kv = table("kv").build({"name": "paged"}).build(1024)
    limits = SchedulerLimits(max_running=16, max_step_tokens=64, max_position=64)
    chosen = table("scheduler").build({"name": "fcfs"}).build(kv, limits)
    for number in range(7):
        chosen.add(Request(f"r{number}", [1, 2], 2, SamplingParams(max_tokens=9)))
    ahead = AheadScheduler(chosen, 3)
    prompts = ahead.plan(0.0)
    assert len(prompts.chunks) == 7
    assert not ahead.plan(0.0)
    ahead.commit(prompts, StepResult({f"r{n}": (5,) for n in range(7)}), 0.0)
    steps = [ahead.plan(0.0) for _ in range(3)]
    assert [len(step.chunks) for step in steps] == [3, 3, 1]
    with pytest.raises(ValueError, match="in the order in which they were planned"):
        ahead.commit(steps[1], StepResult({}), 0.0)
    with pytest.raises(ConfigError, match="steps under way = 0"):
        AheadScheduler(chosen, 0)

"""Schedulers and cache bookkeeping: random operations, invariants after each, brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, ServeError
from shoal.ir import (
    Chunk,
    KVManager,
    Output,
    Request,
    SamplingParams,
    SchedulerLimits,
    Step,
    StepResult,
)
from shoal.plan.batching import KV_MANAGERS, SCHEDULERS
from shoal.plan.batching.cache.contiguous import ContiguousCache, ContiguousRuns
from shoal.plan.batching.cache.paged import Paged, PagedBlocks
from shoal.plan.batching.schedulers.fcfs import Fcfs, FcfsScheduler

LIMITS = SchedulerLimits(max_running=4, max_step_tokens=16, max_position=64)
BOTH_KV = pytest.mark.parametrize("kv", ["paged", "contiguous"])
ALL = pytest.mark.parametrize(
    ("scheduler", "kv"),
    [
        (scheduler, kv)
        for scheduler in ("fcfs", {"name": "fcfs", "chunked": False}, "static")
        for kv in ("paged", {"name": "paged", "prefix_reuse": False}, "contiguous")
    ],
    ids=str,
)


def request(
    name: str, prompt: Sequence[int], max_tokens: int = 4, adapter: str | None = None, **more: Any
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **more)
    return Request(name, list(prompt), len(prompt), params, adapter=adapter)


def next_token(tokens: Sequence[int]) -> int:
    """The toy model: the next token follows from all tokens before it."""
    return hash(tuple(tokens)) % 97


def toy(step: Step) -> StepResult:
    """Run a step with the toy model."""
    return StepResult(
        {c.request.id: [next_token(c.request.tokens)] for c in step.chunks if c.yields}
    )


def spelled(choice: Any, **options: Any) -> dict[str, Any]:
    return {**({"name": choice} if isinstance(choice, str) else choice), **options}


def make(
    scheduler: Any, kv: Any, tokens: int, limits: SchedulerLimits = LIMITS, block_size: int = 4
) -> Any:
    bookkeeping = KV_MANAGERS.build(spelled(kv, block_size=block_size)).build(tokens)
    return SCHEDULERS.build(scheduler).build(bookkeeping, limits)


def planned(
    scheduler: Any, limits: SchedulerLimits, before: dict[str, int], now: float = 0.0
) -> Step:
    """The next step, after checks of what a scheduler promises of every step."""
    ran = set(scheduler.running)
    step: Step = scheduler.plan(now)
    assert step.num_tokens <= limits.max_step_tokens
    assert len({chunk.request.id for chunk in step.chunks}) == len(step.chunks)
    assert scheduler.num_running <= limits.max_running
    size = scheduler.kv.block_size
    for chunk in step.chunks:
        assert chunk.request.state == "running"
        assert chunk.start == chunk.request.n_computed
        assert 1 <= chunk.length <= len(chunk.request.tokens) - chunk.start
        assert chunk.stop <= len(chunk.request.blocks) * size, "tokens without a block"
    if isinstance(scheduler, FcfsScheduler):
        # Decodes, then prompts that were cut, then those that were just admitted.
        ranks = [
            2 if c.request.id not in ran else 0 if c.stop == c.start + 1 and c.yields else 1
            for c in step.chunks
        ]
        assert ranks == sorted(ranks)
    assert all(one.state == "waiting" and not one.blocks for one in step.preempted)
    assert len(step.chunks) <= limits.max_running
    scheduler.kv.check_integrity(scheduler.running)
    # Nobody is overtaken: all that run came before all that wait.
    order = [before[one.id] for one in (*scheduler.running.values(), *scheduler.waiting)]
    assert order == sorted(order)
    return step


def run(
    scheduler: Any,
    requests: Sequence[Request],
    *,
    joins: Callable[[int], int],
    limits: SchedulerLimits,
) -> dict[str, list[int]]:
    """Add ``joins(step)`` requests before each step; run to the end; prompts with outputs."""
    place = {one.id: index for index, one in enumerate(requests)}
    queue = list(requests)
    done: dict[str, list[int]] = {}
    for number in range(100_000):
        for _ in range(joins(number)):
            if queue:
                scheduler.add(queue.pop(0))
        step = planned(scheduler, limits, place, float(number))
        if not step and not queue and not scheduler.num_waiting:
            break
        assert step or not scheduler.requests, "there is work and nothing is planned"
        for output in scheduler.commit(step, toy(step), float(number)):
            if output.finish:
                done[output.request_id] = next(
                    one.tokens for one in requests if one.id == output.request_id
                )
        scheduler.kv.check_integrity(scheduler.running)
    assert not scheduler.requests
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert scheduler.kv.num_free == scheduler.kv.num_blocks
    return done


def expected(one: Request, limits: SchedulerLimits) -> list[int]:
    tokens = list(one.tokens[: one.n_prompt])
    while len(tokens) - one.n_prompt < one.params.max_tokens and len(tokens) < limits.max_position:
        tokens.append(next_token(tokens))
        if tokens[-1] in one.params.stop_ids:
            break
    return tokens


def crowd(seed: int, number: int, longest: int = 12) -> list[Request]:
    """Requests of which many start alike."""
    draw = random.Random(seed)
    stems = [[draw.randrange(50) for _ in range(12)] for _ in range(3)]
    out = []
    for index in range(number):
        stem = draw.choice(stems)[: draw.randrange(13)]
        prompt = [*stem, *(draw.randrange(50) for _ in range(draw.randrange(1, 5)))]
        stop = frozenset(draw.sample(range(97), 3))
        out.append(request(f"r{index}", prompt, draw.randrange(1, longest), stop_ids=stop))
    return out


@ALL
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_everything_finishes_with_the_tokens_of_running_alone(
    scheduler: Any, kv: Any, seed: int
) -> None:
    """Whatever is preempted, shared or cut: the same tokens as without any of it."""
    limits = SchedulerLimits(max_running=4, max_step_tokens=16, max_position=26)
    requests = crowd(seed, 60)
    want = {one.id: expected(one, limits) for one in requests}
    draw = random.Random(seed)
    built = make(scheduler, kv, tokens=32, limits=limits)
    done = run(built, requests, joins=lambda _: draw.randrange(3), limits=limits)
    assert done == want


def test_a_full_cache_preempts_the_youngest_which_ends_the_same() -> None:
    limits = SchedulerLimits(max_running=8, max_step_tokens=64, max_position=64)
    requests = [request(f"r{i}", [i] * 8, 24) for i in range(4)]
    want = {one.id: expected(one, limits) for one in requests}
    built = make({"name": "fcfs", "watermark": 0}, "paged", tokens=64, limits=limits)
    done = run(built, requests, joins=lambda _: 4, limits=limits)
    assert done == want
    counts = [one.preemptions for one in requests]
    assert counts[0] == 0, "the oldest is never preempted"
    assert sum(counts) > 0
    assert next(iter(done)) == "r0"


@ALL
def test_ten_thousand_random_operations(
    scheduler: Any, kv: Any, record_property: Callable[[str, object], None]
) -> None:
    """Requests come, run and are aborted at random; all books agree after each operation."""
    draw = random.Random(7)
    limits = SchedulerLimits(max_running=5, max_step_tokens=12, max_position=40)
    built = make(scheduler, kv, tokens=60, limits=limits)
    stems = [[draw.randrange(9) for _ in range(8)] for _ in range(4)]
    place: dict[str, int] = {}
    for number in range(10_000 // 2):  # each plans and commits, at least
        if draw.random() < 0.4 and built.num_waiting < 20:
            stem = draw.choice(stems)[: draw.randrange(1, 9)]
            adapter = draw.choice([None, None, "a"])
            one = request(f"r{number}", [*stem, draw.randrange(9)], draw.randrange(1, 20), adapter)
            place[one.id] = number
            built.add(one)
            built.kv.check_integrity(built.running)
        step = planned(built, limits, place)
        if draw.random() < 0.1 and built.requests:
            victim = draw.choice(list(built.requests))
            assert built.abort(victim) == Output(victim, (), finish="abort")
            assert built.abort(victim) is None
            built.kv.check_integrity(built.running)
        result = toy(step)
        outputs = built.commit(step, result, 0.0)
        assert all(output.tokens for output in outputs)
        built.kv.check_integrity(built.running)
    while built.requests:
        step = built.plan(0.0)
        built.commit(step, toy(step), 0.0)
    assert built.kv.num_free == built.kv.num_blocks
    record_property("figure", "10,000 operations of each scheduler and cache: books agree")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_blocks_are_matched_as_brute_force_would(data: st.DataObject) -> None:
    """Every prefix that any cached block chain holds is found, and no other."""
    size, number = 2, data.draw(st.integers(4, 12))
    kv = PagedBlocks(number, size)
    live: dict[str, Request] = {}
    # What lies in each block, as the tensors would have it: all tokens up to its end.
    content: dict[int, tuple[str | None, tuple[int, ...]]] = {}
    offered: dict[str, int] = {}
    for index in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["start", "start", "grow", "free"]))
        if action == "start":
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9))
            adapter = data.draw(st.sampled_from([None, "a"]))
            one = request(f"r{index}", prompt, adapter=adapter)
            known = set(content.values())
            want = 0
            while want + size < len(prompt) and (adapter, tuple(prompt[: want + size])) in known:
                want += size
            assert kv.match_prefix(one) == want == one.n_computed
            for place, block in enumerate(one.blocks, 1):
                assert content[block] == (adapter, tuple(prompt[: place * size]))
            if not kv.allocate(one, len(prompt)):
                kv.free(one)
                kv.check_integrity(live)
                continue
            for block in one.blocks[want // size :]:
                content.pop(block, None)
            live[one.id] = one
            offered[one.id] = want // size
            one.n_computed = data.draw(st.integers(one.n_computed, len(prompt)))
        elif not live:
            continue
        else:
            one = live[data.draw(st.sampled_from(sorted(live)))]
            if action == "grow":
                one.tokens.append(data.draw(st.integers(0, 1)))
                held = len(one.blocks)
                if not kv.allocate(one, len(one.tokens)):
                    one.tokens.pop()
                for block in one.blocks[held:]:
                    content.pop(block, None)
                one.n_computed = len(one.tokens)
            else:
                kv.free(one)
                del live[one.id]
        if one.id in live:
            kv.computed(one)
            for place in range(offered.get(one.id, 0), one.n_computed // size):
                stored = (one.adapter, tuple(one.tokens[: (place + 1) * size]))
                # A second block with the same tokens stays its request's own.
                if stored not in content.values():
                    content[one.blocks[place]] = stored
            offered[one.id] = one.n_computed // size
        kv.check_integrity(live)


def test_the_prefix_left_longest_ago_is_forgotten_first() -> None:
    kv = PagedBlocks(4, 2)
    for name in "ab":
        one = request(name, [ord(name)] * 5)
        kv.allocate(one, 4)
        one.n_computed = 4
        kv.computed(one)
        kv.free(one)
    again = request("c", [ord("a")] * 5)
    assert kv.match_prefix(again) == 4
    kv.free(again)  # a is newer than b now
    other = request("d", [1, 2, 3])
    assert kv.allocate(other, 4)
    kv.free(other)
    assert kv.stats()["evictions"] == 2
    assert kv.match_prefix(request("e", [ord("b")] * 5)) == 0
    assert kv.match_prefix(request("f", [ord("a")] * 5)) == 4


def test_the_end_of_a_prefix_is_forgotten_before_its_start() -> None:
    kv = PagedBlocks(3, 2)
    one = request("a", [1] * 6)
    kv.allocate(one, 6)
    one.n_computed = 6
    kv.computed(one)
    kv.free(one)
    other = request("b", [2])
    kv.allocate(other, 1)
    assert kv.match_prefix(request("c", [1] * 6)) == 4


def test_hits_are_counted_once_an_admission() -> None:
    kv = PagedBlocks(4, 2)
    one = request("a", [1, 1, 1, 1])
    kv.match_prefix(one)
    kv.allocate(one, 4)
    one.n_computed = 4
    kv.computed(one)
    refused = request("b", [1, 1, 1, 1, 2, 2, 2, 2, 2])
    for _ in range(3):
        assert kv.match_prefix(refused) == 4
        assert not kv.allocate(refused, 9)
        kv.free(refused)
    assert kv.stats()["prefix_query_tokens"] == 4
    accepted = request("c", [1, 1, 1, 1])
    assert kv.match_prefix(accepted) == 2, "the last token is always computed"
    kv.allocate(accepted, 4)
    assert kv.stats()["prefix_query_tokens"] == 8
    assert kv.stats()["prefix_hit_tokens"] == 2
    assert kv.stats()["blocks_used"] == 3


def test_an_adapter_is_part_of_a_prefix() -> None:
    kv = PagedBlocks(4, 2)
    one = request("a", [1] * 5, adapter="law")
    kv.allocate(one, 5)
    one.n_computed = 5
    kv.computed(one)
    assert kv.match_prefix(request("b", [1] * 5)) == 0
    assert kv.match_prefix(request("c", [1] * 5, adapter="law")) == 4


def test_matching_twice_is_a_mistake() -> None:
    kv = PagedBlocks(4, 2)
    one = request("a", [1, 2, 3])
    kv.allocate(one, 3)
    with pytest.raises(ValueError, match="while it holds blocks"):
        kv.match_prefix(one)


def test_contiguous_sets_the_whole_length_aside_and_joins_free_runs() -> None:
    kv = ContiguousRuns(10, 4)
    a, b, c = (request(name, [1] * 4, 8) for name in "abc")
    assert all(kv.allocate(one, 4) for one in (a, b, c))
    assert (a.blocks, b.blocks, c.blocks) == ([0, 1, 2], [3, 4, 5], [6, 7, 8])
    assert kv.allocate(a, 12)
    assert not kv.allocate(a, 13)
    kv.free(a)
    kv.free(c)
    assert kv.num_free == 7
    wide = request("d", [1] * 4, 16)  # 5 blocks: 7 are free, but 3 and 4 of them in a row
    assert not kv.allocate(wide, 4)
    kv.free(b)
    assert kv.allocate(wide, 4)
    kv.check_integrity({"d": wide})


def test_paging_holds_more_at_once_than_contiguous_runs() -> None:
    limits = SchedulerLimits(max_running=16, max_step_tokens=256, max_position=128)

    def most(kv: str) -> int:
        built = make("fcfs", kv, tokens=256, limits=limits)
        for index in range(16):
            built.add(request(f"r{index}", [index] * 8, 56))
        built.plan(0.0)
        return int(built.num_running)

    assert (most("paged"), most("contiguous")) == (16, 4)


def test_decodes_come_before_prompts_and_prompts_are_cut() -> None:
    limits = SchedulerLimits(max_running=4, max_step_tokens=8, max_position=64)
    built = make("fcfs", "paged", tokens=128, limits=limits)
    a, b = request("a", [1] * 5, 4), request("b", [2] * 12, 4)
    built.add(a)
    built.add(b)

    def shown() -> list[tuple[str, int, int]]:
        step = built.plan(0.0)
        built.commit(step, toy(step), 0.0)
        return [(chunk.request.id, chunk.start, chunk.length) for chunk in step.chunks]

    assert shown() == [("a", 0, 5), ("b", 0, 3)]
    assert shown() == [("a", 5, 1), ("b", 3, 7)]
    assert shown() == [("a", 6, 1), ("b", 10, 2)]
    assert shown() == [("a", 7, 1), ("b", 12, 1)]
    assert shown() == [("b", 13, 1)]


def test_planning_again_without_a_commit_gives_the_same_step() -> None:
    built = make("fcfs", "paged", tokens=128)
    for one in crowd(3, 6):
        built.add(one)
    assert built.plan(1.0) == built.plan(1.0)


def test_static_waits_for_the_whole_batch() -> None:
    limits = SchedulerLimits(max_running=2, max_step_tokens=16, max_position=64)
    built = make("static", "paged", tokens=256, limits=limits)
    for name, length in (("a", 1), ("b", 5), ("c", 1)):
        built.add(request(name, [1] * 4, length))
    batches = []
    while built.requests:
        step = built.plan(0.0)
        batches.append("".join(chunk.request.id for chunk in step.chunks))
        built.commit(step, toy(step), 0.0)
    assert batches == ["ab", "b", "b", "b", "b", "c"]


@ALL
def test_a_request_ends_on_a_stop_token_on_max_tokens_and_on_max_position(
    scheduler: Any, kv: Any
) -> None:
    limits = SchedulerLimits(max_running=4, max_step_tokens=32, max_position=16)
    built = make(scheduler, kv, tokens=64, limits=limits)
    built.add(request("stop", [1] * 4, 9, stop_ids=frozenset({5})))
    built.add(request("count", [1] * 4, 3))
    built.add(request("long", [1] * 12, 9))
    ends: dict[str, tuple[int, str | None]] = {}
    counts = dict.fromkeys(("stop", "count", "long"), 0)
    for number in range(40):
        step = built.plan(0.0)
        given = 5 if number == 5 else 4
        result = StepResult({c.request.id: [given] for c in step.chunks if c.yields})
        for output in built.commit(step, result, 0.0):
            counts[output.request_id] += len(output.tokens)
            if output.finish:
                ends[output.request_id] = (counts[output.request_id], output.finish)
    assert ends["count"] == (3, "length")
    assert ends["long"] == (4, "length")
    assert ends["stop"][1] in ("stop", "length")


def test_tokens_beyond_the_end_are_dropped() -> None:
    """A runner may give several tokens at once."""
    built = make("fcfs", "paged", tokens=64)
    one = request("a", [1, 2], 5, stop_ids=frozenset({9}))
    built.add(one)
    (output,) = built.commit(built.plan(0.0), StepResult({"a": [3, 9, 4]}), 0.0)
    assert output == Output("a", (3, 9), finish="stop")
    assert one.tokens == [1, 2, 3, 9]
    assert one.state == "finished"


def test_outputs_carry_log_probabilities_of_what_they_hold() -> None:
    from shoal.ir import TokenInfo

    built = make("fcfs", "paged", tokens=64)
    built.add(request("a", [1, 2], 1, logprobs=1))
    infos = [TokenInfo(-0.5, ((3, -0.5),)), TokenInfo(-1.0)]
    (output,) = built.commit(built.plan(0.0), StepResult({"a": [3, 4]}, {"a": infos}), 0.0)
    assert output.infos == (infos[0],)


@ALL
def test_what_is_aborted_in_a_step_is_left_out_of_it(scheduler: Any, kv: Any) -> None:
    built = make(scheduler, kv, tokens=64)
    a, b = request("a", [1] * 4), request("b", [2] * 4)
    built.add(a)
    built.add(b)
    step = built.plan(0.0)
    built.abort("a")
    assert [output.request_id for output in built.commit(step, toy(step), 0.0)] == ["b"]
    assert (a.state, a.blocks, a.n_generated) == ("finished", [], 0)


def test_an_id_can_be_used_again_after_its_request_is_gone() -> None:
    built = make("fcfs", "paged", tokens=64)
    built.add(request("a", [1] * 4))
    step = built.plan(0.0)
    built.abort("a")
    again = request("a", [1] * 4)
    built.add(again)
    built.plan(0.0)
    assert built.commit(step, toy(step), 0.0) == [], "the step was for the old request"
    assert again.n_generated == 0


def test_cached_tokens_of_the_prompt_are_told() -> None:
    built = make("fcfs", "paged", tokens=64)
    first, second = request("a", [1] * 9, 1), request("b", [1] * 9, 1)
    for one in (first, second):
        built.add(one)
        step = built.plan(0.0)
        built.commit(step, toy(step), 0.0)
    assert (first.n_cached, second.n_cached) == (0, 8)


REFUSED = [
    (request("x", [1] * 64), "prompt tokens = 64: expected at most 63"),
    (request("x", []), "prompt tokens = 0: expected at least 1"),
    (request("x", [1], 0), "max_tokens = 0: expected at least 1"),
    (request("x", [1] * 20, 20), "keep in the cache = 39: expected at most 32"),
]


@ALL
@pytest.mark.parametrize(("one", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refuses_what_can_never_run(scheduler: Any, kv: Any, one: Request, message: str) -> None:
    built = make(
        scheduler,
        kv,
        tokens=32,
        limits=SchedulerLimits(max_running=2, max_step_tokens=64, max_position=64),
    )
    with pytest.raises(ServeError, match=message):
        built.add(one)
    assert built.requests == {}
    assert not built.plan(0.0)


def test_refuses_a_prompt_that_cannot_be_cut_and_an_id_in_use() -> None:
    built = make({"name": "fcfs", "chunked": False}, "paged", tokens=64)
    with pytest.raises(ServeError, match=r"at most max_step_tokens = 16.*chunked = true"):
        built.add(request("x", [1] * 17))
    built.add(request("x", [1] * 16))
    with pytest.raises(ServeError, match="expected an id that no running request has"):
        built.add(request("x", [1]))


def test_a_runner_that_gives_no_token_is_told_so() -> None:
    built = make("fcfs", "paged", tokens=64)
    built.add(request("a", [1]))
    with pytest.raises(ServeError, match="request a: the runner gave no token"):
        built.commit(built.plan(0.0), StepResult({}), 0.0)


@BOTH_KV
@pytest.mark.parametrize("size", [0, -1, 5000])
def test_refuses_a_wrong_block_size(kv: str, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"kv.{kv}.block_size = {size}: expected 1 to 4096"):
        KV_MANAGERS.build({"name": kv, "block_size": size})


@BOTH_KV
def test_refuses_a_cache_of_no_block(kv: str) -> None:
    with pytest.raises(ConfigError, match="kv_tokens = 15: expected at least one block of 16"):
        KV_MANAGERS.build(kv).build(15)
    built: KVManager = KV_MANAGERS.build(kv).build(31)
    assert (built.num_blocks, built.num_free) == (1, 1)
    assert built.fits(16)
    assert not built.fits(17)


def test_refuses_a_wrong_watermark() -> None:
    with pytest.raises(ConfigError, match=r"scheduler.fcfs.watermark = 1.0: expected in \[0, 1\)"):
        Fcfs(watermark=1.0)


def test_protocols_hold() -> None:
    from shoal.ir import Scheduler

    for kv in (Paged(), ContiguousCache()):
        built = kv.build(64)
        assert isinstance(built, KVManager)
        assert isinstance(Fcfs().build(built, LIMITS), Scheduler)
    assert isinstance(Chunk(request("a", [1]), 0, 1), Chunk)


def test_blocks_are_shared_within_a_salt_only():
    kv = Paged(block_size=4).build(64)
    tokens = list(range(9))

    def request(name, **options):
        return Request(name, list(tokens), 9, SamplingParams(max_tokens=1), **options)

    first = request("a", salt="x", adapter="y")
    assert kv.allocate(first, 9)
    first.n_computed = 9
    kv.computed(first)
    assert kv.match_prefix(request("b", salt="x", adapter="y")) == 8
    for place, other in enumerate(
        ({"salt": "z"}, {"salt": "xy"}, {"salt": "y", "adapter": "x"}, {})
    ):
        assert kv.match_prefix(request(f"c{place}", **other)) == 0

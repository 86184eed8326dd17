"""Temporal fusion over slots: a memory that is checked in every step, and the fewest moves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from shoal.core.errors import ConfigError, ServeError
from shoal.core.parts import table
from shoal.cost.serving.simulator import simulate
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import (
    Arrival,
    CompactingKVManager,
    Copy,
    KVManager,
    Request,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
    Step,
    StepResult,
)
from shoal.plan.batching.cache.slots import SlotBlocks, Slots
from shoal.plan.batching.schedulers.temporal_fusion import FusedScheduler, TemporalFusion

SIZE, LENGTH = 2, 24
LIMITS = SchedulerLimits(max_running=6, max_step_tokens=12, max_position=64)


def request(name: str, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
    return Request(name, list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens, **more))


def make(slots: int = 6, lane: int = 4, limits: SchedulerLimits = LIMITS) -> tuple[Any, Any]:
    books = Slots(max_len=LENGTH, block_size=SIZE).build(slots * LENGTH + 7)
    return TemporalFusion(lane_tokens=lane).build(books, limits), books


def next_token(tokens: list[int]) -> int:
    """The toy model: the next token follows from all tokens before it."""
    return hash(tuple(tokens)) % 97


class Memory:
    """A cache of tokens: what the toy model reads of it is all that it knows of a request."""

    def __init__(self, num_blocks: int) -> None:
        self.cells: list[int | None] = [None] * (num_blocks * SIZE)
        self.copied = 0

    def execute(self, step: Step) -> StepResult:
        for source, target, count in step.moves:
            used = self.cells[source * SIZE : (source + count) * SIZE]
            self.cells[target * SIZE : (target + count) * SIZE] = used
            # Nobody may read the old place any more.
            self.cells[source * SIZE : (source + count) * SIZE] = [None] * len(used)
            self.copied += count
        result = {}
        for chunk in step.chunks:
            one = chunk.request
            places = [block * SIZE + k for block in one.blocks for k in range(SIZE)]
            for at in range(chunk.start, chunk.stop):
                self.cells[places[at]] = one.tokens[at]
            seen = [self.cells[place] for place in places[: chunk.stop]]
            assert seen == one.tokens[: chunk.stop], "somebody else's keys"
            if chunk.yields:
                result[one.id] = [next_token([cell for cell in seen if cell is not None])]
        return StepResult(result)


def slots_of(scheduler: FusedScheduler, books: SlotBlocks) -> set[int]:
    return {books.slot_of(one) for one in scheduler.running.values()}


def serve(seed: int) -> tuple[int, int]:
    """Random arrivals, lengths, ends and aborts; (moves, requests that ended)."""
    draw = random.Random(seed)
    slots = draw.randrange(1, 7)
    scheduler, books = make(slots, lane=draw.randrange(1, 8))
    memory = Memory(books.num_blocks)
    queue = []
    for number in range(draw.randrange(1, 14)):
        prompt = [draw.randrange(50) for _ in range(draw.randrange(1, 16))]
        stop = frozenset(draw.sample(range(97), 5))
        queue.append(request(f"r{number}", prompt, draw.randrange(1, 10), stop_ids=stop))
    everybody, aborted = list(queue), set()
    moved = 0
    while queue or scheduler.requests:
        for _ in range(draw.randrange(3)):
            if queue:
                scheduler.add(queue.pop(0))
        if scheduler.requests and draw.random() < 0.04:
            gone = draw.choice(list(scheduler.requests))
            assert scheduler.abort(gone).finish == "abort"
            aborted.add(gone)
        before = {books.slot_of(one): one.n_computed for one in scheduler.running.values()}
        step = scheduler.plan(0.0)
        books.check_integrity(scheduler.running)
        active = len(scheduler.running)
        assert slots_of(scheduler, books) == set(range(active)), "not dense"
        # Whoever lies above the new end must move, and nobody else; only what they use is copied.
        must = {slot: tokens for slot, tokens in before.items() if slot >= active and tokens}
        width = LENGTH // SIZE
        assert {move.source // width for move in step.moves} == set(must)
        assert len(step.moves) == len(must)
        assert all(move.num_blocks == -(-must[move.source // width] // SIZE) for move in step.moves)
        moved += len(step.moves)
        assert step.num_tokens <= LIMITS.max_step_tokens
        assert step or not scheduler.requests
        scheduler.commit(step, memory.execute(step), 0.0)
        books.check_integrity(scheduler.running)
    assert books.num_free == books.num_blocks
    assert books.stats()["slot_moves"] == moved
    for one in everybody:
        if one.id not in aborted:
            alone = list(one.tokens[: one.n_prompt])
            while len(alone) - one.n_prompt < one.params.max_tokens:
                alone.append(next_token(alone))
                if alone[-1] in one.params.stop_ids:
                    break
            assert one.tokens == alone
    return moved, len(everybody)


def test_tokens_are_those_of_solo_runs_and_moves_are_the_fewest() -> None:
    moved, ended = map(sum, zip(*(serve(seed) for seed in range(500)), strict=True))
    assert 200 < moved <= ended


def test_newcomers_fill_holes_before_anybody_moves() -> None:
    scheduler, books = make()
    ends = (1, 1, 9, 9, 1)
    for number, length in enumerate(ends):
        scheduler.add(request(f"r{number}", [number], length))
    step = scheduler.plan(0.0)
    memory = Memory(books.num_blocks)
    scheduler.commit(step, memory.execute(step), 0.0)
    assert slots_of(scheduler, books) == {2, 3}
    scheduler.add(request("new", [7, 8], 3))
    step = scheduler.plan(1.0)
    # Of slots 0, 1 and 4 one is wanted by the newcomer, and one by whoever lies highest.
    assert step.moves == (Copy(3 * LENGTH // SIZE, 1 * LENGTH // SIZE, 1),)
    assert books.slot_of(scheduler.running["new"]) == 0


def test_a_long_prompt_slows_generation_and_does_not_stop_it() -> None:
    scheduler, books = make(lane=3)
    memory = Memory(books.num_blocks)
    scheduler.add(request("short", [1], 20))
    scheduler.commit(step := scheduler.plan(0.0), memory.execute(step), 0.0)
    scheduler.add(request("long", list(range(20)), 4))
    for start in range(0, 20, 3):
        step = scheduler.plan(0.0)
        assert [(c.request.id, c.start, c.length) for c in step.chunks] == [
            ("short", start // 3 + 1, 1),
            ("long", start, min(3, 20 - start)),
        ]
        scheduler.commit(step, memory.execute(step), 0.0)
    # Alone, a prompt takes all that a step has.
    scheduler, _ = make(lane=3)
    scheduler.add(request("long", list(range(20)), 4))
    assert scheduler.plan(0.0).chunks[0].length == LIMITS.max_step_tokens


@pytest.mark.parametrize("kv", ["paged", "contiguous", "blockgroups"])
def test_fusion_over_other_caches(kv: str) -> None:
    options = {"init": 1} if kv == "blockgroups" else {}
    books = table("kv").build({"name": kv, "block_size": SIZE, **options}).build(64)
    scheduler = TemporalFusion().build(books, LIMITS)
    for number in range(9):
        scheduler.add(request(f"r{number}", [number, 1, 2], 3 + number))
    while scheduler.requests:
        step = scheduler.plan(0.0)
        assert not step.moves
        tokens = {c.request.id: [next_token(c.request.tokens)] for c in step.chunks if c.yields}
        scheduler.commit(step, StepResult(tokens), 0.0)
    assert books.num_free == books.num_blocks


@pytest.mark.parametrize("scheduler", ["fcfs", "static", "fair", "prefill_first"])
def test_slots_under_other_schedulers(scheduler: str) -> None:
    limits = SchedulerLimits(max_running=5, max_step_tokens=16, max_position=64)
    books = Slots(max_len=LENGTH, block_size=SIZE).build(3 * LENGTH)
    built: Any = table("scheduler").build(scheduler).build(books, limits)
    for number in range(12):
        built.add(request(f"r{number}", list(range(1 + number)), 2 + number))
    memory = Memory(books.num_blocks)
    while built.requests:
        built.commit(step := built.plan(0.0), memory.execute(step), 0.0)
        books.check_integrity(built.running)
    assert books.num_free == books.num_blocks


def test_the_simulator_drives_the_same_objects() -> None:
    scheduler, books = make(
        limits=SchedulerLimits(max_running=6, max_step_tokens=64, max_position=64)
    )
    cost = FittedStepCost(step=1e-3, token=1e-4, prompt_pair=0, decode_key=0, chunk=0)
    arrivals = [Arrival(0.002 * n, tuple(range(1 + n % 5)), 2 + 7 * n % 11) for n in range(30)]
    seen = simulate(scheduler, cost, arrivals)
    assert [one.n_output for one in seen.served] == [one.output_tokens for one in arrivals]
    assert 0 < books.stats()["slot_moves"] <= 30


def test_a_request_longer_than_a_slot_is_refused_when_it_comes() -> None:
    for choice in ("temporal_fusion", "fcfs"):
        books = Slots(max_len=LENGTH, block_size=SIZE).build(4 * LENGTH)
        scheduler = table("scheduler").build(choice).build(books, LIMITS)
        # The last token is never kept.
        scheduler.add(request("just", list(range(20)), 5))
        with pytest.raises(
            ServeError,
            match=r"request long: tokens to keep in the cache = 25: expected at most 24, the "
            r"max_len of a slot.*prompt 20 \+ max_tokens 6: shorten.*longer slots",
        ):
            scheduler.add(request("long", list(range(20)), 6))
        assert scheduler.num_waiting == 1


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match=r"kv.slots.max_len = 40: expected a multiple of block"):
        Slots(max_len=40)
    with pytest.raises(ConfigError, match=r"kv.slots.max_len = 0"):
        Slots(max_len=0)
    with pytest.raises(ConfigError, match=r"kv.slots.block_size = 0: expected 1 to 4096"):
        Slots(block_size=0)
    with pytest.raises(ConfigError, match="kv_tokens = 511: expected at least one slot of kv"):
        Slots().build(511)
    with pytest.raises(ConfigError, match="lane_tokens = 0: expected at least 1"):
        TemporalFusion(lane_tokens=0)


def test_protocols_hold() -> None:
    scheduler, books = make()
    assert isinstance(books, KVManager)
    assert isinstance(books, CompactingKVManager)
    assert not isinstance(table("kv").build("paged").build(64), CompactingKVManager)
    assert isinstance(scheduler, Scheduler)

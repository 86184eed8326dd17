"""Ten thousand random operations on every scheduler with every cache and every preemption."""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from toy_memory import Memory, next_token

from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.ir import HostLink, Request, SamplingParams, SchedulerLimits
from shoal.plan.batching import KV_MANAGERS, PREEMPTIONS, SCHEDULERS

LIMITS = SchedulerLimits(max_running=5, max_step_tokens=12, max_position=40)
# Copying and computing again take about as long, so that some are copied and some are not.
LINK = HostLink(copy_s=1e-3, bytes_per_s=1e6, block_bytes=100.0)
COST = FittedStepCost(step=1e-3, token=1e-3, prompt_pair=0, decode_key=0, chunk=0)

# Options that make much happen in little room; parts without any are built with their defaults.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fcfs": [{}, {"chunked": False}],
    "fair": [{"policy": "uniform", "frequency": 0.3}],
    "paged": [{"block_size": 4}, {"block_size": 3, "prefix_reuse": False}],
    "distributed": [{"block_size": 4}],
    "blockgroups": [{"block_size": 4, "init": 4}],
    "contiguous": [{"block_size": 4}],
    "slots": [{"block_size": 4, "max_len": 40}],
    "swap": [{}, {"asynchronous": "never", "keep_host_copies": False, "join": False}],
}


# These preempt nobody, in no way.
CALM = ("static", "temporal_fusion")

EVERY = [
    (scheduler, kv, preempt)
    for scheduler in SCHEDULERS
    for kv in KV_MANAGERS
    for preempt in (PREEMPTIONS if scheduler not in CALM else ["recompute"])
]


def variants(*names: str) -> list[list[dict[str, Any]]]:
    """The parts of these names with all their options."""
    spelled = [[{"name": name, **more} for more in OPTIONS.get(name, [{}])] for name in names]
    return [list(one) for one in itertools.product(*spelled)]


class Books:
    """A scheduler under random operations; all books are compared after each."""

    def __init__(self, scheduler: Any, kv: Any, preempt: Any, seed: int) -> None:
        self.draw = random.Random(seed)
        books = KV_MANAGERS.build(kv).build(120 if kv["name"] == "slots" else 60)
        host = 0 if preempt["name"] == "recompute" else 80
        preemption = PREEMPTIONS.build(preempt).build(
            books, LIMITS, host_tokens=host, link=LINK, cost=COST
        )
        self.built: Any = SCHEDULERS.build(scheduler).build(books, LIMITS, preemption)
        self.calm = scheduler["name"] in CALM
        self.memory = Memory(books.block_size, seed)
        self.stems = [[self.draw.randrange(9) for _ in range(20)] for _ in range(3)]
        self.ended: list[list[int]] = []
        self.count = self.preempted = self.now = 0

    def check(self) -> None:
        """No block is lost, held twice or counted wrongly."""
        self.count += 1
        self.built.kv.check_integrity(self.built.running)
        preemption = self.built.preemption
        if hasattr(preemption, "check_integrity"):
            preemption.check_integrity()

    def add(self) -> None:
        """One request, or several answers to one prompt; often the next turn of something."""
        draw = self.draw
        start = draw.choice([*self.ended, *self.stems])
        prompt = [*start[: draw.randrange(1, 26)], draw.randrange(9)]
        first, adapter = f"r{self.count}", draw.choice([None, "a"])
        for choice in range(draw.choice([1, 1, 2, 4])):
            params = SamplingParams(max_tokens=draw.randrange(1, 14), seed=choice)
            one = Request(f"{first}.{choice}", list(prompt), len(prompt), params, adapter=adapter)
            # Some come later than the first, or name one that is not there.
            one.fork_of = draw.choice([f"{first}.0", *self.built.requests]) if choice else None
            one.fork_of = f"{first}.0" if choice and draw.random() < 0.8 else one.fork_of
            if len(prompt) < LIMITS.max_step_tokens or getattr(self.built, "chunked", True):
                self.built.add(one)
                self.check()
                if draw.random() < 0.2:
                    self.step()

    def abort(self) -> None:
        if self.built.requests:
            name = self.draw.choice(list(self.built.requests))
            output = self.built.abort(name)
            assert output is not None
            assert output.finish == "abort"
            self.check()

    def preempt(self) -> None:
        """Take the cache of somebody who did not expect it."""
        if self.built.running and not self.calm:
            self.built.lose(self.draw.choice(list(self.built.running.values())))
            self.preempted += 1
            self.check()

    def step(self) -> None:
        self.now += 1
        step = self.built.plan(float(self.now))
        self.check()
        assert step or not self.built.requests, "there is work and nothing is planned"
        assert step.num_tokens <= LIMITS.max_step_tokens
        assert len(self.built.running) <= LIMITS.max_running
        self.preempted += len(step.preempted)
        live = dict(self.built.requests)
        result = self.memory.execute(step)
        for output in self.built.commit(step, result, self.now + 0.5):
            request = live[output.request_id]
            if output.finish:
                tokens = request.tokens[: request.n_prompt]
                while len(tokens) < len(request.tokens):
                    tokens.append(next_token(tokens, request.params.seed))
                assert request.tokens == tokens, "not what it gets alone"
                self.ended = [*self.ended[-4:], tokens]
        self.check()

    def run(self, count: int) -> dict[str, float]:
        """So many operations, then the rest to its end; the counters."""
        while self.count < count:
            chance = self.draw.random()
            if chance < 0.2 and self.built.num_waiting < 12:
                self.add()
            elif chance < 0.25:
                self.abort()
            elif chance < 0.32:
                self.preempt()
            else:
                self.step()
        for _ in range(5000):
            if not self.built.requests:
                break
            self.step()
        assert not self.built.requests, "somebody never ends"
        assert self.built.num_running == self.built.num_waiting == 0
        assert self.built.kv.num_free == self.built.kv.num_blocks
        return {**self.built.kv.stats(), "preempted": self.preempted, "moved": self.memory.moved}


def operations(names: tuple[str, str, str], count: int) -> dict[str, float]:
    """So many on these parts, shared by the variants of their options; all counters together."""
    every = variants(*names)
    seen: dict[str, float] = {}
    for seed, (scheduler, kv, preempt) in enumerate(every):
        for name, value in Books(scheduler, kv, preempt, seed).run(-(-count // len(every))).items():
            seen[name] = seen.get(name, 0) + value
    assert seen["blocks_used"] == 0
    return seen


@pytest.mark.parametrize("names", EVERY, ids="-".join)
def test_a_few_random_operations(names: tuple[str, str, str]) -> None:
    operations(names, 400)


@pytest.mark.slow
@pytest.mark.parametrize("names", EVERY, ids="-".join)
def test_ten_thousand_random_operations(names: tuple[str, str, str]) -> None:
    """Something of everything that these parts do happens in them."""
    seen = operations(names, 10_000)
    scheduler, kv, _ = names
    preempts = scheduler not in CALM
    assert (seen["preempted"] > 10) == preempts
    assert (seen["prefix_hit_tokens"] > 100) == (kv in ("paged", "distributed"))
    if kv == "paged":
        assert (seen["forks"] > 10) == preempts
        assert (seen["blocks_copied"] > 5) == preempts
        assert seen["blocks_copied"] == seen["moved"]


def test_the_oracle_sees_a_shared_block_that_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were nobody to copy, a token would be overwritten or a block have two writers."""
    monkeypatch.setattr("shoal.plan.batching.cache.paged.PagedBlocks.copies", lambda self: ())
    with pytest.raises(AssertionError):
        operations(("fcfs", "paged", "recompute"), 4000)

"""What claim [39] Infinite-LLM runs: instances that lend each other memory, or do not."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.experiments.tiny import serve_job, served
from shoal.core.errors import ServeError
from shoal.core.random import generator
from shoal.ir import Request, SamplingParams
from shoal.plan.batching.cache.loans import LoanRegistry
from shoal.serve.cluster.distkv import DistKVEngine, EvenCost

if TYPE_CHECKING:
    from shoal.ir import ServeJob
    from shoal.model.transformer import Transformer
    from shoal.serve.engine.loop import Engine

_VOCAB = 4096


def job(model: Path, kv_tokens: int, **changes: Any) -> ServeJob:
    """Three instances, a thread each; nothing is found in a cache."""
    kv = {"name": "distributed", "instances": 3, "prefix_reuse": False}
    fields = {"kv": kv, "kv_tokens": kv_tokens, "max_running": 64, "max_step_tokens": 512}
    return serve_job(model, **(fields | changes))


def requests(seed: int, *shapes: tuple[int, int]) -> list[Request]:
    """Requests of so many random prompt tokens and new ones."""
    made = []
    for number, (length, new) in enumerate(shapes):
        source = generator(seed, purpose="infinite_llm", index=number)
        prompt = source.integers(0, _VOCAB, length).tolist()
        made.append(Request(f"r{number}", prompt, length, SamplingParams(max_tokens=new)))
    return made


def longest(registry: LoanRegistry, own: int, lent: int, limit: int) -> int:
    """Most tokens that a request may keep in the caches, as requests are let in or refused."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        try:
            registry.require_room("probe", middle, own, lent)
            low = middle
        except ServeError:
            high = middle - 1
    return low


@dataclass(frozen=True)
class ServedRun:
    """Seconds in all, new tokens of each request, and counters of all instances of meanwhile."""

    seconds: float
    tokens: list[list[int]]
    stats: dict[str, float]


def serve(engine: DistKVEngine, made: Sequence[Request]) -> ServedRun:
    """All requests at once, until the last has ended."""
    before = engine.stats()
    began = time.perf_counter()
    for request in made:
        engine.add(request)
    while engine.num_open:
        engine.step(1.0)
    seconds = time.perf_counter() - began
    after = engine.stats()
    drain_events = engine.drain_events()
    if drain_events or engine.losses:
        raise ServeError(f"requests were refused or instances lost: {drain_events} {engine.losses}")
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return ServedRun(seconds, [one.tokens[one.n_prompt :] for one in made], moved)


def served_apart(engine: Engine, made: Sequence[Request]) -> ServedRun:
    """The same by one engine, such as one of ranks."""
    began = time.perf_counter()
    tokens = served(engine, made)
    return ServedRun(time.perf_counter() - began, tokens, dict(engine.stats()))


def alone(model: Transformer, made: Sequence[Request]) -> list[list[int]]:
    """The tokens of one engine that has room for all."""
    from shoal.serve.engine.build import engine_of, prepare

    room = sum(len(one.tokens) + one.params.max_tokens + 16 for one in made)
    single = serve_job(kv_tokens=room)
    engine, _, _ = engine_of(single, prepare(single, model))
    return served_apart(engine, made).tokens


def ranked(split: ServeJob, made: Sequence[Request]) -> ServedRun:
    """The same by an engine of tensor-parallel ranks."""
    from shoal.model import huggingface
    from shoal.serve.ranks.workers import ranked_engine

    engine = ranked_engine(split, huggingface.read_config(Path(split.model)))
    try:
        return served_apart(engine, made)
    finally:
        engine.close()


class _Said:
    """What stands at the other end of an instance in this process."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.messages.append(dict(message))


class NearbyInstances:
    """Instances in this process, for counts: blocks and queries go over sockets as ever."""

    def __init__(self, served: ServeJob, directory: Path, *, lend: bool = True) -> None:
        from shoal.serve.cluster.distkv_instance import DistKVInstance

        directory.mkdir(parents=True, exist_ok=True)
        words = {"job": served.model_dump(mode="json", exclude_none=True)}
        count = int(served.kv.options["instances"])
        self.instances = []
        for number in range(count):
            start = {**words, "instance": number, "directory": str(directory)}
            self.instances.append(DistKVInstance(start, _Said()))  # type: ignore[arg-type]
        self.lend = lend
        own = self.instances[0].kv
        self.own, self.lent = own.num_blocks, 0
        if lend:
            paths = [[one.number, str(directory / f"lender{one.number}")] for one in self.instances]
            self.lent = (count - 1) * (own.num_blocks - own.watermark)
            for one in self.instances:
                others = [pair for pair in paths if pair[0] != one.number]
                one.handle({"kind": "peers", "paths": others})
                one.handle({"kind": "room", "blocks": self.lent})
        self.registry = LoanRegistry(count, own.block_size, EvenCost())

    def serve(self, made: Sequence[Request]) -> ServedRun:
        """All by the first instance, which borrows from the others."""
        engine = self.instances[0].engine
        assert engine is not None
        began = time.perf_counter()
        for request in made:
            engine.scheduler.add(request)
        while engine.busy:
            engine.step()
            if self.lend:
                self.advise()
        tokens = [one.tokens[one.n_prompt :] for one in made]
        return ServedRun(time.perf_counter() - began, tokens, engine.stats())

    def close(self) -> None:
        """Leave no socket open."""
        for one in self.instances:
            one.close()

    def advise(self) -> None:
        """What the registry proposes."""
        for one in self.instances:
            assert one.lending is not None
            self.registry.beat(one.lending.beat(), 0.0)
        for debt in self.registry.loans():
            loans = [[debt.creditor, debt.blocks]]
            self.instances[debt.debtor].handle({"kind": "loans", "loans": loans})

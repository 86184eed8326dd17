"""Flights made up: what ranks would have recorded, with faults planted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shoal.train.watch.evidence import Evidence
from shoal.train.watch.recorder import RECORD, Flight

MS = 1_000_000
NBYTES = 1 << 16


class Script:
    """Eight ranks, or some, that exchange messages and then sum, step after step.

    Args:
        world: ranks.
        steps: whole steps.
        work: (rank, step) -> ms of computing.
        delay: (source, target) -> ms of a message.
        skew: rank -> ms by which its host's clock is ahead; ranks with a skew have their own host.
    """

    def __init__(
        self,
        world: int = 8,
        steps: int = 14,
        *,
        work: Callable[[int, int], float] = lambda rank, step: 10.0,
        delay: Callable[[int, int], float] = lambda source, target: 1.0,
        skew: dict[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.world = world
        self.skew = skew or {}
        self.names = ["", "host:", "comm::" + ",".join(map(str, range(world)))]
        self.rows: list[list[tuple[float, ...]]] = [[] for _ in range(world)]
        noise = np.random.default_rng(seed)
        self.clock = np.zeros(world)
        self.seq = 0
        for step in range(steps):
            for rank in range(world):
                self.clock[rank] += work(rank, step) * noise.normal(1.0, 0.01)
            self.exchange(step, delay, noise)
            self.reduce(step)
        self.steps = steps

    def name(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def exchange(
        self, step: int, delay: Callable[[int, int], float], noise: np.random.Generator
    ) -> None:
        """Every rank sends to every other, all at once."""
        enter = self.clock.copy()
        ends = enter.copy()
        for source in range(self.world):
            for target in range(self.world):
                if source == target:
                    continue
                begin = max(enter[source], enter[target])
                end = begin + delay(source, target) * noise.normal(1.0, 0.02)
                self.add(source, "send", step, step + 1, target, enter[source], end)
                self.add(target, "receive", step, step + 1, source, enter[target], end)
                ends[target] = max(ends[target], end)
                ends[source] = max(ends[source], end)
        self.clock = ends

    def reduce(self, step: int, absent: tuple[int, ...] = (), leave: bool = True) -> None:
        """An all-reduce; some ranks may not come."""
        self.seq += 1
        present = [rank for rank in range(self.world) if rank not in absent]
        end = max(self.clock[rank] for rank in present) + 0.5
        for rank in present:
            done = end if leave and not absent else 0.0
            self.add(rank, "all_reduce", step, self.seq, -1, self.clock[rank], done)
        if leave and not absent:
            self.clock[:] = end

    def add(
        self, rank: int, op: str, step: int, seq: int, peer: int, enter: float, end: float
    ) -> None:
        def at(time: float) -> int:
            return int((time + 1 + self.skew.get(rank, 0.0)) * MS)

        left = at(end) if end else 0
        here = at(enter)
        row = (here, here, here, left, NBYTES, seq, step, 2, self.name(op), self.name("x"), peer)
        self.rows[rank].append(row)

    def evidence(self, without: tuple[int, ...] = (), after_ms: float = 0.0) -> Evidence:
        flights = {}
        for rank in range(self.world):
            if rank in without:
                continue
            names = list(self.names)
            names[1] = f"host:{rank}" if rank in self.skew else "host:"
            rows = np.array(self.rows[rank], dtype=RECORD)
            flights[rank] = Flight(rank, self.world, names[1][5:], tuple(names), rows)
        now = int((float(self.clock.max()) + 1 + after_ms) * MS) if after_ms else None
        return Evidence(flights, self.world, now)

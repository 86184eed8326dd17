"""What the ranks of claim [4] C4 do: a watched exchange and a sum, step after step, with faults.

Faults are below or beside the watched communicator, and the locator is not informed of them.
"""

from __future__ import annotations

import math
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import RankError
from shoal.parallel.protocols import Comm, Pending
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.protocols import FaultVerdict
from shoal.train.watch.recorder import Recorder
from shoal.train.watch.watched_comm import WatchedComm

Kind = Literal[
    "communication_hang", "non_communication_hang", "communication_slow", "non_communication_slow"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
ELEMENTS = 1 << 14
BANDWIDTH = 1e8
LATENCY_S = 2e-5
COMPUTE_S = 4e-3
JITTER = 0.05
# A step of threads: computing, and what a message takes.
# Long beside what a thread waits for the interpreter.
_THREAD_COMPUTE_S = 20e-3
_THREAD_MESSAGE_S = 3e-3
_SWITCH_S = 2e-4


@dataclass(frozen=True)
class InjectedFault:
    """A syndrome at a rank, link, sender or receiver: how many times slower, from which step on."""

    kind: Kind
    place: str
    ranks: tuple[int, ...]
    factor: float
    step: int

    def slows(self, source: int, target: int) -> bool:
        """Whether messages from rank to rank are slow."""
        if self.kind != "communication_slow":
            return False
        if self.place == "link":
            return (source, target) == self.ranks
        return (source if self.place == "sender" else target) == self.ranks[0]


def draw(kind: Kind, world: int, steps: int, source: random.Random) -> InjectedFault:
    """A fault of this kind somewhere."""
    rank, other = source.sample(range(world), 2)
    place = "rank"
    ranks: tuple[int, ...] = (rank,)
    factor, step = 0.0, source.randrange(steps // 2, steps - 1)
    if kind == "communication_hang":
        place, ranks = "link", (rank, other)
    elif kind == "communication_slow":
        place = source.choice(("link", "sender", "receiver"))
        ranks = (rank, other) if place == "link" else (rank,)
        factor, step = source.uniform(3.0, 8.0), source.randrange(3)
    elif kind == "non_communication_slow":
        factor, step = source.uniform(1.5, 3.0), source.randrange(3)
    return InjectedFault(kind, place, ranks, factor, step)


def right(verdict: FaultVerdict, fault: InjectedFault) -> bool:
    """The fault is named, kind and place, and nothing else is."""
    named = {(f.kind, f.place, f.ranks) for f in verdict.faults}
    return named == {(fault.kind, fault.place, fault.ranks)}


def _step(
    comm: Comm, step: int, data: Tensor, rooms: Sequence[Tensor], compute: Callable[[], None]
) -> None:
    """Compute, give every other rank a message in rounds, and sum."""
    compute()
    for turn in range(1, comm.world):
        target, source = (comm.rank + turn) % comm.world, (comm.rank - turn) % comm.world
        got = comm.receive(rooms[turn], source, tag="exchange")
        sent = comm.send(data, target, tag="exchange")
        got.wait()
        sent.wait()
    comm.all_reduce(data[:1024], tag="sum").wait()


class _Never:
    """A message that is never done: it waits on a stream that no rank sends on."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def wait(self) -> None:
        peer = (self._comm.rank + 1) % self._comm.world
        self._comm.receive(torch.empty(1), peer, tag="exchange").wait()


class _Faulty:
    """A communicator that loses the messages of a hanging link, from a step on."""

    def __init__(self, inner: Comm, fault: InjectedFault | None, *, hold_s: float = 0.0) -> None:
        self.inner = inner
        self.fault = fault
        self.hold_s = hold_s
        self.step = 0
        for name in ("rank", "world", "ranks", "ranks_per_node", "device", "meter"):
            setattr(self, name, getattr(inner, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        fault, here = self.fault, self.inner.rank
        on = fault is not None and self.step >= fault.step
        if on and fault is not None:
            if fault.kind == "communication_hang" and (here, target) == fault.ranks:
                return _Never(self.inner)
            if self.hold_s and fault.slows(here, target):
                time.sleep(self.hold_s * (fault.factor - 1))
        if self.hold_s:
            time.sleep(self.hold_s)
        return self.inner.send(x, target, tag=tag)


@dataclass(frozen=True, kw_only=True)
class _SlowLinks(Links):
    """Links of which some have a fraction of the rate."""

    fault: InjectedFault | None = None

    def rate(self, link: tuple[int, int]) -> float:
        rate = super().rate(link)
        fault = self.fault
        return rate / fault.factor if fault is not None and fault.slows(*link) else rate


def _has(fault: InjectedFault | None, kind: Kind, rank: int, step: int) -> bool:
    return fault is not None and (fault.kind, fault.ranks) == (kind, (rank,)) and step >= fault.step


def _jitter(seed: int, rank: int, step: int) -> float:
    return math.exp(random.Random(f"{seed}/{rank}/{step}").gauss(0.0, JITTER))


def run_virtual(
    folder: Path, world: int, steps: int, fault: InjectedFault | None, *, seed: int
) -> Evidence:
    """Steps of thread-ranks on a virtual clock; what they recorded, read long after."""
    links = _SlowLinks(latency_s=LATENCY_S, bandwidth=BANDWIDTH, fault=fault)

    def rank(inner: LinkComm) -> None:
        below, clock = _Faulty(inner, fault), lambda: 1 + int(1e9 * inner.now)
        _record(folder, below, steps, fault, seed, COMPUTE_S, inner.compute, clock=clock)

    # On virtual links a hang ends at once: every rank waits for another.
    return _evidence(folder, world, fault, lambda: run_linked(world, rank, links, timeout_s=120.0))


def run_threads(
    folder: Path, world: int, steps: int, fault: InjectedFault | None, *, seed: int
) -> Evidence:
    """The same in real time: computing and messages take time by sleeping."""

    def rank(inner: ThreadComm) -> None:
        below = _Faulty(inner, fault, hold_s=_THREAD_MESSAGE_S)
        _record(folder, below, steps, fault, seed, _THREAD_COMPUTE_S, time.sleep)

    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        return _evidence(folder, world, fault, lambda: run_ranks(world, rank, timeout_s=60.0))
    finally:
        sys.setswitchinterval(before)


def _record(
    folder: Path,
    below: _Faulty,
    steps: int,
    fault: InjectedFault | None,
    seed: int,
    compute_s: float,
    spend: Callable[[float], object],
    **options: Any,
) -> None:
    """The steps of one rank, recorded; ``spend`` lets time pass, ``options`` are the recorder's."""
    me, world = below.inner.rank, below.inner.world
    place, capacity = folder / f"rank-{me}.flight", 2 * world * (steps + 1)
    recorder = Recorder(place, me, world, capacity=capacity, **options)
    comm = WatchedComm(below, recorder)
    data = torch.ones(ELEMENTS)
    rooms = [torch.empty(ELEMENTS) for _ in range(world)]
    for step in range(steps):
        recorder.step = below.step = step
        seconds = compute_s * _jitter(seed, me, step)
        if fault is not None and _has(fault, "non_communication_slow", me, step):
            seconds *= fault.factor

        def compute(step: int = step, seconds: float = seconds) -> None:
            spend(seconds)
            if _has(fault, "non_communication_hang", me, step):
                _Never(below.inner).wait()

        _step(comm, step, data, rooms, compute)
    recorder.close()


def _evidence(
    folder: Path, world: int, fault: InjectedFault | None, run: Callable[[], object]
) -> Evidence:
    """What a run recorded that may hang if the fault does; a hang is looked at a minute later."""
    hangs = fault is not None and fault.kind.endswith("hang")
    try:
        run()
    except RankError:
        if not hangs:
            raise
    evidence = Evidence.load(folder)
    return Evidence(evidence.flights, world, evidence.now + int(60e9)) if hangs else evidence


def run_processes_step(comm: Comm, folder: str, steps: int, elements: int) -> float:
    """The same on real processes, whose links are as they are; seconds of a step."""
    recorder = Recorder(
        Path(folder) / f"rank-{comm.rank}.flight",
        comm.rank,
        comm.world,
        capacity=2 * comm.world * (steps + 1) + 16,
        # One host as far as clocks go: namespaces share them.
        host=socket.gethostname(),
    )
    watched = WatchedComm(comm, recorder)
    data = torch.ones(elements)
    rooms = [torch.empty(elements) for _ in range(comm.world)]
    begin = time.perf_counter()
    for step in range(steps):
        recorder.step = step
        _step(watched, step, data, rooms, lambda: time.sleep(COMPUTE_S))
    return (time.perf_counter() - begin) / steps

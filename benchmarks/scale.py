"""What each step that grows with the number of ranks costs the first rank or the supervisor.

Ranks are simulated: their files are there, their processes are not. Each row calls the product's
own function. Seconds are of processor time, without waiting for disks, and the least of a few
repetitions.

Usage: python benchmarks/scale.py [--dry] [--only PART] [WORLD ...]
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import simulated_ranks as simulated
import torch

from shoal.checkpoint.background import Background
from shoal.checkpoint.index import Merger
from shoal.checkpoint.inmemory.layout import coding_groups
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.plan import PROPOSAL, assign
from shoal.checkpoint.protocols import RankShare, SaveTicket
from shoal.checkpoint.reads import plan_reads
from shoal.checkpoint.shards import shard_name
from shoal.checkpoint.storage import LocalStorage
from shoal.checkpoint.store import Store
from shoal.core.files import write_json
from shoal.core.meter import EventTail, Meter
from shoal.core.meter.jsonl import JsonlSink
from shoal.corpora.order import batch
from shoal.ir import Layout
from shoal.machine.fingerprint import fingerprint, versions
from shoal.parallel.comm.agree import agree
from shoal.parallel.comm.heartbeat import Heartbeat, blame
from shoal.train import supervise
from shoal.train.layout import RunDir
from shoal.train.saving import RunSaver
from shoal.train.watch import robust
from shoal.train.watch.recorder import Recorder

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
WORLDS = (64, 512, 4096)
PLANNED = (64, 1024, 8192)
STEP_S, SHARE = 10.0, 0.01
SAVE_STEPS = 60
"""Steps of 10 s between saves: one every ten minutes."""
REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """A step that grows with the world.

    Args:
        name: what it is.
        part: where its code is.
        when: how often it is done: step, save, layout, start or load.
        times: how often in a training step of 10 s; None where it is not done in each run of steps.
        seconds: world -> of one time.
        note: what was measured.
    """

    name: str
    part: str
    when: str
    times: float | None
    seconds: dict[int, float]
    note: str

    def plain(self) -> dict[str, Any]:
        """As the results have it."""
        table = {str(world): second for world, second in self.seconds.items()}
        return {**vars(self), "seconds": table}


def least(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of processor of the quickest of some calls, the system's included."""
    results = []
    for _ in range(repeats):
        gc.collect()
        begin = time.process_time()
        call()
        results.append(time.process_time() - begin)
    return min(results)


def supervised(world: int, folder: Path) -> tuple[Any, subprocess.Popen[bytes]]:
    """A supervisor of ranks that all have written a heartbeat; one process stands for all."""
    directory = RunDir(folder)
    directory.ranks.mkdir(parents=True)
    for rank in range(world):
        beat = Heartbeat(directory.beat(rank), rank)
        beat.step(3)
        beat.enter("all_reduce")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = supervise.Supervisor(directory, ranks=world, threads=1, timeout_s=60.0)
    one.processes = [child] * world
    return one, child


def watching(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """The supervisor: looking for ranks that ended, and at heartbeats."""
    idle: dict[int, float] = {}
    values: dict[int, float] = {}
    beats: dict[int, float] = {}
    judged: dict[int, float] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as place:
            one, child = supervised(world, Path(place))
            try:
                now = time.monotonic()

                def poll(ask: bool, look: bool, one: Any = one, now: float = now) -> None:
                    one._ask_at = 0.0 if ask else now + 1e6
                    one._beats_at = 0.0 if look else now + 1e6
                    one._poll(now)

                idle[world] = least(functools.partial(poll, False, False))
                values[world] = least(functools.partial(poll, True, False))
                beats[world] = least(functools.partial(poll, False, True))
                result = one.beats()
                judged[world] = least(lambda found=result: blame(found))
            finally:
                child.communicate(b"\n")
    part = "train/supervise.py"
    looks = STEP_S / supervise._POLL_S
    yield Measured("has any rank ended", part, "step", looks, idle, "one system call")
    asks = STEP_S / supervise._ASK_S
    yield Measured("which ranks ended", part, "step", asks, values, "one system call a rank")
    share = min(
        STEP_S / (s + max(supervise._POLL_S, supervise._BEATS_TIMES * s)) for s in beats.values()
    )
    note = "a pause of 100 times as long after each look"
    yield Measured("read heartbeats", part, "step", share, beats, note)
    part = "parallel/comm/heartbeat.py"
    yield Measured("who is to blame for a hang", part, "hang", None, judged, "once, at the end")


def recorded(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """A robust run's look at the records of all ranks."""
    looks: dict[int, float] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as place:
            directory = RunDir(Path(place))
            directory.ranks.mkdir(parents=True)
            for rank in range(world):
                Recorder(directory.flight(rank), rank, world, capacity=16).close()
            one: Any = SimpleNamespace(
                supervisor=SimpleNamespace(ranks=world), driver=SimpleNamespace(directory=directory)
            )
            looks[world] = least(lambda one=one: robust._Rules._flights(one))
    slowest = {
        world: STEP_S / max(robust._LOOK_S, robust._PAUSES * s) for world, s in looks.items()
    }
    times = min(slowest.values())
    note = f"rings of 16 operations; with most ranks a look every {STEP_S / times:.0f} s"
    yield Measured("read records, robust run", "train/watch/robust.py", "step", times, looks, note)


def told(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """The meter: what is recorded of a save, and reading events that grew."""
    saved: dict[int, float] = {}
    tailed: dict[int, float] = {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "events.jsonl"
            meter = Meter([JsonlSink(path=path)])
            ticket = SaveTicket(1)
            phases = {"plan": 0.1, "copy": 0.2, "write": 0.3}
            share = RankShare(10**9, phases, dict.fromkeys(phases, (0.0, 0.1)))
            ticket.ranks = (share,) * world
            ticket.settle()
            saves: Any = SimpleNamespace(
                _levels=SimpleNamespace(reports=list),
                tell_levels=lambda reports: None,
                _saver=SimpleNamespace(finished=lambda ticket=ticket: [ticket]),
                peers=SinglePeer(),
                _meter=meter,
                _job=SimpleNamespace(
                    checkpoint=SimpleNamespace(mode=SimpleNamespace(name="snapshot"))
                ),
            )
            saved[world] = least(lambda saves=saves: RunSaver._tell(saves))
            tail = EventTail(path)
            tail._at = 0
            tailed[world] = least(lambda tail=tail: list(tail), 1)
            meter.close()
    every = 1 / SAVE_STEPS
    yield Measured("record a save", "train/saving.py", "save", every, saved, "one event, gauges")
    note = f"of {REPEATS} saves"
    yield Measured("read new events", "core/meter/events.py", "save", every, tailed, note)


class Everyone:
    """A communicator whose ranks all give what this one gives."""

    def __init__(self, world: int) -> None:
        self.world, self.rank, self.device = world, 0, "cpu"
        self.ranks = tuple(range(world))

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, *, tag: str) -> Any:
        """See :class:`~shoal.ir.Comm`."""
        out.view(self.world, -1).copy_(x.expand(self.world, -1))
        return SimpleNamespace(wait=lambda: None)


def starting(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """Agreement on the job, groups of ranks, groups of replicas in memory, order of the data."""
    results: list[dict[int, float]] = [{} for _ in range(4)]
    for world in worlds:
        comm: Any = Everyone(world)
        results[0][world] = least(lambda comm=comm: agree(comm, "the job", {"a": [1] * 100}))
        layout = Layout((("pp", 4), ("dp", world // 32), ("tp", 8)))
        results[1][world] = least(
            lambda layout=layout: [layout.groups(axis) for axis in ("pp", "dp", "tp")]
        )
        results[2][world] = least(
            lambda world=world: coding_groups(range(world), group=4, ranks_per_node=8)
        )
        split: Any = Endless()
        rows = {"seq_len": 4096, "global_batch": 2 * world, "rank": 0, "world": world}
        results[3][world] = least(
            lambda s=split, rows=rows: batch(s, "stream", seed=1, step=0, **rows)
        )
    yield Measured(
        "agree on the job", "parallel/comm/agree.py", "start", None, results[0], "32 bytes a rank"
    )
    yield Measured("groups of ranks", "ir/layout.py", "start", None, results[1], "pp 4, tp 8, dp")
    part = "checkpoint/inmemory/layout.py"
    yield Measured(
        "groups of replicas", part, "start", None, results[2], "4 replicas, 8 ranks a node"
    )
    note = "rows of one rank; two of 4,096 tokens"
    yield Measured("order of the data", "corpora/order.py", "step", 1.0, results[3], note)


class Endless:
    """Tokens enough for a global batch of any world; see TokenSplit."""

    name, learned = "train", None

    def __len__(self) -> int:
        return 10**12

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill with tokens."""
        out_N[:] = start % 1000


def saving(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """Votes, merge of shards and commit of a save."""
    votes: dict[int, float] = {}
    cold: dict[int, float] = {}
    warm: dict[int, float] = {}
    commit: dict[int, float] = {}
    values: dict[int, float] = {}
    tensors = simulated.llama()
    for world in worlds:
        folder = simulated.saved_by(world, tensors)
        cold[world] = least(lambda folder=folder: Merger().merge(1, {}, folder.votes), 2)
        merger = Merger()
        merger.merge(1, {}, folder.votes)
        warm[world] = least(lambda m=merger, folder=folder: m.merge(1, {}, folder.votes))
        first = simulated.held(0, world, tensors)
        said = simulated.proposals(1, lambda rank, first=first: first)[0]
        own = np.frombuffer(said, PROPOSAL).copy()
        every = []
        for rank in range(world):
            mine = own.copy()
            mine["first"][mine["bytes"] > 4] += rank  # each has rows of its own
            every.append(mine)
        values[world] = least(lambda every=every: assign(every), 2)
        with tempfile.TemporaryDirectory() as place:
            store = Store(place)
            store._merger = merger
            (draft := LocalStorage(Path(place)).draft(1, "a")).prepare()
            for rank, vote in enumerate(folder.votes):
                (draft.path / shard_name(rank)).write_bytes(vote)
            waiting: Any = SimpleNamespace(peers=SimpleNamespace(world=world), store=store)
            votes[world] = least(lambda w=waiting, d=draft: Background._await_votes(w, d))
            commit[world] = least(lambda s=store, d=draft, w=world: s.commit(d, w, {}), 1)
    every_save = 1 / SAVE_STEPS
    yield Measured(
        "look at votes",
        "checkpoint/background.py",
        "save",
        every_save,
        votes,
        "one listing; pauses are 200 times as long",
    )
    part = "checkpoint/index.py"
    yield Measured("merge of shards", part, "save", every_save, warm, "of a known layout")
    yield Measured("merge of shards, new layout", part, "layout", None, cold, "parsed and checked")
    note = "shards are read, merged, and renamed into place"
    yield Measured("commit", "checkpoint/store.py", "save", every_save, commit, note)
    part, note = "checkpoint/plan.py", "on every rank; 24 bytes a box"
    yield Measured("who writes what", part, "layout", None, values, note)


def loading(worlds: tuple[int, ...]) -> Iterator[Measured]:
    """Opening a checkpoint and planning the reads of one rank, in several splits."""
    tensors = simulated.llama()
    opened: dict[int, float] = {}
    splits: dict[str, dict[int, float]] = {}
    wished: dict[int, float] = {}
    for world in worlds:
        folder = simulated.saved_by(world, tensors)
        opened[world] = least(folder.index)
        for name, other, layout in (
            ("as many ranks", world, simulated.zero3),
            ("half as many", world // 2, simulated.zero3),
            ("8 ranks", 8, simulated.zero3),
        ):
            rank = other // 3
            own = simulated.wishes(rank, other, tensors, layout)
            every = (simulated.wishes(one, other, tensors, layout) for one in range(other))
            homes = simulated.homes_of(every, other)
            gathered = [simulated.together(homes.get(home, [])) for home in range(other)]
            # What one rank does of the agreement: tells its wishes, joins a share, hears all.
            most = max(homes, key=lambda home: sum(map(len, homes[home])))
            wished[world] = max(
                wished.get(world, 0.0),
                least(lambda own=own, other=other: simulated.addressed(own, other))
                + least(lambda one=homes[most]: simulated.together(one))
                + least(lambda gathered=gathered: simulated.told_all(gathered)),
            )
            wants = simulated.told_all(gathered)
            splits.setdefault(name, {})[world] = least(
                lambda f=folder, w=wants, own=own, r=rank: plan_reads(f.index(), w, own, r)
            )
    part = "checkpoint/index.py"
    yield Measured("open a checkpoint", part, "load", None, opened, "on every rank")
    part = "checkpoint/agreement.py"
    yield Measured("agree on wishes", part, "load", None, wished, "on every rank")
    for name, seconds in splits.items():
        note = "on every rank, the index opened for it"
        yield Measured(f"plan reads, {name}", "checkpoint/reads.py", "load", None, seconds, note)


def main() -> None:
    """Measure all, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="write nothing")
    parser.add_argument("--only", default="", help="one function of this file; others stay")
    parser.add_argument("worlds", nargs="*", type=int, help="instead of 64, 512 and 4096")
    words = parser.parse_args()
    worlds = tuple(words.worlds) or WORLDS
    planned = tuple(words.worlds) or PLANNED
    torch.set_num_threads(1)
    rows: list[Measured] = []
    for measure, sizes in (
        (watching, worlds),
        (recorded, worlds),
        (told, worlds),
        (starting, worlds),
        (saving, tuple(sorted({*worlds, *planned[1:2]}))),
        (loading, planned),
    ):
        if words.only not in ("", measure.__name__):
            continue
        for one in measure(sizes):
            rows.append(one)
            print(one.name, {w: f"{1e3 * s:.2f} ms" for w, s in one.seconds.items()}, flush=True)
    if not words.dry:
        fresh = {one.name: one.plain() for one in rows}
        old = json.loads(RESULTS.read_text())["rows"] if words.only and RESULTS.exists() else []
        kept = [fresh.pop(one["name"], one) for one in old]
        write_json(
            RESULTS,
            {
                "step_s": STEP_S,
                "share": SHARE,
                "save_steps": SAVE_STEPS,
                "model": "Llama-3.1-8B",
                "rows": [*kept, *fresh.values()],
                "machine": fingerprint(),
                "versions": versions(),
                "date": time.strftime("%Y-%m-%d"),
            },
        )


if __name__ == "__main__":
    main()

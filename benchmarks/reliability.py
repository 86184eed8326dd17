"""Failures for real: processes killed while they save, ranks and nodes lost, bytes flipped.

Usage: python benchmarks/reliability.py [saves] [ranks] [nodes] [bytes] [--quick] [--dry]

``saves``: a process that saves without a pause is killed by SIGKILL at 50 random moments, in every
mode; after each the newest checkpoint is loaded, every byte verified. ``ranks`` and ``nodes``: one
of four ranks, or one of two nodes with two ranks each and their snapshot processes, is killed by
SIGKILL at random steps of a training run, which goes on from memory by itself; its losses are held
against those of a run without faults. ``bytes``: one bit of a checkpoint is flipped, anywhere.
Each part takes a minute or less; ``--quick`` takes a few kills of each and records nothing, and so
does ``--dry``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from common import RESULTS, Row, finish

from shoal.checkpoint import SAVE_MODES
from shoal.checkpoint.levels import LevelCopier
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.meter import read_events

TABLE = RESULTS.parent / "checkpoints" / "reliability.json"
KILLS, FLIPS, FAULTS = 50, 300, 3
KEEP = 2
# A kill comes at most so long after the first save began, s: in one of the first few.
LONGEST_S = 0.3
# Bytes of a tensor that is saved, and how many there are.
TENSOR, TENSORS = 2**21, 5
# A way of saving -> mode, and whether what is complete goes on to a farther level.
WAYS = {**{mode: (mode, False) for mode in SAVE_MODES}, "lazy, two levels": ("lazy", True)}
WORLD = 4
MODEL = "shoal-1m"
BANDWIDTH = 1.25e9
# Steps between two faults.
APART = 8


def state(step: int) -> dict[str, torch.Tensor]:
    """Tensors that tell which step they are of; of each byte, which place."""
    state = {}
    for number in range(TENSORS):
        values = torch.arange(TENSOR // 4, dtype=torch.int32) + step * TENSORS + number
        state[f"model.{number}"] = values
    return state


def newest(store: Store, least: int) -> int | None:
    """The newest step, if every byte is verified, as it was saved, and not older than ``least``."""
    try:
        saved = store.latest()
    except CheckpointError as refusal:
        print(refusal, flush=True)
        return None
    if saved is None or saved.step < least:
        print(f"{store.where}: {saved and saved.step} is loaded, {least} was saved", flush=True)
        return None
    there = all(torch.equal(saved.tensor(n), tensor) for n, tensor in state(saved.step).items())
    return saved.step if there else None


def save_for_ever(near: Store, far: Store | None, mode: str, first: int, told: int) -> None:
    """Save step by step, training between them, and say which are durable."""
    if far is not None:
        LevelCopier(near, far)
    saver = SAVE_MODES.build(mode).build(near, SinglePeer())
    live = state(first)
    os.write(told, (0).to_bytes(4, "big"))
    for step in range(first, first + 10_000):
        saver.before_update()
        for name, tensor in state(step).items():
            live[name].copy_(tensor)
        saver.save(step, live, {"seed": step})
        for ticket in saver.finished():
            if ticket.error is None:
                os.write(told, ticket.step.to_bytes(4, "big"))


def saves(kills: int) -> tuple[list[Row], dict[str, Any]]:
    """Kill savers at random moments."""
    torch.set_num_threads(1)  # what is forked must have no threads
    choose = random.Random(0)
    table = {}
    for way, (mode, levelled) in WAYS.items():
        with tempfile.TemporaryDirectory(prefix="shoal-reliability-") as root:
            near = Store(Path(root) / "near", keep=KEEP)
            far = Store(Path(root) / "far", keep=KEEP) if levelled else None
            near.save(0, state(0), {"seed": 0})
            if far is not None:
                far.save(0, state(0), {"seed": 0})
            done = arrived = during = loaded = 0
            for _ in range(kills):
                reader, writer = os.pipe()
                child = os.fork()
                if child == 0:
                    save_for_ever(near, far, mode, done + 1, writer)
                    os._exit(0)
                os.close(writer)
                os.read(reader, 4)  # it begins to save now
                time.sleep(choose.uniform(0.0, LONGEST_S))
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                outcome = b""
                while more := os.read(reader, 2**16):
                    outcome += more
                os.close(reader)
                during += any(near.root.glob(".step-*"))
                result = newest(near, max(done, int.from_bytes(outcome[-4:], "big")))
                sent = arrived if far is None else newest(far, arrived)
                loaded += result is not None and sent is not None
                done, arrived = result or done, sent or arrived
            table[way] = {
                "kills": kills,
                "in_the_middle": during,
                "loaded": loaded,
                "last_step": done,
                **({"last_step_far": arrived} if levelled else {}),
            }
            print(f"{way}: {table[way]}", flush=True)
    size = TENSOR * TENSORS
    rows = [
        Row(
            name=f"killed while saving, {way}: a verified checkpoint loads",
            value=found["loaded"] / found["kills"],
            unit="",
            comparison=">=",
            threshold=1.0,
            note=f"SIGKILL at {kills} random moments of {size / 2**20:.0f} MiB saves, "
            f"{found['in_the_middle']} in the middle of writing; no step that was told is lost",
        )
        for way, found in table.items()
    ]
    return rows, {"state_bytes": size, "ways": table}


def ranks(faults: int) -> tuple[list[Row], dict[str, Any]]:
    """Kill one of four ranks, with the state in memory."""
    return trained(faults, size=1)


def nodes(faults: int) -> tuple[list[Row], dict[str, Any]]:
    """Kill one of two nodes, with two ranks and their snapshot processes."""
    return trained(faults, size=WORLD // 2)


def trained(faults: int, *, size: int) -> tuple[list[Row], dict[str, Any]]:
    """Train twice, once with faults that take ``size`` ranks each."""
    from shoal.train.run import execute

    source = random.Random(size)
    due = [4 + APART * number + source.randrange(4) for number in range(faults)]
    lost = [source.randrange(WORLD // size) * size for _ in due]
    steps = due[-1] + APART
    killed: list[float] = []
    started: list[float] = []

    def inject(supervisor: Any, event: Mapping[str, Any]) -> None:
        if event["kind"] == "start":
            began = psutil.Process(supervisor.processes[0].pid).create_time()
            started.append(event["time"] - began)
        if event["kind"] != "step" or len(killed) == len(due) or event["step"] < due[len(killed)]:
            return
        first = lost[len(killed)]
        killed.append(time.time())
        if size == 1:
            supervisor.processes[first].kill()
        else:
            supervisor.lose(range(first, first + size))

    with tempfile.TemporaryDirectory(prefix="shoal-reliability-") as root, hosts(size) as result:
        place = Path(root)
        os.environ["SHOAL_HOME"] = str(place / "home")
        execute(plan(place, steps, None), place / "right", hosts=result)
        memory = {"name": "xor", "ranks_per_node": size}
        run = place / "run"
        execute(plan(place, steps, memory), run, restarts=faults, inject=inject, hosts=result)
        wanted = losses(place / "right")
        events = list(read_events(run / "events.jsonl"))
        same = losses(run) == wanted
    notes = []
    for when, at in zip(
        killed, [n for n, event in enumerate(events) if event["kind"] == "recover"], strict=True
    ):
        done = max(event["step"] for event in events[:at] if event["kind"] == "step") + 1
        start = next(event for event in events[at:] if event["kind"] == "start")
        step = next(event for event in events[at:] if event["kind"] == "step")
        notes.append(
            {
                "level": start["level"],
                "steps_lost": done - start["step"],
                "seconds": step["time"] - when,
                # The first start had nothing to go on from: it is what starting processes takes.
                "beyond_start_s": step["time"] - when - started[0],
            }
        )
    what = "one of four ranks" if size == 1 else "one of two nodes, two ranks each"
    where = "plain processes" if result is None else "network namespaces"
    table = {
        "faults": notes,
        "same_losses": same,
        "start_s": started[0],
        "what": what,
        "hosts": where,
        "steps": steps,
    }
    print(json.dumps(table), flush=True)
    note = f"kill -9 of {what} ({where}), {faults} times in {steps} steps, state in memory (xor)"
    rows = [
        Row(
            name=f"killed {what}: gone on from memory with the same losses",
            value=float(same) * statistics.fmean(one["level"] == "memory" for one in notes),
            unit="",
            comparison=">=",
            threshold=1.0,
            note=note,
        ),
        Row(
            name=f"killed {what}: steps lost",
            value=max(one["steps_lost"] for one in notes),
            unit="",
            comparison="<=",
            threshold=1.0,
            note=note,
        ),
        Row(
            name=f"killed {what}: time to go on",
            value=max(one["beyond_start_s"] for one in notes),
            unit="s",
            comparison="<=",
            threshold=10.0,
            note=f"{note}; from the kill to the end of the first step, beyond the "
            f"{started[0]:.1f} s that starting the processes takes",
        ),
    ]
    return rows, table


@contextlib.contextmanager
def hosts(size: int) -> Iterator[Any]:
    """Hosts of so many ranks each, if this machine can have them."""
    from shoal.machine.emulate import emulate, unavailable
    from shoal.train.memory import EmulatedHosts

    if unavailable() is not None:
        yield None
        return
    with emulate(WORLD // size, bandwidth=BANDWIDTH) as network:
        yield EmulatedHosts(network, size)


def plan(place: Path, steps: int, memory: Mapping[str, Any] | None) -> Any:
    """A run of four replicas on the standard library's text."""
    from shoal.cost.shapes import find
    from shoal.cost.training.step import estimate
    from shoal.ir import TrainJob, TrainPlan, Work
    from shoal.machine.described import load
    from shoal.train.planning import with_kernels

    corpus = place / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
            (corpus / path.name).write_bytes(path.read_bytes()[:40_000])
    job = TrainJob.model_validate(
        {
            "name": "reliability",
            "model": MODEL,
            "data": {"name": "text", "path": str(corpus), "pattern": "*.py"},
            "steps": steps,
            "seq_len": 64,
            "global_batch": 2 * WORLD,
            "threads": 1,
            "precision": "fp32",
            "parallel": {"dp": WORLD},
            "checkpoint": {"every": 0, "memory": memory},
            "evaluation": {"every": 0, "final": False, "sample_tokens": 0},
            "timeout_s": 60,
        }
    )
    machine, shape = load("laptop"), find(MODEL)
    cost = estimate(Work(shape=shape, job=job), machine)
    return with_kernels(TrainPlan(job=job, machine=machine, shape=shape, estimate=cost))


def losses(run: Path) -> dict[int, float]:
    """Step -> loss; the last time a step was done counts."""
    events = read_events(run / "events.jsonl")
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


def bytes_(flips: int) -> tuple[list[Row], dict[str, Any]]:
    """Flip one bit of the newest of two checkpoints, anywhere in its files."""
    source = random.Random(0)
    counts = dict.fromkeys(("flips", "refused", "file_named", "tensor_named", "of_tensors"), 0)
    offered = 0
    with tempfile.TemporaryDirectory(prefix="shoal-reliability-") as root:
        store = Store(root)
        small = {name: tensor[:1000] for name, tensor in state(1).items()}
        for step in (1, 2):
            store.save(step, small, {"seed": step})
        folder = store.folder(2)
        kept = Path(root) / "kept"
        shutil.copytree(folder, kept)
        files = sorted(file.name for file in kept.iterdir())
        sizes = [(kept / name).stat().st_size for name in files]
        for _ in range(flips):
            name = source.choices(files, sizes)[0]
            raw = bytearray((kept / name).read_bytes())
            at = source.randrange(len(raw))
            raw[at] ^= 1 << source.randrange(8)
            (folder / name).write_bytes(raw)
            counts["flips"] += 1
            within = name.endswith(".safetensors") and at >= 8 + int.from_bytes(raw[:8], "little")
            try:
                store.latest()
            except CorruptError as refusal:
                words = str(refusal)
                counts["refused"] += 1
                counts["file_named"] += name in words
                counts["of_tensors"] += within
                counts["tensor_named"] += within and "tensor 'model." in words
                offered += "step 1 in" in words and "is intact" in words
            shutil.copyfile(kept / name, folder / name)
        if store.latest() is None:
            raise SystemExit("the checkpoint is not whole again")
    table = {**counts, "offered": offered}
    print(table, flush=True)
    note = f"one bit of {flips} random bytes of index and tensors, one after the other"
    row = Row(
        name="flipped bytes: refused, file named, previous step offered",
        value=min(counts["refused"], counts["file_named"], offered) / counts["flips"],
        unit="",
        comparison=">=",
        threshold=1.0,
        note=f"{note}; of {counts['of_tensors']} in tensors {counts['tensor_named']} name it",
    )
    return [row], table


PARTS = {
    "saves": (saves, KILLS, 4),
    "ranks": (ranks, FAULTS, 1),
    "nodes": (nodes, FAULTS, 1),
    "bytes": (bytes_, FLIPS, 20),
}


def main() -> None:
    """Break what is asked for, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    rows: list[Row] = []
    table: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for name in given.parts or PARTS:
        part, whole, few = PARTS[name]
        result, table[name] = part(few if given.quick else whole)
        rows += result
    finish(TABLE, table, rows, dry=given.quick or given.dry)


if __name__ == "__main__":
    main()

"""[62] InMemoryFT: state in the memory of other processes outlives trainers and nodes.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023.

Four replicas of a 4M-parameter model, each on a host of its own (network namespaces, else
processes). Trainers, and hosts with their snapshot process, are killed at random steps; losses are
held against a run without faults. Steps take turns: saved in memory, to the disk, and not. Survival
is simulated. The A/A run goes back to the disk, copies everything everywhere, and keeps no parity.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from shoal.claims.cached import own_home
from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import losses_of, run_plan
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ShoalError
from shoal.core.meter import read_events
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.machine.emulate import emulate, unavailable
from shoal.plan.memory.survival import Survival, sampled

_WORLD = 4
_WORKER = "shoal.claims.experiments.inmemory_ft_worker"
_MODEL = "shoal-4m"
_BANDWIDTH = 1.25e9
# Steps between two faults, and between checkpoints on the disk.
_APART = 8
_DISK_EVERY = 10
# Timed cycles of three steps that make one sample.
_CYCLES = 4


@part
class InMemoryFT(BaseClaim, row=62):
    """Five trainers and four nodes killed; a snapshot after every step; a hundred thousand jobs.

    Args:
        trainers: trainers killed.
        nodes: hosts killed.
        samples: samples of the cost of a step, each of several steps in every way.
        trials: simulated jobs.
    """

    trainers: Annotated[int, Ge(1)] = 5
    nodes: Annotated[int, Ge(1)] = 4
    samples: Annotated[int, Ge(1)] = 10
    trials: Annotated[int, Ge(1000)] = 100_000

    def collect(self, run: ClaimRun) -> None:
        """Decode, count and simulate; kill and go on; time."""
        _count(run)
        run.put("decoded", _decoded(run.seed, run.as_baseline))
        _survival(run, min(self.trials, 20_000) if run.quick else self.trials)
        if run.quick:
            return
        result = run.remember("runs", lambda: self._runs(run.context))
        run.details["ended_by"] = result["ended_by"]
        side = run.pick("memory", "disk")
        for name in ("recovered", "steps_lost", "same_losses", "recovery_s"):
            run.put(name, result[side][name])
        times = run.remember("times", lambda: self._times(run.context))
        none, mine, disk = (times[mode] for mode in ("none", side, "disk"))
        run.put("step_ratio", mine, none)
        run.put(
            "disk_over_memory",
            (max(m - n, 1e-3 * n) for m, n in zip(mine, none, strict=True)),
            (max(d - n, 0.0) for d, n in zip(disk, none, strict=True)),
        )
        cost = times["settled"]
        run.profile = (
            f"a step {1e3 * statistics.median(none):.0f} ms; of a snapshot copying "
            f"{1e3 * cost['busy_s']:.1f} ms, coding {1e3 * cost['code_s']:.0f} ms beside the "
            f"computation on shared cores, waiting {1e3 * cost['waited_s']:.1f} ms"
        )

    def _runs(self, context: ExperimentContext) -> dict[str, Any]:
        """One run without faults, one with all of them."""
        from shoal.train.run import execute

        source = random.Random(context.seed)
        kinds = ["trainer"] * self.trainers + ["node"] * self.nodes
        source.shuffle(kinds)
        faults = [
            (4 + _APART * i + source.randrange(4), kind, source.randrange(_WORLD))
            for i, kind in enumerate(kinds)
        ]
        steps = faults[-1][0] + _APART
        right, run = context.work_dir / "right", context.work_dir / "run"
        killed: list[float] = []
        starts: list[float] = []

        def inject(supervisor: Any, event: Mapping[str, Any]) -> None:
            if event["kind"] == "start":
                starts.append(event["monotonic_s"] - _created(supervisor.processes[0].pid))
                return
            due = len(killed) < len(faults) and event["kind"] == "step"
            if not due or event["step"] < faults[len(killed)][0]:
                return
            _, kind, rank = faults[len(killed)]
            killed.append(time.monotonic())
            if kind == "node":
                supervisor.lose([rank])
            else:
                supervisor.processes[rank].kill()

        with own_home(context.work_dir), _hosts() as hosts:
            context.progress("a run without faults", 0.05)
            execute(_plan(context, steps, None), right, hosts=hosts)
            context.progress("trainers and nodes are killed", 0.15)
            error = ""
            plan, times = _plan(context, steps, "xor"), len(faults)
            try:
                execute(plan, run, restarts=times, inject=inject, hosts=hosts)
            except ShoalError as cause:
                error = str(cause)
        events = list(read_events(run / "events.jsonl"))
        wanted, got = losses_of(read_events(right / "events.jsonl")), losses_of(events)
        result = _report(events, killed, starts[0])
        run_s = result["recovery_s"] or [1e3]
        return {
            "memory": {
                "recovered": result["recovered"] or [0.0],
                "steps_lost": result["lost"] or [float(steps)],
                "same_losses": [float(got.get(s) == loss) for s, loss in wanted.items()],
                "recovery_s": run_s,
            },
            "disk": {
                "recovered": [0.0] * len(faults),
                "steps_lost": result["disk"] or [float(steps)],
                "same_losses": [faults[0][0] / steps],
                "recovery_s": run_s,
            },
            "ended_by": error,
        }

    def _times(self, context: ExperimentContext) -> dict[str, Any]:
        """Seconds of steps that are saved in three ways, in turn."""
        from shoal.claims.experiments.inmemory_ft_worker import MODES, WARM
        from shoal.train.layout import RunDir
        from shoal.train.memory import MemoryLevel
        from shoal.train.run import prepare_run
        from shoal.train.supervise import Supervisor

        context.progress("steps saved in three ways", 0.7)
        steps = WARM + len(MODES) * _CYCLES * self.samples
        plan = _plan(context, steps, "xor", seq_len=256, global_batch=16)
        directory = RunDir(context.work_dir / "times")
        with own_home(context.work_dir), _hosts() as hosts:
            prepare_run(plan, directory, resume=False)
            with MemoryLevel(plan.job, directory, None, hosts) as level:
                places: dict[str, Any] = {}
                if hosts is not None:
                    places = {"environment": hosts.environment, "prefix": hosts.prefix}
                supervisor = Supervisor(
                    directory, ranks=_WORLD, threads=1, timeout_s=plan.job.timeout_s,
                    module=_WORKER, level=level.fleet, **places,
                )  # fmt: skip
                supervisor.start()
                supervisor.wait(lambda: None)
        data = json.loads((directory.root / "times.json").read_text())
        blocks: dict[str, Any] = {
            mode: [statistics.fmean(taken[i : i + _CYCLES]) for i in range(0, len(taken), _CYCLES)]
            for mode, taken in data["seconds"].items()
        }
        keys = ("busy_s", "code_s", "waited_s")
        blocks["settled"] = {
            key: statistics.median(one[key] for one in data["settled"][2:]) for key in keys
        }
        return blocks


def _plan(context: ExperimentContext, steps: int, memory: str | None, **changes: Any) -> Any:
    fields = {"seq_len": 128, "global_batch": 2 * _WORLD, **changes}
    return run_plan(
        context, 60, name="inmemory", model=_MODEL, steps=steps, parallel={"dp": _WORLD},
        checkpoint={"every": _DISK_EVERY, "keep": 2, "memory": memory}, **fields,
    )  # fmt: skip


def _report(
    events: Sequence[Mapping[str, Any]], killed: Sequence[float], start_s: float
) -> dict[str, list[float]]:
    """Of every fault: whether from memory, steps lost from memory and the disk, and seconds."""
    names = ("recovered", "lost", "disk", "recovery_s")
    result: dict[str, list[float]] = {name: [] for name in names}
    recovered = [i for i, e in enumerate(events) if e["kind"] == "recover"]
    for when, at in zip(killed, recovered, strict=False):
        before, after = events[:at], events[at:]
        start = next((e for e in after if e["kind"] == "start"), None)
        step = next((e for e in after if e["kind"] == "step"), None)
        if start is None or step is None:
            result["recovered"].append(0.0)
            continue
        done = max(e["step"] for e in before if e["kind"] == "step") + 1
        disk = max((e["step"] for e in before if e["kind"] == "checkpoint"), default=0)
        result["recovered"].append(float(start["level"] == "memory"))
        result["lost"].append(float(done - start["step"]))
        result["disk"].append(float(done - disk))
        # The first start had nothing to read: it is what starting processes takes.
        result["recovery_s"].append(step["monotonic_s"] - when - start_s)
    return result


def _created(pid: int) -> float:
    """When a process was started, in seconds of the monotonic clock."""
    after_boot = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def _count(run: ClaimRun) -> None:
    """Bytes that each node copies and keeps of the model's weights and optimizer state."""
    from shoal.checkpoint.inmemory import MEMORY_CODES
    from shoal.checkpoint.inmemory.layout import BoxEntry, piece_bytes, shares
    from shoal.checkpoint.inmemory.stripes import Stripes
    from shoal.cost.shapes import find
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import empty

    entries = []
    for name, parameter in empty(ModelConfig.from_shape(find(_MODEL))).named_parameters():
        shape = tuple(parameter.shape)
        at = (0,) * len(shape)
        for key in ("model", "exp_avg", "exp_avg_sq"):
            entries.append(
                BoxEntry(f"{key}.{name}", "float32", shape, at, shape, 4 * parameter.numel())
            )
        entries.append(BoxEntry(f"step.{name}", "float32", (), (), (), 4))
    total = sum(entry.nbytes for entry in entries)
    pieces = [piece_bytes(s) for s in shares(dict.fromkeys(range(_WORLD), entries)).values()]
    stripes = Stripes.of(MEMORY_CODES.build(run.pick("xor", "copies")), _WORLD, max(pieces))
    copied = run.pick(pieces, [total] * _WORLD)
    parity = stripes.parity * stripes.block
    run.put("copied_share", (c / (total / _WORLD) for c in copied))
    run.put("parity_share", parity / (max(pieces) / (_WORLD - 1)))


def _decoded(seed: int, as_baseline: bool) -> list[float]:
    """For every loss that a code survives: whether the piece is rebuilt bit for bit."""
    import numpy as np

    from shoal.checkpoint.inmemory import MEMORY_CODES
    from shoal.checkpoint.inmemory.stripes import Stripes
    from shoal.core.errors import CheckpointError

    values: list[float] = []
    for code, members in (
        ("xor", _WORLD),
        ({"name": "rs", "losses": 2}, 6),
        ({"name": "rs", "losses": 3}, 8),
    ):
        stripes = Stripes.of(MEMORY_CODES.build(code), members, 50_000)
        source = generator(seed, purpose="inmemory pieces")
        kept = [source.integers(0, 256, stripes.kept, np.uint8) for _ in range(members)]
        stripes.encode(kept)
        for lost in itertools.combinations(range(members), stripes.parity):
            end = stripes.data if as_baseline else stripes.blocks
            there = [range(0 if m in lost else end) for m in range(members)]

            def read(member: int, block: int, offset: int, length: int) -> Any:
                return kept[member][block * stripes.block + offset :][:length]  # noqa: B023

            for member in lost:
                out = np.zeros(stripes.kept, np.uint8)
                try:
                    stripes.rebuild(member, read, there, out, bucket=2**16)
                except CheckpointError:
                    values.append(0.0)
                else:
                    values.append(float(np.array_equal(out, kept[member])))
    return values


def _survival(run: ClaimRun, trials: int) -> None:
    """Simulated against computed survival of jobs that fail early, evenly and late."""
    simulated, computed, hours = [], [], 48.0
    for shape, losses in ((0.8, 1), (1.0, 1), (1.5, 2)):
        job = Survival(nodes=64, group=4, losses=losses, mtbf_h=2000.0, shape=shape)
        simulated.append(sampled(job, hours, trials=trials, seed=run.seed))
        computed.append(job.uncoded(hours) if run.as_baseline else job.of_job(hours))
    run.put("survival_error", simulated, computed)


@contextlib.contextmanager
def _hosts() -> Iterator[Any]:
    """A host for every rank, if this machine can have them."""
    from shoal.train.memory import EmulatedHosts

    if unavailable() is not None:
        yield None
        return
    with emulate(_WORLD, bandwidth=_BANDWIDTH) as network:
        yield EmulatedHosts(network, 1)

"""[81] MegaScale: a run that names its own faults and goes on; overlaps; barriers at the start.

Source: Jiang et al., MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs,
2024.

Eight worker processes are killed, or something below them is broken: a collective never begins, a
rank is half as fast, the loader gives no more rows, products are wrong. The driver sees processes,
beats, output and records. The A/A run blames who waits longest, repairs nothing, overlaps nothing,
and lets every rank make every group; the quick run is on threads with a virtual clock.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, MultipleOf

from shoal.claims.cached import own_home
from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.c4 import longest_waiter
from shoal.claims.experiments.tiny import losses_of, run_plan, train_job
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.bootstrap import bootstrap, groups_of
from shoal.claims.lab.overlap_ladder import ladder
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.errors import ShoalError
from shoal.core.meter import read_events
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.cost.shapes import find
from shoal.ir import Parallel, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.machine.emulate import emulate, unavailable
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.megascale import MegaScale as Locator
from shoal.train.watch.recorder import Recorder
from shoal.train.watch.watched_comm import WatchedComm

KINDS = ("kill", "hang", "slow", "stall", "corrupt")
_WORLD = 8
_WORKER = "shoal.claims.experiments.megascale_worker"
_RANKS = "shoal.claims.experiments.megascale_ranks"
# Steps between two faults of one run: enough to find a straggler and to train on.
_APART = 48
_BANDWIDTH = 300e6 / 8
_TP, _PP = 8, 8
_SWAPS = {"during": "after"}
# Recorded operations that are timed together, and how often.
_CALLS, _REPEATS = 5000, 5


@part
class MegaScaleClaim(BaseClaim, row=81):
    """Five kinds of fault in eight processes; the ladder of a 175B plan; groups of 1024 ranks.

    Args:
        faults: faults of each kind.
        clean_steps: steps without faults.
        pairs: timings of data-parallel overlap.
        ranks: fake ranks that make their groups.
    """

    faults: Annotated[int, Ge(1)] = 5
    clean_steps: Annotated[int, Ge(20)] = 500
    pairs: Annotated[int, Ge(1)] = 9
    ranks: Annotated[int, MultipleOf(_TP * _PP), Ge(256)] = 1024

    def collect(self, run: ClaimRun) -> None:
        """Break, watch, repair; count; simulate; and time two processes with a slow link."""
        context = run.context
        key, make = ("planted", _plant) if run.quick else ("trained", self._train)
        result = run.remember(key, lambda: make(context))
        run.put("named", result[run.pick("named", "blamed")])
        run.put("false_alarms", result[run.pick("alarms", "blamed_alarms")])
        run.put("barrier_growth", _growth(self.ranks, run.as_baseline))
        run.put("ladder_speedup", _ladder(run))
        if run.quick:
            return
        run.details["faults"] = result["faults"]
        run.put("same_losses", result[run.pick("same", "unrepaired")])
        run.put("recorder_share", result["recorder_share"])
        if run.lacks(unavailable(), "overlap_speedup"):
            return
        run.progress("gradients over a slow link", 0.9)
        times = _overlapped(self.pairs, run.arms({"during": True, "after": False}, _SWAPS))
        alone, after, during = (statistics.median(times[n]) for n in ("alone", "after", "during"))
        bound = after / max(alone, after - alone)
        run.put("overlap_speedup", times["during"], times["after"], bound=bound)
        run.profile = (
            f"passes {1e3 * alone:.0f} ms, sums after them "
            f"{1e3 * (after - alone):.0f} ms, together {1e3 * during:.0f} ms"
        )

    def _train(self, context: ExperimentContext) -> dict[str, Any]:
        """All runs: one without faults, one after the other with a fault of each kind."""
        from shoal.train.watch.robust import Robust, execute_robust

        steps = 8 + _APART * len(KINDS)
        robust = Robust(spares=len(KINDS), min_ranks=0, hang_s=6.0, slow_s=0.5)
        source = random.Random(context.seed)
        lists = ("named", "blamed", "same", "unrepaired", "faults")
        result: dict[str, Any] = {name: [] for name in lists}

        def trained(name: str, steps: int, **broken: Any) -> Path:
            folder = context.work_dir / name
            plan = self._plan(context, steps)
            execute_robust(plan, folder, robust, module=_WORKER, **broken)
            return folder

        with own_home(context.work_dir):
            context.progress("a run without faults", 0.0)
            clean = trained("clean", steps)
            alarms = len(_faults(clean))
            if self.clean_steps > steps:
                alarms += len(_faults(trained("longer", self.clean_steps - steps)))
            right = losses_of(_events(clean))
            evidence = Evidence.load(clean / "ranks")
            result["recorder_share"] = _recorder_share(evidence, clean)
            result["blamed_alarms"] = len(longest_waiter(evidence).faults)
            for number in range(self.faults):
                context.progress(f"run {number + 1} with five faults", 0.2 + 0.14 * number)
                order = source.sample(KINDS, len(KINDS))
                places = source.sample(range(_WORLD), len(KINDS))
                plan = {
                    place: (kind, 8 + _APART * i)
                    for i, (kind, place) in enumerate(zip(order, places, strict=True))
                }
                name = f"run-{number}"
                try:
                    trained(name, steps, environment=_broken(plan), inject=_killer(plan))
                except ShoalError as error:
                    result["faults"].append(f"{name} ended: {error}")
                run = context.work_dir / name
                faults = _faults(run)
                correct = {event["place"] for event in faults} & set(plan)
                result["named"] += [float(place in correct) for place in plan]
                alarms += sum(event["place"] not in plan for event in faults)
                losses = losses_of(_events(run))
                same = statistics.fmean(losses.get(s) == v for s, v in right.items())
                result["same"].append(same)
                result["unrepaired"].append(min(at for _, at in plan.values()) / steps)
                result["faults"] += [_report(event, plan) for event in faults]
                for i, event in enumerate(faults):
                    folder = run / "faults" / str(i + 1)
                    if list(folder.glob("*.flight")):
                        guess = longest_waiter(Evidence.load(folder)).faults[0].ranks[0]
                        result["blamed"].append(float(guess == event["rank"]))
        return {**result, "alarms": alarms, "blamed": result["blamed"] or [0.0]}

    def _plan(self, context: ExperimentContext, steps: int) -> TrainPlan:
        return run_plan(
            context, 40, name="megascale", steps=steps, seq_len=64, global_batch=2 * _WORLD,
            parallel={"dp": _WORLD}, checkpoint={"every": 4, "keep": 3},
            watch={"beat_s": 1.5, "check_every": 4},
        )  # fmt: skip


def _plant(context: ExperimentContext) -> dict[str, Any]:
    """What threads on a virtual clock can show: who ends, stops before a collective, or is slow."""
    from shoal.claims.experiments.c4_ranks import InjectedFault, run_virtual

    source = random.Random(context.seed)
    named, blamed = [], []
    for i in range(6):
        rank = source.randrange(_WORLD)
        slow = i % 2 == 0
        kind = "non_communication_slow" if slow else "non_communication_hang"
        fault = InjectedFault(kind, "rank", (rank,), 2.0, 1 if slow else 10)  # type: ignore[arg-type]
        with scratch_directory("megascale") as folder:
            evidence = run_virtual(folder, _WORLD, 14, fault, seed=context.seed + i)
        verdict = Locator().locate(evidence)
        named.append(float({f.ranks for f in verdict.faults} == {(rank,)}))
        blamed.append(float(longest_waiter(evidence).faults[0].ranks == (rank,)))
    with scratch_directory("megascale") as folder:
        evidence = run_virtual(folder, _WORLD, 60, None, seed=context.seed + 99)
    return {
        "named": named,
        "alarms": len(Locator().locate(evidence).faults),
        "blamed": blamed,
        "blamed_alarms": len(longest_waiter(evidence).faults),
    }


def _broken(plan: Mapping[int, tuple[str, int]]) -> Any:
    """Variables of a place: what is broken below its worker."""

    def environment(place: int) -> dict[str, str]:
        kind, step = plan.get(place, ("", 0))
        if kind in ("", "kill"):
            return {}
        return {"SHOAL_BROKEN": json.dumps({"kind": kind, "step": step})}

    return environment


def _killer(plan: Mapping[int, tuple[str, int]]) -> Any:
    """Kill the process of a place, once, when its step is done."""
    done: set[int] = set()

    def inject(supervisor: Any, event: Mapping[str, Any]) -> None:
        for place, (kind, step) in plan.items():
            ready = kind == "kill" and event["kind"] == "step" and event["step"] >= step
            if ready and place not in done:
                done.add(place)
                # Spares take the number of the rank that they replace, so this one is untouched.
                os.kill(supervisor.processes[place].pid, signal.SIGKILL)

    return inject


def _events(run: Path) -> list[dict[str, Any]]:
    return list(read_events(run / "events.jsonl"))


def _faults(run: Path) -> list[dict[str, Any]]:
    return [event for event in _events(run) if event["kind"] == "fault"]


def _report(event: Mapping[str, Any], plan: Mapping[int, tuple[str, int]]) -> str:
    kind, step = plan.get(event["place"], ("nothing", -1))
    return (
        f"{kind} from step {step}: {event['rule']} names place {event['place']} after step "
        f"{event['step']}, {event['seconds']:.1f} s: {str(event['message'])[:160]}"
    )


def _recorder_share(evidence: Evidence, run: Path) -> float:
    """Seconds that recording takes, over those of a step: the operations of a step, times one."""
    steps = evidence.steps()
    rows = evidence.flights[0].rows
    each = sum(int(step) in set(steps) for step in rows["step"].tolist()) / max(1, len(steps))
    times = [event["step_s"] for event in _events(run) if event["kind"] == "step"]
    share: float = each * _operation_s() / statistics.median(times)
    return share


class _Nothing:
    """A communicator, and a tensor, without anything behind it."""

    rank, world, ranks, ranks_per_node, device, meter, nbytes = 0, 2, (0, 1), None, "cpu", None, 4

    def all_reduce(self, x: object, *, tag: str, op: str = "sum") -> _Nothing:
        """Nothing."""
        return self

    def wait(self) -> None:
        """Nothing."""


def _operation_s() -> float:
    """Seconds more that an operation takes where it is recorded, waiting included."""
    bare: Any = _Nothing()
    with scratch_directory("recorder") as folder:
        recorder = Recorder(folder / "rank-0.flight", 0, 2)
        watched: Any = WatchedComm(bare, recorder)

        def once(comm: Any) -> float:
            begin = time.perf_counter()
            for _ in range(_CALLS):
                comm.all_reduce(bare, tag="probe").wait()
            return (time.perf_counter() - begin) / _CALLS

        more, plain = (min(once(comm) for _ in range(_REPEATS)) for comm in (watched, bare))
        recorder.close()
    return more - plain


def _growth(ranks: int, everyone: bool) -> float:
    """Exponent of the arrivals at barriers over the number of ranks."""
    numbers, arrivals = (ranks // 4, ranks), []
    for world in numbers:
        groups = groups_of(Parallel(tp=_TP, pp=_PP, dp=world // (_TP * _PP)))
        if everyone:
            # Each group is a barrier of all ranks; counted, not played: the store would see
            # nothing else.
            arrivals.append(world * (len(groups) + 1))
            continue
        mine: list[list[tuple[int, ...]]] = [[] for _ in range(world)]
        for group in groups:
            for rank in group:
                mine[rank].append(group)
        arrivals.append(bootstrap(world, mine, everyone=False).arrivals)
    return (math.log(arrivals[1]) - math.log(arrivals[0])) / math.log(numbers[1] / numbers[0])


def _ladder(run: ClaimRun) -> float:
    """Tokens a second with every overlap and the larger batch, over those with none."""
    job = TrainJob.model_validate(
        {
            "model": "GPT-3 175B", "seq_len": 2048, "global_batch": 256, "microbatch": 1,
            "parallel": {
                "dp": 4, "tp": 8, "pp": 8, "vpp": 6, "schedule": "interleaved", "sp": True,
            },
            "shard": "zero1",
        }
    )  # fmt: skip
    machine = load("A100").model_copy(update={"num_nodes": 32})
    rungs = ladder(Work(shape=find(job.model), job=job), machine)
    return run.pick(rungs[-1].tokens_per_s / rungs[0].tokens_per_s, 1.0)


def _overlapped(pairs: int, ways: dict[str, bool]) -> dict[str, tuple[float, ...]]:
    """Two processes with 300 Mbit/s between them; the slower rank's seconds, turn by turn."""
    from shoal.model.config import ModelConfig

    job = train_job(
        model="shoal-4m", seq_len=256, global_batch=16, microbatch=8, threads=1,
        parallel={"dp": 2}, shard={"name": "replicated", "bucket_mb": 1},
    )  # fmt: skip
    config = ModelConfig.from_shape(find("shoal-4m"))
    with emulate(2, bandwidth=_BANDWIDTH) as network:
        ranks = on_ranks(
            f"{_RANKS}:overlapped_steps", 2, network=network, timeout_s=120.0 + 20.0 * pairs,
            job=job, config=config, pairs=pairs, ways=ways,
        )  # fmt: skip
    return {way: slowest(ranks, way) for way in ranks[0]}

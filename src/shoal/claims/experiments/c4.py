"""[4] C4: faults are named from the records of collectives, and paths are planned.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024.

Faults of four kinds under watched communicators: eight threads on virtual and on real time, four
processes of which one is slow to send or receive. Three jobs run their rings at once on a simulated
fabric, hashed and planned. The A/A run blames who waits longest, and hashes.
"""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.path_jobs import times_of_jobs
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.machine.emulate import emulate, unavailable
from shoal.train.watch.c4d import C4D
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.protocols import Fault, FaultVerdict

if TYPE_CHECKING:
    from shoal.claims.experiments.c4_ranks import InjectedFault

_RANKS = "shoal.claims.experiments.c4_ranks"
_WORLD = 8
_STEPS = 24
_CHUNK = 100
_SHAPED_WORLD = 4
_SHAPED_BANDWIDTH = 25e6
_SHAPED_ELEMENTS = 1 << 16


@part
class C4(BaseClaim, row=4):
    """Sixty faults and a thousand clean steps; rings of three jobs on a fabric of 16 leaves.

    Args:
        faults: planted faults, a quarter of each kind.
        clean_steps: steps without any.
        draws: placements of the three jobs.
    """

    faults: Annotated[int, MultipleOf(4), Ge(4)] = 60
    clean_steps: Annotated[int, Ge(_CHUNK)] = 1000
    draws: Annotated[int, Ge(1)] = 20

    def collect(self, run: ClaimRun) -> None:
        """Plant, record, locate; plan, hash, simulate."""
        from shoal.claims.experiments import c4_ranks as ranks

        # The A/A run asks another locator about the same records.
        def ask(evidence: Evidence) -> FaultVerdict:
            return longest_waiter(evidence) if run.as_baseline else C4D().locate(evidence)

        def located(planted: list[tuple[InjectedFault, Evidence]]) -> list[bool]:
            return [ranks.right(ask(evidence), fault) for fault, evidence in planted]

        count, steps = (8, 12) if run.quick else (self.faults, _STEPS)
        clean = _CHUNK if run.quick else self.clean_steps
        work = _records(run.context, ranks, count, steps, clean, run.quick)
        run.put("located", located(work["virtual"]))
        total = sum(len(ask(evidence).faults) for evidence in work["clean"])
        run.put("false_alarms", total * 1000.0 / clean)
        if not run.quick:
            run.put("located_in_real_time", located(work["threads"]))
            if not run.lacks(unavailable(), "located_shaped"):
                run.put("located_shaped", located(work["shaped"]))
        self._paths(run)

    def _paths(self, run: ClaimRun) -> None:
        """The rings of three jobs, each hashed and planned."""
        seeds = range(run.seed, run.seed + (4 if run.quick else self.draws))
        planned = [times_of_jobs(run.pick("c4p", "ecmp"), seed=seed) for seed in seeds]
        hashed = [times_of_jobs("ecmp", seed=seed) for seed in seeds]
        times = ((statistics.fmean(one.job_s) for one in some) for some in (planned, hashed))
        run.put("path_ratio", *times)
        run.put("max_link_flows", (one.busiest for one in planned))


def _records(
    context: ExperimentContext, ranks: Any, count: int, steps: int, clean: int, quick: bool
) -> dict[str, Any]:
    """Everything that is recorded, once for both runs."""

    def make() -> dict[str, Any]:
        source = random.Random(context.seed)
        faults = [ranks.draw(ranks.KINDS[i % 4], _WORLD, steps, source) for i in range(count)]
        done: dict[str, Any] = {"clean": []}

        def planted(run: Any, how: str, at: float) -> list[tuple[InjectedFault, Evidence]]:
            pairs = []
            for i, fault in enumerate(faults):
                context.progress(f"{fault.kind} {how}", at + 0.3 * i / count)
                seen = _within(run, _WORLD, steps, fault, seed=context.seed + i)
                pairs.append((fault, seen))
            return pairs

        done["virtual"] = planted(ranks.run_virtual, "on virtual links", 0.0)
        for i in range(clean // _CHUNK):
            context.progress("clean steps", 0.3 + 0.2 * i / (clean // _CHUNK))
            seed = context.seed + 10_000 + i
            done["clean"].append(_within(ranks.run_virtual, _WORLD, _CHUNK, None, seed=seed))
        if quick:
            return done
        done["threads"] = planted(ranks.run_threads, "in real time", 0.5)
        if unavailable() is None:
            done["shaped"] = _shaped(context, ranks)
        return done

    return dict(context.remember("quick" if quick else "full", make))


def _within(run: Any, *arguments: Any, **options: Any) -> Evidence:
    """Run in a folder of its own; the evidence is read before that goes."""
    with scratch_directory("c4") as folder:
        evidence: Evidence = run(folder, *arguments, **options)
    return evidence


def _shaped(context: ExperimentContext, ranks: Any) -> list[tuple[InjectedFault, Evidence]]:
    """Four processes, each in its own namespace; one at a quarter of the rate, one way."""
    results = []
    cases = [(place, rank) for rank in range(_SHAPED_WORLD) for place in ("sender", "receiver")]
    for i, (place, rank) in enumerate(cases):
        context.progress(f"rank {rank} as {place} in a namespace", 0.8 + 0.2 * i / len(cases))
        fault = ranks.InjectedFault("communication_slow", place, (rank,), 4.0, 0)
        with (
            emulate(_SHAPED_WORLD, bandwidth=_SHAPED_BANDWIDTH) as network,
            scratch_directory("c4") as folder,
        ):
            network.reshape(rank, _SHAPED_BANDWIDTH / 4, sends=place == "sender")
            on_ranks(
                f"{_RANKS}:run_processes_step", _SHAPED_WORLD, network=network, folder=str(folder),
                steps=14, elements=_SHAPED_ELEMENTS,
            )  # fmt: skip
            results.append((fault, Evidence.load(folder)))
    return results


def longest_waiter(evidence: Evidence) -> FaultVerdict:
    """The wrong idea: blame the rank that has waited longest."""
    waits = {
        rank: sum(entry.blocked_ns for entry in rows)
        + sum(evidence.now - entry.since for entry in rows if entry.blocked)
        for rank, rows in evidence.entries.items()
    }
    rank = max(waits, key=lambda rank: waits[rank])
    return FaultVerdict(faults=(Fault(kind="non_communication_slow", place="rank", ranks=(rank,)),))

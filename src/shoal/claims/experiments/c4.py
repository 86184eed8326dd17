"""[4] C4: faults are named from the records of collectives, and paths are planned.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024.

Faults of the four kinds are put under watched communicators: eight thread-ranks whose links
take virtual time, the same in real time, and four processes in network namespaces of which one
sends, or receives, at a fraction of the rate. The locator reads the records and nothing else.
For the paths three jobs run their rings at once on a simulated fabric, hashed and planned. The
A/A run blames who waits longest, and hashes.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.lab.path_jobs import times_of_jobs
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.machine.emulate import emulate, unavailable
from shoal.train.watch.c4d import C4D
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.protocols import Fault, FaultVerdict

if TYPE_CHECKING:
    from shoal.claims.experiments.c4_ranks import InjectedFault

__all__ = ["C4", "longest_waiter"]

_RANKS = "shoal.claims.experiments.c4_ranks"
_WORLD = 8
_STEPS = 24
_CHUNK = 100
_SHAPED_WORLD = 4
_SHAPED_BANDWIDTH = 25e6
_SHAPED_ELEMENTS = 1 << 16


@part
class C4(BaseClaim):
    """Sixty faults and a thousand clean steps; rings of three jobs on a fabric of 16 leaves.

    Args:
        faults: planted faults, a quarter of each kind.
        clean_steps: steps without any.
        draws: placements of the three jobs.
    """

    faults: Annotated[int, MultipleOf(4), Ge(4)] = 60
    clean_steps: Annotated[int, Ge(_CHUNK)] = 1000
    draws: Annotated[int, Ge(1)] = 20

    rows: ClassVar[tuple[int, ...]] = (4,)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Plant, record, locate; plan, hash, simulate."""
        from shoal.claims.experiments import c4_ranks as ranks

        # The A/A run asks another locator about the same records.
        fields: dict[str, list[float]] = {"located": [], "alarms": [], "real": [], "shaped": []}
        missed: list[str] = []

        def ask(evidence: Evidence) -> FaultVerdict:
            return longest_waiter(evidence) if as_baseline else C4D().locate(evidence)

        count = 8 if quick else self.faults
        steps = 12 if quick else _STEPS
        clean = _CHUNK if quick else self.clean_steps
        work = _records(context, ranks, count, steps, clean, quick)
        for fault, evidence in work["virtual"]:
            verdict = ask(evidence)
            good = ranks.right(verdict, fault)
            fields["located"].append(float(good))
            if not good:
                missed.append(_missed("virtual", fault, verdict))
        total = sum(len(ask(evidence).faults) for evidence in work["clean"])
        alarms = total * 1000.0 / clean
        metrics = {
            "located": PairedSamples(method=tuple(fields["located"])),
            "false_alarms": PairedSamples(method=(alarms,)),
        }
        skipped: dict[str, str] = {}
        details: dict[str, JsonValue] = {}
        if not quick:
            for fault, evidence in work["threads"]:
                verdict = ask(evidence)
                good = ranks.right(verdict, fault)
                fields["real"].append(float(good))
                if not good:
                    missed.append(_missed("threads", fault, verdict))
            metrics["located_in_real_time"] = PairedSamples(method=tuple(fields["real"]))
            if work["why"]:
                skipped["located_shaped"] = work["why"]
            else:
                for fault, evidence in work["shaped"]:
                    verdict = ask(evidence)
                    good = ranks.right(verdict, fault)
                    fields["shaped"].append(float(good))
                    if not good:
                        missed.append(_missed("namespaces", fault, verdict))
                metrics["located_shaped"] = PairedSamples(method=tuple(fields["shaped"]))
        metrics |= self._paths(context, quick, as_baseline, details)
        details["missed"] = list(missed)
        details["kinds"] = dict(Counter(fault.kind for fault, _ in work["virtual"]))
        return ClaimSamples(metrics=metrics, skipped=skipped, details=details)

    def _paths(
        self,
        context: ExperimentContext,
        quick: bool,
        as_baseline: bool,
        details: dict[str, JsonValue],
    ) -> dict[str, PairedSamples]:
        """The rings of three jobs, each hashed and planned."""
        planner = "ecmp" if as_baseline else "c4p"
        draws = 4 if quick else self.draws
        planned, hashed, flows, others = [], [], [], []
        for seed in range(draws):
            one = times_of_jobs(planner, seed=context.seed + seed)
            two = times_of_jobs("ecmp", seed=context.seed + seed)
            planned.append(statistics.fmean(one.job_s))
            hashed.append(statistics.fmean(two.job_s))
            flows.append(float(one.busiest))
            others.append(float(two.busiest))
        details["ecmp_max_link_flows"] = min(others)
        return {
            "path_ratio": PairedSamples(method=tuple(planned), baseline=tuple(hashed)),
            "max_link_flows": PairedSamples(method=tuple(flows)),
        }


def _records(
    context: ExperimentContext, ranks: Any, count: int, steps: int, clean: int, quick: bool
) -> dict[str, Any]:
    """Everything that is recorded, once for both runs."""

    def make() -> dict[str, Any]:
        source = random.Random(context.seed)
        faults = [ranks.draw(ranks.KINDS[i % 4], _WORLD, steps, source) for i in range(count)]
        done: dict[str, Any] = {"virtual": [], "clean": [], "threads": [], "shaped": [], "why": ""}
        for i, fault in enumerate(faults):
            context.progress(f"{fault.kind} on virtual links", 0.3 * i / count)
            seed = context.seed + i
            done["virtual"].append(
                (fault, _within(ranks.run_virtual, _WORLD, steps, fault, seed=seed))
            )
        for i in range(clean // _CHUNK):
            context.progress("clean steps", 0.3 + 0.2 * i / (clean // _CHUNK))
            seed = context.seed + 10_000 + i
            done["clean"].append(_within(ranks.run_virtual, _WORLD, _CHUNK, None, seed=seed))
        if quick:
            return done
        for i, fault in enumerate(faults):
            context.progress(f"{fault.kind} in real time", 0.5 + 0.3 * i / count)
            done["threads"].append(
                (fault, _within(ranks.run_threads, _WORLD, steps, fault, seed=context.seed + i))
            )
        done["why"] = unavailable() or ""
        if not done["why"]:
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
    from shoal.parallel.comm.processes import run_processes

    results = []
    cases = [(place, rank) for rank in range(_SHAPED_WORLD) for place in ("sender", "receiver")]
    for i, (place, rank) in enumerate(cases):
        context.progress(f"rank {rank} as {place} in a namespace", 0.8 + 0.2 * i / len(cases))
        fault = ranks.Planted("communication_slow", place, (rank,), 4.0, 0)
        with (
            emulate(_SHAPED_WORLD, bandwidth=_SHAPED_BANDWIDTH) as network,
            scratch_directory("c4") as folder,
        ):
            network.reshape(rank, _SHAPED_BANDWIDTH / 4, sends=place == "sender")
            run_processes(
                f"{_RANKS}:run_processes_step",
                _SHAPED_WORLD,
                {"folder": str(folder), "steps": 14, "elements": _SHAPED_ELEMENTS},
                ranks_per_node=1,
                start=network.start,
            )
            results.append((fault, Evidence.load(folder)))
    return results


def _missed(where: str, fault: InjectedFault, verdict: FaultVerdict) -> str:
    said = ", ".join(f"{f.kind} {f.place} {list(f.ranks)}" for f in verdict.faults) or "nothing"
    return f"{where}: {fault.kind} {fault.place} {list(fault.ranks)} x{fault.factor:.1f}: {said}"


def longest_waiter(evidence: Evidence) -> FaultVerdict:
    """The wrong idea: blame the rank that has waited longest."""
    waits = {
        rank: sum(entry.blocked_ns for entry in rows)
        + sum(evidence.now - entry.since for entry in rows if entry.blocked)
        for rank, rows in evidence.entries.items()
    }
    rank = max(waits, key=lambda rank: waits[rank])
    return FaultVerdict(faults=(Fault(kind="non_communication_slow", place="rank", ranks=(rank,)),))

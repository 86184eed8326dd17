"""[28] FedCompass: do steps by computing power reach a target sooner, without stale updates?

Source: Li, Chaturvedi, He et al., FedCompass: Efficient Cross-Silo Federated Learning on
Heterogeneous Client Devices using a Computing Power Aware Scheduler, 2024.

A server and five processes of clients that talk over HTTP, speeds drawn from two distributions with
a ratio of 6, 20,000 digits divided by classes or by two Dirichlet distributions, a small network.
Baselines run in the same runner with options of their own, chosen like FedCompass's on other seeds:
FedAvg and FedBuff as Flower's strategies aggregate, and FedAsync. A run that has not reached the
target when its time is spent counts as if it then had. Federations of 20 and 50 clients are on a
virtual clock, with real learning. The A/A run has the baseline in FedCompass's place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.fedcompass_runs import (
    SPLITS,
    Outcome,
    appfl_s,
    job_of,
    outcome_of,
)
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part

_SPEEDS = ("normal", "exponential")
_RIVALS = ("fedavg", "fedbuff")


@part
class FedCompassClaim(BaseClaim, row=28, needs=("torch", "sklearn", "starlette", "httpx2")):
    """Time to 90 %, best accuracy and staleness, on the wall clock.

    Args:
        seeds: of data, speeds and learning.
        budget_s: longest run, s.
        many: clients of the simulated federations.
        appfl: Python of an environment in which APPFL is installed; empty for none.
    """

    seeds: int = 3
    budget_s: float = 60.0
    many: tuple[int, ...] = (20, 50)
    appfl: str = ""

    def collect(self, run: ClaimRun) -> None:
        """Run all arms; the quick run has two small ones on the virtual clock."""
        if run.quick:
            short = {"clock": "virtual", "learner": "logistic", "data": "digits", "rounds": 12}
            mine, other = (
                self._outcome(run, arm, "classes", "exponential", 0, **short)
                for arm in ("fedcompass", "fedasync")
            )
            run.put("staleness", run.pick(mine, other).staleness, other.staleness)
            return
        ours: list[float] = []
        avg: list[float] = []
        rival: list[list[float]] = []
        best: list[list[float]] = []
        stale: list[list[float]] = []
        table: dict[str, list[Any]] = {}
        for seed in range(self.seeds):
            run.progress(f"seed {seed + 1} of {self.seeds}", seed / (self.seeds + 1))
            for split in SPLITS:
                for speeds in _SPEEDS:
                    arms = {
                        arm: self._outcome(run, arm, split, speeds, seed, target=0.9)
                        for arm in ("fedcompass", *_RIVALS)
                    }
                    table[f"{split}, {speeds}, seed {seed}"] = [arms]
                    ours.append(arms["fedcompass"].seconds)
                    avg.append(arms["fedavg"].seconds)
                    rival.append([arms[name].seconds for name in _RIVALS])
            full = [
                self._outcome(run, arm, "classes", "exponential", seed, budget_s=self.budget_s / 2)
                for arm in ("fedcompass", "fedasync")
            ]
            table[f"whole runs, seed {seed}"] = full
            best.append([one.best for one in full])
            stale.append([one.staleness for one in full])
        # The best of them is the one with the smallest sum over all runs.
        sums = [sum(times[at] for times in rival) for at in range(len(_RIVALS))]
        strongest = [times[sums.index(min(sums))] for times in rival]
        run.put("over_fedavg", run.pick(ours, avg), avg)
        run.put("over_best", run.pick(ours, strongest), strongest)
        run.put("accuracy_gain", [run.pick(a, b) for a, b in best], [b for _, b in best])
        run.put("staleness", [run.pick(a, b) for a, b in stale], [b for _, b in stale])
        if not run.lacks(None if self.appfl else "no Python with APPFL was given", "over_appfl"):
            jobs = [
                job_of("fedcompass", split, speeds, seed, self.budget_s, target=0.9)
                for seed in range(self.seeds)
                for split in SPLITS
                for speeds in _SPEEDS
            ]
            theirs = [
                run.remember(f"appfl {at}", partial(appfl_s, run.context, self.appfl, job))
                for at, job in enumerate(jobs)
            ]
            run.put("over_appfl", run.pick(ours, theirs), theirs)
        for clients in self.many:
            virtual = {"clock": "virtual", "clients": str(clients), "target": 0.9}
            mine, other = (
                self._outcome(run, arm, "dual", "exponential", 0, budget_s=300.0, **virtual)
                for arm in ("fedcompass", "fedavg")
            )
            table[f"{clients} clients on the virtual clock"] = [mine, other]
            run.put(f"clients_{clients}", run.pick(mine, other).seconds, other.seconds)
        run.details["outcomes"] = table

    def _outcome(
        self, run: ClaimRun, arm: str, split: str, speeds: str, seed: int, **more: Any
    ) -> Outcome:
        more.setdefault("budget_s", self.budget_s)
        job = job_of(arm, split, speeds, seed, **more)
        key = f"{arm} {split} {speeds} {seed} {sorted(more.items())}"
        return run.remember(key, partial(outcome_of, run.context, job))

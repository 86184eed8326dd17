"""[25] Flag aggregator: is a shared subspace as good as the best robust rule?

Source: Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using
Convex Optimization, 2024.

15 clients in processes train a small convolutional network on digits, over sockets. One, two or
three of them send uniformly random updates, or the links of three lose a tenth of the coordinates.
Every rule has the same clients, data, attacks and number of steps; those that assume a number of
attackers are given the true one. The A/A run has the mean in the place of Flag.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.core.scratch import scratch_directory
from shoal.fields.federate.execute import execute
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.running import RunProgress
from shoal.machine import load

# Case -> attack, malicious clients.
_CASES = {
    "f1": ("random", 1),
    "f2": ("random", 2),
    "f3": ("random", 3),
    "drop": ("drop", 3),
}
_ROBUST = ("multi_krum", "bulyan", "median", "trimmed_mean")
# Those that assume a number of attackers.
_ASSUME = ("multi_krum", "bulyan", "trimmed_mean")


@part
class FlagClaim(BaseClaim, row=25, needs=("torch", "sklearn")):
    """Final accuracies of all rules in all cases.

    Args:
        seeds: runs of each rule in each case: initial models, examples of clients, batches.
        rounds: of a run.
        hosts: processes that share the clients.
    """

    seeds: int = 3
    rounds: int = 30
    hosts: int = 2

    def collect(self, run: ClaimRun) -> None:
        """Train with each rule; the quick run has one case, a perceptron and a virtual clock."""
        cases = ["f3"] if run.quick else list(_CASES)
        rules = ("flag", "mean") if run.quick else ("flag", *_ROBUST, "mean")
        seeds = 1 if run.quick else self.seeds
        total, done = len(cases) * len(rules) * seeds, 0
        points: dict[str, dict[str, list[float]]] = {}
        for case in cases:
            points[case] = {}
            for rule in rules:
                points[case][rule] = []
                for seed in range(seeds):
                    run.progress(f"{case}: {rule}, seed {seed}", done / total)
                    work = partial(self._points, case, rule, seed, run.quick)
                    points[case][rule].append(run.remember(f"{case} {rule} {seed}", work))
                    done += 1
        run.details = {"accuracy": points, "clock": "virtual" if run.quick else "wall"}
        for case in () if run.quick else cases:
            mine = points[case][run.pick("flag", "mean")]
            best = max((points[case][rule] for rule in _ROBUST), key=np.mean)
            run.put(f"over_best_{case}", mine, best)
        run.put("over_mean_f3", points["f3"][run.pick("flag", "mean")], points["f3"]["mean"])

    def _points(self, case: str, rule: str, seed: int, quick: bool) -> float:
        """Final accuracy in per cent."""
        attack, attackers = _CASES[case]
        job = FederateJob(
            data={"name": "digits", "test": 0.3},
            learner="mlp" if quick else "cnn_digits",
            clients="15",
            algorithm="fedavg",
            robust={"name": rule, **({"f": attackers} if rule in _ASSUME else {})},
            attack=attack,
            attackers=attackers,
            steps=10,
            batch=16,
            lr=0.1,
            momentum=0.9,
            rounds=self.rounds,
            clock="virtual" if quick else "wall",
            hosts=self.hosts,
            seed=seed,
        )
        plan = FederateKind().plan(job, load("laptop"))[0]
        with scratch_directory("shoal-flag") as directory:
            outcome = execute(plan, RunProgress(directory, None, lambda *_, **__: None, None))
        return 100 * outcome.measured["accuracy"]

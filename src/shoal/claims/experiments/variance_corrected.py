"""[45] VarianceCorrected: does averaging without a server learn, if the variance is put back?

Source: Vanishing Variance Problem in Fully Decentralized Neural-Network Systems, 2024.

Sixteen nodes with their own Xavier seeds on a ring of four neighbours each train five tanh layers
on the digits, five steps a round; FedAvg does the same with a server. Rounds to a mean accuracy of
80 % are counted on the virtual clock, where rounds are exact, and once with processes over sockets.
A run that does not get there in 60 rounds counts as five times as many. The A/A run has the plain
mean in the place of the corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part, table
from shoal.fields.running import RunOutcome, RunProgress
from shoal.machine import load

_TARGET, _ROUNDS = 0.8, 60
_NEVER = 5.0 * _ROUNDS
_WORK: dict[str, Any] = {"data": "digits", "steps": 5, "batch": 32, "lr": 0.05, "target": _TARGET}
_DEEP = {"name": "mlp", "depth": 4, "width": 64, "activation": "tanh"}
_CASES: dict[str, dict[str, Any]] = {
    "": {"learner": _DEEP},
    "dirichlet_": {"learner": _DEEP, "partition": {"name": "dirichlet", "alpha": 0.5}},
    "cnn_": {"learner": "cnn_digits", "lr": 0.1},
}


class _Run(NamedTuple):
    """Rounds to the target, and the variance of hidden layers after the first average."""

    rounds: float
    variance: float


@part
class VarianceCorrectedClaim(BaseClaim, row=45, needs=("torch", "sklearn")):
    """Rounds to an accuracy of 80 % with and without the correction, beside FedAvg.

    Args:
        seeds: of data, models and batches.
        nodes: of the ring.
    """

    seeds: int = 3
    nodes: int = 16

    def collect(self, run: ClaimRun) -> None:
        """Every case for every seed; the quick run has the first case and one seed."""
        policy, folder = run.pick("variance_corrected", "plain"), run.work_dir
        for at, (case, work) in enumerate(_CASES.items()):
            if run.quick and at:
                break
            methods, servers, plains = [], [], []
            for seed in range(1 if run.quick else self.seeds):
                run.progress(f"{case}seed {seed}", (at + seed / self.seeds) / (len(_CASES) + 1))
                job = {**_WORK, **work, "seed": seed, "clock": "virtual"}
                served = partial(_with_server, job, self.nodes, folder)
                servers.append(run.remember(f"{case}server {seed}", served))
                # In the quick run, as many as decide; of the plain mean the first average.
                most = math.floor(3 * servers[-1]) + 1 if run.quick else _ROUNDS
                methods.append(_gossip(job, policy, self.nodes, most, folder))
                most = 1 if run.quick else _ROUNDS
                plain = partial(_gossip, job, "plain", self.nodes, most, folder)
                plains.append(_Run(*run.remember(f"{case}plain {seed}", plain)))
            rounds = [one.rounds for one in methods]
            run.put(f"{case}rounds", rounds, servers)
            if not at:
                spread = [one.variance for one in plains], [one.variance for one in methods]
                run.put("first_variance", *spread)
            if not run.quick:
                run.put(f"{case}plain_rounds", rounds, [one.rounds for one in plains])
        if not run.quick:
            job = {**_WORK, **_CASES[""], "seed": 0, "clock": "wall", "hosts": 4}
            real = _gossip(job, policy, self.nodes, _ROUNDS, folder)
            served = partial(_with_server, {**job, "clock": "virtual"}, self.nodes, folder)
            run.put("process_rounds", real.rounds, run.remember("server 0", served))


def _gossip(job: Mapping[str, Any], policy: str, nodes: int, rounds: int, folder: Path) -> _Run:
    """A ring without a server."""
    ring = {"nodes": str(nodes), "topology": {"name": "ring_k", "k": 4}, "policy": policy}
    outcome = _outcome("gossip", {**job, **ring, "rounds": rounds}, folder)
    layers = [rows[0]["merged"] for rows in outcome.details["layers"].values() if rows]
    reached = outcome.details.get("target_round", _NEVER)
    return _Run(rounds=reached, variance=math.exp(sum(map(math.log, layers)) / len(layers)))


def _with_server(job: Mapping[str, Any], nodes: int, folder: Path) -> float:
    """Rounds of FedAvg."""
    served = {**job, "clients": str(nodes), "algorithm": "fedavg", "rounds": _ROUNDS}
    curve = _outcome("federate", served, folder).details["curve"]
    reached = (row["version"] for row in curve if row["accuracy"] >= _TARGET)
    return float(next(reached, _NEVER))


def _outcome(name: str, values: Mapping[str, Any], folder: Path) -> RunOutcome:
    """Plan a job and run it."""
    kind = table("job").build(name)
    plan = kind.plan(kind.job_type.model_validate(values), load("laptop"))[0]
    outcome: RunOutcome = kind.work(plan)(RunProgress(folder, None, lambda *_, **__: None, None))
    return outcome

"""What the FedCompass claim runs: federations of five processes, and simulated ones."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

from shoal.claims.protocols import ExperimentContext
from shoal.core import children
from shoal.core.version import PACKAGE
from shoal.fields.federate.clients import slow_factors
from shoal.fields.federate.execute import execute
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.protocols import FederationError
from shoal.fields.running import RunProgress
from shoal.machine import load


def _sgd(lr: float) -> dict[str, Any]:
    return {"name": "sgd", "lr": lr}


# How each algorithm learns: of learning rates 0.1, 0.2 and 0.4 with server steps of 1, 1.5 and 2,
# and alpha of 0.6 and 0.9 for FedAsync, what had learned most after the same virtual time, the sum
# over class_k at seed 100 and dual_dirichlet at seed 101. Seeds of the claim are 0, 1 and 2.
ARMS: dict[str, dict[str, Any]] = {
    "fedcompass": {"algorithm": "fedcompass", "lr": 0.2, "steps": 20, "server": _sgd(2.0)},
    "fedavg": {"algorithm": "fedavg", "lr": 0.2, "steps": 20, "server": _sgd(1.5)},
    "fedbuff": {"algorithm": {"name": "fedbuff", "size": 2}, "lr": 0.2, "steps": 20},
    "fedasync": {"algorithm": {"name": "fedasync", "alpha": 0.9}, "lr": 0.4, "steps": 20},
}
SPLITS: dict[str, Any] = {
    "classes": {"name": "class_k", "k": 3},
    "dual": {"name": "dual_dirichlet", "sizes": 4.0, "classes": 0.5},
}
TARGET = 0.9
# The slowest client takes 6 times as long as the fastest, which takes 3 times as long as this
# machine: five processes then seldom want a core at the same time.
_SLOWEST, _BASE = 6.0, 3.0


class Outcome(NamedTuple):
    """What a run has reached.

    Args:
        seconds: to the target; the whole run where it was not reached.
        best: accuracy.
        staleness: mean of the aggregated updates, in versions.
        reached: whether the target was.
    """

    seconds: float
    best: float
    staleness: float
    reached: bool


def appfl_s(context: ExperimentContext, python: str, job: FederateJob) -> float:
    """Seconds to the target with APPFL's FedCompass; the whole run where it was not reached.

    Args:
        context: of the claim.
        python: of the environment in which APPFL is installed.
        job: a federation of the claim.

    Raises:
        FederationError: it failed there.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = {"job": job.model_dump(mode="json"), "port": port, "directory": str(context.work_dir)}
    # The step of our server is the share that an update has there.
    alpha = 0.9 * float(dict(job.server.options).get("lr", 1.0))
    done = subprocess.run(
        [python, "-m", "shoal.claims.experiments.fedcompass_appfl"],
        input=json.dumps({**words, "alpha": alpha}) + "\n",
        capture_output=True,
        text=True,
        timeout=10 * (job.budget_s or 60.0),
        # Shoal is not installed in that environment.
        env=children.environment({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)}),
    )
    if done.returncode:
        raise FederationError(f"{python}: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def job_of(
    arm: str, split: str, speeds: str, seed: int, budget_s: float, **more: Any
) -> FederateJob:
    """A federation of the claim.

    Args:
        arm: name of the algorithm.
        split: who has what.
        speeds: distribution of the clients' speeds.
        seed: of data, speeds and learning.
        budget_s: after which it ends.
        more: other keys of the job, such as the clock.
    """
    clients = int(more.setdefault("clients", "5"))
    factors = slow_factors(speeds, clients, _SLOWEST, seed)
    given = {
        "data": {"name": "digits", "size": 20_000}, "partition": SPLITS[split],
        "learner": "cnn_digits", "speeds": tuple(_BASE * one for one in factors), "rounds": 100_000,
        "budget_s": budget_s, "seed": seed,
    }  # fmt: skip
    return FederateJob.model_validate({**given, **ARMS[arm], **more})


def outcome_of(context: ExperimentContext, job: FederateJob) -> Outcome:
    """Run a federation."""
    machine = context.machine or load("laptop")
    plan = FederateKind().plan(job, machine)[0]
    directory: Path = next(
        one
        for one in (context.work_dir / f"run{at}" for at in itertools.count())
        if not one.exists()
    )
    directory.mkdir(parents=True)
    outcome = execute(plan, RunProgress(directory, None, lambda *_, **__: None, None))
    rows = outcome.details["curve"]
    reached = next((row["seconds"] for row in rows if row["accuracy"] >= TARGET), None)
    seconds = outcome.measured["total_s"] if reached is None else reached
    best = outcome.measured["best_accuracy"]
    return Outcome(seconds, best, outcome.measured["staleness"], reached is not None)

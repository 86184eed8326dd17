"""Which scheduler, which compressor, which rule: every part of the tables on the same federations.

Usage: python benchmarks/federations.py [CASE ...] [--seeds N] [--dry]

Clients really learn; time is computed on a virtual clock from a described machine, so that the
tables are the same whatever runs them. Of every part its default options are taken; one that cannot
be built without options, or does not fit the federation, says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from common import RESULTS, finish

from shoal.core.errors import ShoalError
from shoal.core.parts import table
from shoal.core.scratch import scratch_directory
from shoal.fields.federate.execute import FederationRun, virtual
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.planning import plan_federate
from shoal.fields.running import RunProgress
from shoal.machine.described import load

TABLE = RESULTS.parent / "federate" / "choose.json"
MACHINE = "laptop"
_ROUNDS: dict[str, Any] = {"data": "digits", "algorithm": "fedavg", "rounds": 30, "lr": 0.1}
# Case -> what it is, key of the job that is varied, kind of part, accuracy to reach, and the job.
CASES: dict[str, dict[str, Any]] = {
    "schedulers, unequal clients": {
        "about": "10 clients with 20 Mbit/s, the slowest 8 times slower than the fastest, each "
        "with its own mixture of digits",
        "key": "algorithm",
        "kind": "client_scheduler",
        "target": 0.85,
        "job": {
            "data": "digits",
            "learner": {"name": "mlp", "width": 64},
            "partition": "dual_dirichlet",
            "clients": "10@20Mbit",
            "speeds": "exponential",
            "slowest": 8.0,
            "rounds": 30,
            "lr": 0.1,
        },
    },
    "schedulers, equal clients": {
        "about": "5 clients with 100 Mbit/s and equal speeds, on measurements of cell nuclei",
        "key": "algorithm",
        "kind": "client_scheduler",
        "target": 0.95,
        "job": {
            "data": "breast_cancer",
            "learner": "logistic",
            "partition": {"name": "dirichlet", "alpha": 0.5},
            "clients": "5@100Mbit",
            "rounds": 20,
            "steps": 10,
            "lr": 0.05,
        },
    },
    "server optimizers": {
        "about": "10 equal clients with two classes of digits each",
        "key": "server",
        "kind": "server_optimizer",
        "target": 0.85,
        "job": {
            **_ROUNDS,
            "learner": {"name": "mlp", "width": 64},
            "partition": {"name": "class_k", "k": 2},
            "clients": "10@20Mbit",
        },
    },
    "compressors": {
        "about": "8 equal clients behind 1 Mbit/s, on digits",
        "key": "compressor",
        "kind": "update_compressor",
        "target": 0.85,
        "job": {
            **_ROUNDS,
            "learner": {"name": "mlp", "width": 128},
            "partition": {"name": "dirichlet", "alpha": 1.0},
            "clients": "8@1Mbit",
        },
    },
}
ATTACKED: dict[str, Any] = {
    "data": "digits",
    "learner": {"name": "mlp", "width": 64},
    "partition": "iid",
    "clients": "10@20Mbit",
    "algorithm": "fedavg",
    "rounds": 15,
    "lr": 0.1,
}
RULES = "rules under attack"


def measured(job: FederateJob, target: float) -> dict[str, float]:
    """One run: how good its models were, and when the accuracy was first reached."""
    plan = plan_federate(job, load(MACHINE))[0]
    with scratch_directory("federations") as place:
        run = FederationRun(plan, RunProgress(place, None, lambda *_, **__: None, None))
        found = virtual(run)
    reached = next((row for row in run.curve.rows if row["accuracy"] >= target), None)
    return {
        **{key: found.measured[key] for key in ("best_accuracy", "worst_client", "total_s")},
        "up_bytes": found.measured["up_bytes"],
        **({} if reached is None else {"target_s": reached["seconds"]}),
        **({} if reached is None else {"target_bytes": reached["up_bytes"]}),
    }


def over_seeds(values: dict[str, Any], target: float, seeds: int) -> dict[str, Any]:
    """Medians over seeds; a target counts as reached where most seeds reach it."""
    try:
        runs = [
            measured(FederateJob.model_validate({"clock": "virtual", **values, "seed": at}), target)
            for at in range(seeds)
        ]
    except ShoalError as cause:
        return {"why": str(cause)}
    return {
        key: statistics.median(run.get(key, float("inf")) for run in runs)
        for key in sorted({key for run in runs for key in run})
        if 2 * sum(key in run for run in runs) > len(runs)
    }


def case_of(name: str, seeds: int) -> dict[str, Any]:
    """Every part of a table in one federation; it runs on after the target."""
    case = CASES[name]
    rows = {}
    for part in table(case["kind"]):
        rows[part] = over_seeds(case["job"] | {case["key"]: part}, case["target"], seeds)
        print(name, part, rows[part], flush=True)
    return {**{key: case[key] for key in ("about", "key", "target", "job")}, "rows": rows}


def rules(seeds: int) -> dict[str, Any]:
    """Best accuracy of every rule without an attack, and with three attackers of each kind."""
    rows: dict[str, Any] = {}
    for rule in table("robust_rule"):
        values = ATTACKED | {"robust": rule}
        rows[rule] = {"none": over_seeds(values, 2.0, seeds)}
        for attack in table("attack"):
            some = values | {"attack": attack, "attackers": 3}
            rows[rule][attack] = over_seeds(some, 2.0, seeds)
        print(RULES, rule, rows[rule], flush=True)
    about = "10 equal clients on digits, of which 3 are malicious: best accuracy of 15 rounds"
    return {"about": about, "job": ATTACKED, "rows": rows}


def main() -> None:
    """Measure the cases that are named, or all."""
    names = [*CASES, RULES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"among {', '.join(names)}; all by default")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each part")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    if unknown := set(given.cases) - set(names):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    found = json.loads(TABLE.read_text())["cases"] if TABLE.exists() else {}
    for name in given.cases or names:
        found[name] = rules(given.seeds) if name == RULES else case_of(name, given.seeds)
    if given.dry:
        print(json.dumps(found, indent=1))
        return
    finish(TABLE, {"cases": found, "described": MACHINE, "seeds": given.seeds}, [], dry=False)


if __name__ == "__main__":
    main()

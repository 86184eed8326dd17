"""Which rule withstands which attack, where three of ten clients are malicious.

Usage: python benchmarks/robust_rules.py [--dry] [--seeds 3]

Federations run on the virtual clock: learning is real, time is computed, and nothing here is timed,
so a busy machine gives the same table. Rules that assume a number of attackers are given the true
one. Rows are judged where the rule's paper shows the rule under the attack: the accuracy is within
three points of the run without malicious clients.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, Row, finish

from shoal.fields.federate.execute import execute
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.protocols import FederationError
from shoal.fields.running import RunProgress
from shoal.machine import load

TABLE = RESULTS.parent / "federate" / "robust_rules.json"
CLIENTS, MALICIOUS, POINTS = 10, 3, 3.0
PARTITIONS: dict[str, Any] = {
    "alike": "iid",
    "different": {"name": "dirichlet", "alpha": 0.3, "least": 10},
}
# With ten clients the paper's own z of "a little is enough" is 0.2, which nobody notices.
ATTACKS: dict[str, dict[str, Any]] = {
    "sign_flip": {},
    "gaussian": {},
    "little_is_enough": {"z": 1.5},
    "label_flip": {},
    "random": {},
    "scaled": {},
    "drop": {},
    "fall_of_empires": {},
}
RULES: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {},
    "trimmed_mean": {"f": MALICIOUS},
    "krum": {"f": MALICIOUS},
    "multi_krum": {"f": MALICIOUS},
    "bulyan": {"f": MALICIOUS},
    "geometric_median": {},
    "flag": {},
}
# Rule -> attacks under which its paper shows it, with clients that are alike. Bulyan's needs four
# times as many clients as attackers, and more.
CLAIMED: dict[str, tuple[str, ...]] = {
    "median": ("label_flip",),
    "trimmed_mean": ("label_flip",),
    "krum": ("gaussian",),
    "multi_krum": ("gaussian", "sign_flip"),
    "geometric_median": ("gaussian", "label_flip"),
    "flag": ("random", "sign_flip"),
}


def accuracy(rule: str, attack: str | None, partition: Any, seed: int) -> float:
    """Of the last model, in per cent."""
    job = FederateJob(
        data={"name": "digits", "test": 0.3},
        learner="mlp",
        clients=str(CLIENTS),
        partition=partition,
        algorithm="fedavg",
        robust={"name": rule, **RULES[rule]},
        attack={"name": attack, **ATTACKS[attack]} if attack else None,
        attackers=MALICIOUS if attack else 0,
        steps=10,
        batch=16,
        lr=0.05,
        momentum=0.9,
        rounds=25,
        clock="virtual",
        seed=seed,
    )
    plan = FederateKind().plan(job, load("laptop"))[0]
    with tempfile.TemporaryDirectory() as folder:
        progress = RunProgress(Path(folder), None, lambda *_, **__: None, None)
        try:
            return 100 * execute(plan, progress).measured["accuracy"]
        except FederationError as cause:
            if "not finite" not in str(cause):
                raise
            return 0.0


def measured(partition: Any, seeds: int) -> dict[str, Any]:
    """Accuracies of each rule: without malicious clients, and under each attack."""
    rules: dict[str, Any] = {}
    for rule in RULES:
        rules[rule] = {}
        for attack in (None, *ATTACKS):
            try:
                values = [accuracy(rule, attack, partition, seed) for seed in range(seeds)]
            except FederationError as cause:
                rules[rule] = {"refused": str(cause)}
                break
            rules[rule][attack or "none"] = values
            print(partition, rule, attack, [round(one, 1) for one in values], flush=True)
    return rules


def judged(alike: dict[str, Any], seeds: int) -> list[Row]:
    """Points that are lost under the attacks of the papers."""
    free = statistics.mean(alike["mean"]["none"])
    return [
        Row(
            name=f"robust rules: {rule} under {attack}",
            value=round(free - statistics.mean(alike[rule][attack]), 2),
            unit="points",
            comparison="<=",
            threshold=POINTS,
            note=(
                f"accuracy lost with {MALICIOUS} of {CLIENTS} clients malicious, against the mean "
                f"with none; mean of {seeds} seeds; virtual clock"
            ),
        )
        for rule, attacks in CLAIMED.items()
        for attack in attacks
    ]


def main() -> None:
    """Run all rules under all attacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    partitions = {name: measured(one, given.seeds) for name, one in PARTITIONS.items()}
    table = {
        "clients": CLIENTS,
        "malicious": MALICIOUS,
        "clock": "virtual",
        "partitions": partitions,
    }
    finish(TABLE, table, judged(partitions["alike"], given.seeds), dry=given.dry)


if __name__ == "__main__":
    main()

"""Attacks, rules, privacy and secure sums in processes over sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.fields.federate.execute import execute
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.wire.messages import unpack
from shoal.fields.running import RunOutcome, RunProgress
from shoal.machine import load

pytest.importorskip("torch")
pytest.importorskip("sklearn")


def federation(
    directory: Path, events: list[tuple[str, dict[str, Any]]] | None = None, **settings: Any
) -> tuple[RunOutcome, np.ndarray]:
    """A run on small data, and the parameters of its last model."""
    common = {
        "data": "wine", "learner": "logistic", "clients": "6", "algorithm": "fedavg", "rounds": 5,
        "steps": 5, "hosts": 2, "clock": "virtual",
    }  # fmt: skip
    plan = FederateKind().plan(FederateJob(**{**common, **settings}), load("laptop"))[0]
    directory.mkdir()

    def note(kind: str, **fields: Any) -> None:
        if events is not None:
            events.append((kind, json.loads(json.dumps(fields))))

    outcome = execute(plan, RunProgress(directory, None, note, None))
    tensors, _ = unpack((directory / "model.safetensors").read_bytes())
    return outcome, np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def test_secure_sums_train_the_same_model(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    _, plain = federation(tmp_path / "plain")
    _, secure = federation(tmp_path / "secure", secure=True)
    assert secure == pytest.approx(plain, abs=1e-5)


def test_rules_report_what_they_chose(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    federation(
        tmp_path / "run", events, clients="9", attack="scaled", attackers=2,
        robust={"name": "multi_krum", "f": 2},
    )  # fmt: skip
    chosen = [fields["chosen"] for kind, fields in events if kind == "aggregate"]
    assert len(chosen) == 5
    assert all(not {"c0", "c1"} & set(names) for names in chosen)


def test_a_spent_budget_ends_the_run_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = {"name": "dp", "noise": 8.0, "epsilon": 2.0, "repeatable": True}
    outcome, _ = federation(tmp_path / "run", rounds=50, privacy=privacy)
    assert 0 < outcome.measured["epsilon"] <= 2.0
    assert outcome.measured["versions"] < 50
    assert "the budget is spent" in outcome.details["ended"]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    "settings",
    [
        {"attack": "fall_of_empires", "attackers": 3, "clients": "9", "robust": "flag"},
        {"attack": "label_flip", "attackers": 2, "clients": "9", "robust": "median"},
        {
            "secure": True,
            "privacy": {"name": "dp", "by": "clients", "noise": 0.1, "repeatable": True},
        },
        {"privacy": {"name": "dp", "noise": 0.1, "repeatable": True}},
    ],
)
def test_processes_train_what_the_virtual_clock_does(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Malicious clients collude, clients add noise, and sums are masked across processes."""
    for package in ("cryptography", "dp_accounting"):
        pytest.importorskip(package)
    _, virtual = federation(tmp_path / "virtual", **settings)
    outcome, wall = federation(tmp_path / "wall", clock="wall", **settings)
    assert outcome.details["refused"] == {}
    assert wall == pytest.approx(virtual, abs=1e-3)

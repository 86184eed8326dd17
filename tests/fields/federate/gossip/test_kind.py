"""The job ``gossip``: plans, runs on both clocks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("torch")

from safetensors.numpy import load_file

from shoal.core.errors import ConfigError, ShoalError
from shoal.core.parts import Choice
from shoal.fields.federate.gossip.execute import GossipRun, wall
from shoal.fields.federate.gossip.job import GossipJob
from shoal.fields.federate.gossip.kind import GossipKind
from shoal.fields.federate.protocols import FederationError
from shoal.fields.running import RunProgress
from shoal.machine import load

_WINE: dict[str, Any] = {
    "data": "wine", "learner": "logistic", "nodes": "4", "topology": "cycle", "rounds": 3
}  # fmt: skip


def _run(tmp_path: Path, **changes: Any) -> Any:
    job = GossipJob.model_validate({**_WINE, "clock": "virtual", **changes})
    plan = GossipKind().plan(job, load("laptop"))[0]
    return GossipKind().run(plan, tmp_path / "run")


def test_a_plan_counts_what_a_run_sends(tmp_path: Path) -> None:
    report = _run(tmp_path)
    for name in ("total_s", "messages", "sent_bytes"):
        assert report.measured[name] == pytest.approx(report.plan.predicted[name].value)
    # 3 rounds of 4 nodes with 2 neighbours each.
    assert report.measured["messages"] == 24


def test_a_run_keeps_models_curve_and_pictures(tmp_path: Path) -> None:
    report = _run(tmp_path, policy="plain", rounds=4)
    folder = tmp_path / "run"
    nodes = load_file(folder / "nodes.safetensors")
    mean = np.mean([nodes[f"n{me}"] for me in range(4)], axis=0)
    model = load_file(folder / "model.safetensors")
    flat = np.concatenate([model[name].ravel() for name in ("1.weight", "1.bias")])
    np.testing.assert_allclose(flat, mean, rtol=1e-5, atol=1e-6)
    assert len(json.loads((folder / "curve.json").read_text())) == 5
    layers = report.details["layers"]
    assert [row["round"] for row in layers["1.weight"]] == [1, 2, 3, 4]
    assert (folder / "variance.svg").read_text().startswith("<svg")
    assert report.measured["accuracy"] > 0.8


def test_nodes_with_one_start_are_correlated(tmp_path: Path) -> None:
    apart = _run(tmp_path / "a", steps=1, lr=1e-4, rounds=1).details["layers"]["1.weight"][0]
    same = _run(tmp_path / "b", steps=1, lr=1e-4, rounds=1, same_start=True)
    assert abs(apart["correlation"]) < 0.5
    assert same.details["layers"]["1.weight"][0]["correlation"] > 0.99


@pytest.mark.slow
def test_dadao_finds_the_regularized_optimum(tmp_path: Path) -> None:
    policy = {"name": "dadao", "l2": 1.0}
    _run(tmp_path, policy=policy, rounds=220, partition={"name": "dirichlet", "alpha": 1.0})
    nodes = load_file(tmp_path / "run" / "nodes.safetensors")
    stack = np.stack([nodes[f"n{me}"] for me in range(4)])
    assert np.abs(stack - stack.mean(axis=0)).max() < 1e-3
    # The mean gradient of all nodes' losses, l2 included, is 0 there.
    job = GossipJob.model_validate({**_WINE, "policy": policy})
    job = job.model_copy(update={"partition": Choice(name="dirichlet", options={"alpha": 1.0})})
    plan = GossipKind().plan(job, load("laptop"))[0]
    run = GossipRun(plan, RunProgress(tmp_path, None, lambda *_, **__: None, None))
    x = stack.mean(axis=0)
    total = np.mean([work.gradient(x) for work in run.works], axis=0) + x
    assert np.abs(total).max() < 1e-3


def test_a_target_that_is_not_reached_is_said(tmp_path: Path) -> None:
    report = _run(tmp_path, target=1.0, rounds=1)
    assert "was not reached" in report.details["missed"]
    assert any("not reached" in str(one) for one in GossipKind().results(report, tmp_path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": "1"}, "at least two"),
        ({"nodes": "x"}, "nodes: 'x'"),
        ({"topology": {"name": "k_regular", "k": 1}}, "not connected"),
        ({"policy": {"name": "dadao", "l2": 0.0}}, "0 < mu <= L"),
        ({"policy": {"name": "dadao"}, "learner": "mlp"}, "no bounds of its curvature"),
        ({"policy": {"name": "plain", "peers": 3}}, "only 2 neighbours"),
        ({"nodes": "200"}, "no examples"),
        ({"data": "digits", "learner": "least_squares"}, "rows of at least two numbers"),
    ],
)
def test_bad_input(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, FederationError, ShoalError), match=said):
        _run(tmp_path, **changes)


@pytest.mark.slow
def test_processes_learn_what_the_virtual_clock_does(tmp_path: Path) -> None:
    apart = _run(tmp_path / "a", rounds=5)
    wall_ = _run(tmp_path / "b", rounds=5, clock="wall", hosts=2)
    assert wall_.measured["messages"] == apart.measured["messages"]
    # Rounds wait for their neighbours, so the arithmetic is the same.
    one, other = (load_file(tmp_path / name / "run" / "nodes.safetensors") for name in ("a", "b"))
    for name, model in one.items():
        np.testing.assert_allclose(other[name], model, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_others_go_on_when_a_process_dies(tmp_path: Path) -> None:
    """Its neighbours stop to wait for it; the report names it."""
    job = GossipJob.model_validate({**_WINE, "rounds": 60, "hosts": 4, "steps": 100})
    plan = GossipKind().plan(job, load("laptop"))[0]
    killed: list[int] = []

    def note(kind: str, **fields: Any) -> None:
        if kind == "evaluate" and fields["round"] >= 2 and not killed:
            killed.append(_kill_a_node())

    outcome = wall(GossipRun(plan, RunProgress(tmp_path, None, note, None)))
    assert killed
    assert len(outcome.details["gone"]) == 1
    assert min(n["count"] for n in outcome.details["nodes"] if n["name"] != _gone(outcome)) == 60


def _gone(outcome: Any) -> str:
    return f"n{outcome.details['gone'][0]}"


def _kill_a_node() -> int:
    """End one of the processes of nodes that this process has started."""
    import psutil

    child = next(
        one
        for one in psutil.Process().children()
        if "shoal.fields.federate.gossip.process" in one.cmdline()
    )
    child.kill()
    return child.pid

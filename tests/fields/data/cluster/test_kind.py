"""The job ``cluster``: plans are ranked and refused, runs are kept, stopped and scored."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from own_home import own_home

pytest.importorskip("pyarrow")

import pyarrow.parquet as pq

from shoal.app.cli import app
from shoal.core.errors import ConfigError, PlanError
from shoal.core.meter import read_events
from shoal.core.parts import Choice, table
from shoal.cost.score import Score
from shoal.fields.data.cluster.costs import rates_of, timed
from shoal.fields.data.cluster.job import ClusterJob
from shoal.fields.data.cluster.kind import ClusterKind
from shoal.fields.data.cluster.protocols import ClusterError
from shoal.ir import Machine
from shoal.machine import load
from shoal.machine.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def laptop(**changes: object) -> Machine:
    return load("laptop").model_copy(update=changes)


def small(memory: float) -> Machine:
    """A laptop with so many bytes of memory."""
    machine = laptop()
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": memory})
    return laptop(device=machine.device.model_copy(update={"memory": (tier,)}))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    path = tmp_path / "vectors.npy"
    np.save(
        path, draw.normal(size=(8, 5))[draw.integers(0, 8, 300)] * 9 + draw.normal(size=(300, 5))
    )
    return path


def names(plans: object) -> list[str]:
    return [plan.job.method.name for plan in plans]  # type: ignore[attr-defined]


def test_plans_are_ranked_by_loss_that_is_allowed_then_time() -> None:
    job = ClusterJob(data="photos:8000", k=100)
    plans = list(ClusterKind().plan(job, laptop()))
    assert set(names(plans)) == set(table("clusterer")) - {"ppp"}
    assert names(plans)[0] == "fasterpam"
    excess = [plan.predicted["excess"].value for plan in plans]
    allowed = [value <= job.max_excess for value in excess]
    assert allowed == sorted(allowed, reverse=True)
    times = [plan.predicted["total_s"].value for plan in plans]
    best = times[: sum(allowed)]
    assert best == sorted(best)
    generous = list(ClusterKind().plan(job.model_copy(update={"max_excess": 0.1}), laptop()))
    assert names(generous)[0] == "clara"
    assert "derived from its description" in plans[0].notes[0]


def test_what_does_not_fit_is_not_planned() -> None:
    job = ClusterJob(data="photos:100K", k=50)
    plans = list(ClusterKind().plan(job, small(8e9)))
    assert all(plan.fits for plan in plans)
    storages = {plan.job.method.options.get("storage") for plan in plans if plan.job.method}
    assert "full32" not in storages
    assert "condensed" not in storages
    # 40 GB of dissimilarities.
    request = job.model_copy(update={"method": Choice(name="fasterpam")})
    with pytest.raises(PlanError, match=r"no method fits in 8\.\d+ GB; [34]\d\.\d GB are needed"):
        ClusterKind().plan(request, small(8e9))
    assert ClusterKind().plan(request, small(1e11))


def test_more_clusters_than_objects() -> None:
    with pytest.raises(ClusterError, match="n_clusters = 21: expected 1 to 20"):
        ClusterKind().plan(ClusterJob(data="photos:20", k=21), laptop())


def test_rates_are_timed_here_and_derived_elsewhere() -> None:
    here = timed(16, edge=300)
    assert here.measured
    there = rates_of(laptop(), dim=16, metric="euclidean")
    assert not there.measured
    assert there.spread > here.spread
    for rates in (here, there):
        values = rates.model_dump(exclude={"spread", "measured"}).values()
        assert all(1e-12 < value < 1e-5 for value in values)


def test_timed_rates_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setattr(
        "shoal.fields.data.cluster.costs.timed",
        lambda *given: calls.append(given) or timed(*given, edge=200),
    )
    machine = laptop(fingerprint=fingerprint())
    first = rates_of(machine, dim=8, metric="cosine")
    assert rates_of(machine, dim=8, metric="cosine") == first
    assert calls == [(8, "cosine")]
    (tmp_path / "home" / "clustering.json").write_text("{")
    with pytest.raises(ConfigError, match=r"clustering\.json: cannot be read"):
        rates_of(machine, dim=8, metric="cosine")


def test_a_run(data: Path, tmp_path: Path) -> None:
    job = ClusterJob(data=str(data), k=8, seed=3)
    plan = ClusterKind().plan(job, laptop())[0]
    seen: list[dict[str, object]] = []
    report = ClusterKind().run(plan, tmp_path / "run", watch=seen.append)
    assert any("swaps" in str(event["state"]) for event in seen)
    labels = pq.read_table(tmp_path / "run" / "labels.parquet").to_pydict()
    medoids = json.loads((tmp_path / "run" / "medoids.json").read_text())
    assert len(labels["label"]) == 300
    assert [medoids["medoids"][label] for label in labels["label"]] == labels["medoid"]
    X = np.load(data)
    to = np.linalg.norm(X[:, None] - X[medoids["medoids"]][None], axis=2)
    assert labels["dissimilarity"] == pytest.approx(to.min(1), rel=1e-5, abs=1e-5)
    assert report.measured["loss"] == pytest.approx(to.min(1).sum(), rel=1e-5)
    assert medoids["sizes"] == np.bincount(labels["label"], minlength=8).tolist()
    assert (tmp_path / "run" / "clusters.svg").read_text().startswith("<svg")
    assert (tmp_path / "run" / "map.svg").read_text().count("<circle") >= 2
    kinds = [event["kind"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert kinds[0] == "start"
    assert "end" in kinds
    assert not (tmp_path / "run" / "state.json").exists()
    scored = {row.quantity: row for row in Score().rows()}
    assert scored["total_s"].predicted == plan.predicted["total_s"].value
    assert scored["total_s"].error == pytest.approx(report.errors["total_s"])
    with pytest.raises(ConfigError, match="already contains a run"):
        ClusterKind().run(plan, tmp_path / "run")


def test_a_stopped_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.fields.data.cluster.storage._BLOCK", 500)
    job = ClusterJob(data=str(data), k=8, seed=3, method=Choice(name="fasterpam"))
    plan = ClusterKind().plan(job, laptop())[0]
    whole = ClusterKind().run(plan, tmp_path / "whole")
    swaps = 0

    def stop(event: dict[str, object]) -> None:
        nonlocal swaps
        swaps += "swaps" in str(event["state"])
        if swaps == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ClusterKind().run(plan, tmp_path / "run", watch=stop)
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["swaps"] > 0
    assert not (tmp_path / "run" / "report.json").exists()
    other = plan.model_copy(update={"job": job.model_copy(update={"k": 9})})
    with pytest.raises(ConfigError, match="a run of another job"):
        ClusterKind().run(other, tmp_path / "run", resume=True)
    again = ClusterKind().run(plan, tmp_path / "run", resume=True)
    assert again.details["medoids"] == whole.details["medoids"]
    assert again.measured["swaps"] == whole.measured["swaps"]
    (tmp_path / "run" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json: cannot be read"):
        ClusterKind().run(plan, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_the_command_line(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(data), "--k", "8", "--metric", "cosine", "-m", "laptop"]
    planned = CliRunner().invoke(app, ["plan", "cluster", *words, "--out", "plan.yaml"])
    assert planned.exit_code == 0, planned.output
    assert "fasterpam" in planned.output
    assert "dissimilarities" in planned.output
    run = ["run", "cluster", "--plan", "plan.yaml", "--dir", "out", "-m", "laptop", "-q"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    for text in ("prediction and measurement", "labels.parquet", "the largest of 8 clusters"):
        assert text in done.output
    scored = CliRunner().invoke(app, ["score"])
    assert "cluster" in scored.output


def test_neither_plan_nor_run_loads_torch(data: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from shoal.fields.data.cluster.kind import ClusterKind\n"
        "from shoal.machine import load\n"
        "kind = ClusterKind()\n"
        f"plan = kind.plan(kind.job_type(data={str(data)!r}, k=4), load('laptop'))[0]\n"
        f"assert kind.run(plan, Path({str(tmp_path / 'run')!r})).measured['loss'] > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

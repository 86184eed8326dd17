"""The job ``sparse_code``: plans are ranked and refused, runs are kept, stopped and scored."""

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

from shoal.app.cli import app
from shoal.core.errors import ConfigError, DataError, PlanError
from shoal.core.parts import table
from shoal.cost.score import Score
from shoal.fields.data.sparse_coding.costs import rates_of, timed
from shoal.fields.data.sparse_coding.job import SparseCodeJob
from shoal.fields.data.sparse_coding.kind import SparseCodeKind
from shoal.fields.data.sparse_coding.protocols import SparseCodeError
from shoal.ir import Machine
from shoal.machine import load

KIND = SparseCodeKind()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def job(**changes: object) -> SparseCodeJob:
    given = {"data": "bars:120", "components": 16, "candidates": 5, "active": 2, "iterations": 6}
    return SparseCodeJob.model_validate({**given, **changes})


def small(memory: float) -> Machine:
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": memory})
    device = machine.device.model_copy(update={"memory": (tier,)})
    return machine.model_copy(update={"device": device})


def names(plans: object) -> list[str]:
    return [plan.job.method.name for plan in plans]  # type: ignore[attr-defined]


def test_every_model_that_may_be_is_planned_the_fastest_first() -> None:
    plans = list(KIND.plan(job(), load("laptop")))
    assert set(names(plans)) == set(table("superposition"))
    times = [plan.predicted["total_s"].value for plan in plans]
    assert times == sorted(times)
    assert all(plan.points == 120 and plan.dim == 64 for plan in plans)
    assert "mca" not in names(KIND.plan(job(data="bars:120:mmca"), load("laptop")))
    pytest.importorskip("PIL")
    patches = list(KIND.plan(job(data="patches:50"), load("laptop")))
    assert patches[0].dim == 144
    assert "mca" not in names(patches)


def test_what_cannot_be_planned() -> None:
    laptop = load("laptop")
    for changes, error, said in (
        ({"candidates": 17}, SparseCodeError, "candidates = 17"),
        ({"active": 6}, SparseCodeError, "active = 6"),
        ({"data": "bars:120:mmca", "method": "mca"}, SparseCodeError, "use mmca"),
        ({"data": "bars:few"}, ConfigError, "data = bars:N"),
        ({"data": "bars:9:none"}, ConfigError, "'none'"),
        ({"data": "none.npy"}, DataError, "no such file"),
    ):
        with pytest.raises(error, match=said):
            KIND.plan(job(**changes), laptop)
    with pytest.raises(PlanError, match=r"no model fits in 10\.0 MB"):
        KIND.plan(job(), small(1e7))


def test_constant_columns(tmp_path: Path) -> None:
    X = np.random.default_rng(0).normal(size=(9, 3))
    X[:, 1] = 2.0
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(SparseCodeError, match="constant columns: 1"):
        KIND.plan(job(data=str(tmp_path / "x.npy"), components=5), load("laptop"))


def test_rates_are_timed_here_and_derived_elsewhere() -> None:
    here, there = timed(200), rates_of(load("laptop"))
    assert here.measured
    assert not there.measured
    for rates in (here, there):
        values = rates.model_dump(exclude={"spread", "measured"}).values()
        assert all(1e-13 < value < 1e-2 for value in values)


def test_a_run(tmp_path: Path) -> None:
    plan = KIND.plan(job(method="bsc"), load("laptop"))[0]
    seen: list[dict[str, object]] = []
    report = KIND.run(plan, tmp_path / "run", watch=seen.append)
    assert any("vectors/s" in str(event["state"]) for event in seen)
    W = np.load(tmp_path / "run" / "components.npy", allow_pickle=False)
    assert W.shape == (16, 64)
    prior = json.loads((tmp_path / "run" / "prior.json").read_text())
    assert len(prior["free_energy"]) == 6
    assert report.measured["free_energy"] == prior["free_energy"][-1]
    assert report.details["active"] == pytest.approx(16 * prior["prior"][0])
    for picture in ("components.svg", "free_energy.svg"):
        assert (tmp_path / "run" / picture).read_text().startswith("<svg")
    assert not (tmp_path / "run" / "state.json").exists()
    scored = {row.quantity: row for row in Score().rows()}
    assert scored["total_s"].predicted == plan.predicted["total_s"].value
    assert any("components.npy" in str(line) for line in KIND.results(report, tmp_path))


@pytest.mark.parametrize(
    "schedule", [None, {"temperature": [[0, 1]], "noise": [[0, 0]], "cut": [[0, 0]]}]
)
def test_a_stopped_run_goes_on_to_the_same_end(schedule: object, tmp_path: Path) -> None:
    given = job(data="bars:150", active=1, method="mmca", schedule=schedule, iterations=9)
    plan = KIND.plan(given, load("laptop"))[0]
    KIND.run(plan, tmp_path / "whole")

    def stop(event: dict[str, object]) -> None:
        if "iteration 7" in str(event["state"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KIND.run(plan, tmp_path / "run", watch=stop)
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["iteration"] == 7
    assert (state["keep"] is None) == (schedule is not None)
    KIND.run(plan, tmp_path / "run", resume=True)
    one, other = (np.load(tmp_path / name / "components.npy") for name in ("whole", "run"))
    assert np.array_equal(one, other)
    for broken in ({"iteration": 3}, {**state, "params": 5}):
        (tmp_path / "run" / "report.json").unlink(missing_ok=True)
        (tmp_path / "run" / "state.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigError, match=r"state\.json: no state of a sparse coding"):
            KIND.run(plan, tmp_path / "run", resume=True)


@pytest.mark.multi
def test_a_run_in_a_pool_is_the_same(tmp_path: Path) -> None:
    given = job(method="mca", data="bars:100")
    for name, more in (("one", {}), ("two", {"pool": "local", "workers": 2})):
        plan = KIND.plan(
            SparseCodeJob.model_validate({**given.model_dump(), **more}), load("laptop")
        )[0]
        KIND.run(plan, tmp_path / name)
    one, two = (np.load(tmp_path / name / "components.npy") for name in ("one", "two"))
    assert one == pytest.approx(two, rel=1e-8)


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bars:100", "--iterations", "5", "-m", "laptop"]
    planned = CliRunner().invoke(app, ["plan", "sparse_code", *words, "--out", "plan.yaml"])
    assert planned.exit_code == 0, planned.output
    assert "mmca" in planned.output
    run = ["run", "sparse_code", "--plan", "plan.yaml", "--dir", "out", "-m", "laptop", "-q"]
    done = CliRunner().invoke(app, run)
    assert done.exit_code == 0, done.output
    assert "components.npy" in done.output


def test_neither_plan_nor_run_loads_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from shoal.fields.data.sparse_coding.kind import SparseCodeKind\n"
        "from shoal.machine import load\n"
        "kind = SparseCodeKind()\n"
        "given = kind.job_type(data='bars:60', iterations=2)\n"
        "plan = kind.plan(given, load('laptop'))[0]\n"
        f"assert kind.run(plan, Path({str(tmp_path / 'run')!r})).measured['total_s'] > 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Plans as Flower apps, and what Flower's simulation makes of them."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from safetensors.numpy import load_file

from shoal.app.cli import app as command_line
from shoal.core.errors import PlanError
from shoal.core.files import parse_yaml
from shoal.core.parts import table
from shoal.core.traits import _of
from shoal.fields.federate.job import FederateJob, FederatePlan
from shoal.fields.federate.planning import plan_federate
from shoal.machine.described import load
from shoal.plan.emit.write import emit

SOURCE = Path(__file__).parents[3] / "src"
# Runs an app that was emitted: its directory, and the number of its nodes.
SIMULATE = """
import sys
sys.path.insert(0, sys.argv[1])
from flwr.simulation import run_simulation
from federation.client_app import app as client
from federation.server_app import app as server
resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
run_simulation(server, client, int(sys.argv[2]), backend_config=resources)
"""


def planned(**values: object) -> FederatePlan:
    base = {"data": "wine", "learner": "logistic", "clients": "3", "rounds": 3, "clock": "virtual"}
    job = FederateJob.model_validate(base | {"algorithm": "fedavg"} | values)
    return plan_federate(job, load("laptop"))[0]


def test_an_app_is_a_project_of_the_plan(tmp_path: Path) -> None:
    plan = planned(name="Wine_1")
    emit([plan], "flower", tmp_path, "federation_emitter")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    assert project["project"]["name"] == "wine-1"
    assert any(one.startswith("flwr[simulation]") for one in project["project"]["dependencies"])
    flower = project["tool"]["flwr"]
    assert flower["federations"]["local-simulation"]["options"]["num-supernodes"] == 3
    for half in ("serverapp", "clientapp"):
        module, _, name = flower["app"]["components"][half].partition(":")
        file = tmp_path / (module.replace(".", "/") + ".py")
        compile(file.read_text(), file, "exec")
        assert f"{name} = " in file.read_text()
    assert FederatePlan.load(tmp_path / "federation" / "plan.yaml") == plan
    assert parse_yaml((tmp_path / "plan.yaml").read_text(), "plan")["job"]["name"] == "Wine_1"


def test_what_flower_cannot_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fedasync = table("client_scheduler").load("fedasync")
    monkeypatch.setattr(fedasync, "traits", frozenset({"own_server"}), raising=False)
    _of.cache_clear()
    try:
        with pytest.raises(PlanError, match="algorithm = fedasync: it works in Shoal's own"):
            emit([planned(algorithm="fedasync")], "flower", tmp_path, "federation_emitter")
        # The best plan that it can run is taken.
        plans = [planned(algorithm="fedasync"), planned()]
        assert emit(plans, "flower", None, "federation_emitter")[0] is plans[1]
    finally:
        _of.cache_clear()
    assert not list(tmp_path.iterdir())


def test_the_command_line_writes_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    words = ["plan", "federate", "wine", "--learner", "logistic", "--clients", "3", "-m", "laptop"]
    result = CliRunner().invoke(
        command_line, [*words, "--emit", "flower", "--emit-dir", str(tmp_path / "app")]
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "app" / "federation" / "client_app.py").exists()


@pytest.fixture(scope="module")
def flower() -> Path:
    """Python of an environment that has Flower."""
    place = os.environ.get("FLOWER_ENV")
    if place is None:
        pytest.skip("FLOWER_ENV names no environment; scripts/peers DIRECTORY flower makes one")
    python = Path(place) / "bin" / "python"
    assert python.exists(), f"FLOWER_ENV = {place}: expected an environment with bin/python"
    return python


CASES = {
    "rounds of half the clients": {"algorithm": {"name": "fedavg", "fraction": 0.5}},
    "as they arrive": {"algorithm": "fedasync", "speeds": "normal", "seed": 3},
    "momentum and an attack": {
        "server": {"name": "sgd", "lr": 0.7, "momentum": 0.5},
        "attack": "sign_flip",
        "attackers": 1,
    },
    "scikit-learn on the wall clock": {"learner": "linear", "clock": "wall"},
}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("case", CASES)
def test_flower_ends_with_the_weights_of_shoal(tmp_path: Path, flower: Path, case: str) -> None:
    from shoal.fields.federate.kind import FederateKind

    plan = planned(**CASES[case])
    emit([plan], "flower", tmp_path / "app", "federation_emitter")
    own = plan.model_copy(update={"job": plan.job.model_copy(update={"clock": "virtual"})})
    FederateKind().run(own, tmp_path / "own", anyway=True)
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SHOAL_")},
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{tmp_path / 'app'}",
        "SHOAL_HOME": str(tmp_path / "home"),
        "FLWR_HOME": str(tmp_path / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [flower, "-c", SIMULATE, str(tmp_path / "app"), "3"],
        cwd=tmp_path / "out",
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    ours = load_file(tmp_path / "own" / "model.safetensors")
    assert theirs.keys() == ours.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, atol=1e-6, rtol=0)
    assert any(np.abs(value).max() > 1e-3 for value in ours.values())

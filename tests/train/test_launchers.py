import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.ir import Plan
from shoal.machine.described import load


@pytest.fixture
def plan(make_plan: Callable[..., Plan]) -> Plan:
    return make_plan(parallel={"dp": 16}, global_batch=16).model_copy(
        update={"machine": load("16xH100")}
    )


def test_torchrun_is_a_shell_script_for_each_node(plan: Plan, tmp_path: Path) -> None:
    files = table("launch").build("torchrun").files(plan)
    script = tmp_path / "launch.sh"
    script.write_text(files["launch.sh"])
    subprocess.run(["sh", "-n", script], check=True)
    text = files["launch.sh"]
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert "--resume" in text


def test_slurm_asks_for_what_the_plan_needs(plan: Plan, tmp_path: Path) -> None:
    part = table("launch").build({"name": "slurm", "partition": "gpu", "hours": 1.5})
    text = part.files(plan)["launch.sbatch"]
    script = tmp_path / "launch.sbatch"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=90"):
        assert f"#SBATCH {line}\n" in text
    assert "account" not in text


def test_kubernetes_is_a_service_and_an_indexed_job(plan: Plan) -> None:
    files = table("launch").build({"name": "kubernetes", "image": "me/shoal:1"}).files(plan)
    service, job = yaml.safe_load_all(files["launch.yaml"])
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "me/shoal:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["command"][0] == "torchrun"
    assert "--master-addr=test-0.test" in container["command"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "slurm", "partition": "a; rm -rf"}, "expected a plain word"),
        ({"name": "slurm", "hours": 0}, "hours above 0"),
        ({"name": "torchrun", "port": 80}, "1024 to 65535"),
        ({"name": "kubernetes", "image": ""}, "an image name"),
        ("pbs", "expected one of torchrun, slurm, kubernetes"),
    ],
)
def test_bad_options(choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table("launch").build(choice)  # type: ignore[arg-type]

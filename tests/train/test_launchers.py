import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from shoal.core.errors import ConfigError
from shoal.core.meter import read_events
from shoal.core.parts import table
from shoal.core.pool import POOLS, Pool
from shoal.ir import TrainPlan
from shoal.machine.described import load
from shoal.train.launchers import ray as launchers_ray
from shoal.train.launchers.ray import _interface
from shoal.train.protocols import Starter
from shoal.train.run import execute


@pytest.fixture
def plan(make_plan: Callable[..., TrainPlan]) -> TrainPlan:
    return make_plan(parallel={"dp": 16}, global_batch=16).model_copy(
        update={"machine": load("16xH100")}
    )


def test_torchrun_is_a_shell_script_for_each_node(plan: TrainPlan, tmp_path: Path) -> None:
    files = table("launch").build("torchrun").files(plan)
    script = tmp_path / "launch.sh"
    script.write_text(files["launch.sh"])
    subprocess.run(["sh", "-n", script], check=True)
    text = files["launch.sh"]
    assert "--nnodes 2 --nproc-per-node 8" in text
    assert "--resume" in text
    assert "--max-restarts 3 " in text


def test_slurm_asks_for_what_the_plan_needs(plan: TrainPlan, tmp_path: Path) -> None:
    part = table("launch").build({"name": "slurm", "partition": "gpu", "hours": 1.5})
    text = part.files(plan)["launch.sbatch"]
    script = tmp_path / "launch.sbatch"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--time=90"):
        assert f"#SBATCH {line}\n" in text
    assert "account" not in text
    assert text.index("--max-restarts 3") < text.index("-m shoal train") < text.index("--resume")


def test_kubernetes_is_a_service_and_an_indexed_job(plan: TrainPlan) -> None:
    files = table("launch").build({"name": "kubernetes", "image": "me/shoal:1"}).files(plan)
    service, job = yaml.safe_load_all(files["launch.yaml"])
    assert service["spec"]["clusterIP"] == "None"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "me/shoal:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert container["command"][0] == "torchrun"
    assert "--max-restarts=3" in container["command"]
    assert container["command"][-1] == "--resume"
    assert "--master-addr=test-0.test" in container["command"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "slurm", "partition": "a; rm -rf"}, "expected a plain word"),
        ({"name": "slurm", "hours": 0}, "hours = 0: expected above 0"),
        ({"name": "torchrun", "port": 80}, "1024 to 65535"),
        ({"name": "torchrun", "restarts": -1}, "restarts = -1: expected at least 0"),
        ({"name": "kubernetes", "image": ""}, "an image name"),
        ({"name": "ray", "room_s": -1}, "at least 0"),
        ("pbs", "expected one of torchrun, slurm, kubernetes"),
    ],
)
def test_bad_options(choice: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        table("launch").build(choice)  # type: ignore[arg-type]


def test_ray_writes_what_starts_the_plan_there(plan: TrainPlan, tmp_path: Path) -> None:
    launcher: Any = table("launch").build("ray")
    assert isinstance(launcher, Starter)
    assert not isinstance(table("launch").build("torchrun"), Starter)
    script = tmp_path / "launch.sh"
    script.write_text(launcher.files(plan)["launch.sh"])
    subprocess.run(["sh", "-n", script], check=True)
    assert "--resume --launch ray" in script.read_text()


def test_the_interface_of_an_address() -> None:
    assert _interface("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"no network interface has the address 192\.0\.2\.7"):
        _interface("192.0.2.7")


class _Pool:
    """Actors of this machine, as a Ray cluster of one node."""

    address = "127.0.0.1"

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def actor(self, cls: type, *args: object) -> Any:
        actor = self._pool.actor(cls, *args)
        actor.address = self.address  # type: ignore[attr-defined]
        return actor


@pytest.mark.slow
@pytest.mark.multi
def test_a_lost_rank_starts_the_run_again(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    plan = make_plan(
        model="shoal-0.3m", steps=6, parallel={"dp": 2}, checkpoint={"every": 2, "keep": 1}
    )
    events: list[dict[str, Any]] = []

    def watch(event: dict[str, Any]) -> None:
        events.append(event)
        if event["kind"] == "checkpoint" and not any(e["kind"] == "restart" for e in events):
            for process in psutil.Process().children(recursive=True):
                if is_rank(process, "1"):
                    process.kill()

    with POOLS.build({"name": "local", "workers": 1}).open() as pool:
        report = launchers_ray._run(_Pool(pool), plan, tmp_path / "run", False, None, 1, watch)  # type: ignore[arg-type]
    (restart,) = [event["message"] for event in events if event["kind"] == "restart"]
    assert "rank 1 (127.0.0.1) was killed by signal 9" in restart
    starts = [event["step"] for event in events if event["kind"] == "start"]
    assert starts[0] == 0 and starts[1] >= 2
    assert report.measured["finished"]
    # An error of the run itself is that of the rank, with its class, and nothing starts again.
    with (
        POOLS.build({"name": "local", "workers": 1}).open() as pool,
        pytest.raises(ConfigError, match=r"rank 0 \(127\.0\.0\.1\): .* already contains a run"),
    ):
        launchers_ray._run(_Pool(pool), plan, tmp_path / "run", False, None, 1, watch)  # type: ignore[arg-type]


# Rank 1 of the first start is killed when step 5 is done: step 4 is saved by then.
_STRIKES = """
import os, signal

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    from shoal.train.loop import RankTrainer

    step = RankTrainer.step

    def struck(self, number, **options):
        result = step(self, number, **options)
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    RankTrainer.step = struck
"""


@pytest.mark.slow
@pytest.mark.multi
def test_torchrun_starts_a_killed_rank_again(
    make_plan: Callable[..., TrainPlan], tmp_path: Path
) -> None:
    plan = make_plan(
        model="shoal-0.3m",
        steps=9,
        parallel={"dp": 2},
        checkpoint={"every": 2, "keep": 2, "mode": "blocking"},
    )
    execute(plan, tmp_path / "straight")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = table("launch").build({"name": "torchrun", "restarts": 1, "port": port})
    for name, text in launcher.files(plan).items():
        (tmp_path / name).write_text(text)
    plan.save(tmp_path / "plan.yaml")
    (tmp_path / "strikes").mkdir()
    (tmp_path / "strikes" / "sitecustomize.py").write_text(_STRIKES)
    done = subprocess.run(
        ["sh", "launch.sh"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(tmp_path / "strikes"),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "runs" / "test"
    events = list(read_events(run / "events.jsonl"))
    assert [event["step"] for event in events if event["kind"] == "start"] == [0, 4]

    def losses(place: Path) -> dict[int, float]:
        events = read_events(place / "events.jsonl")
        return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}

    assert losses(run) == losses(tmp_path / "straight")
    assert sorted(losses(run)) == list(range(9))
    report = json.loads((run / "report.json").read_text())
    assert report["measured"]["finished"]


def is_rank(process: psutil.Process, rank: str) -> bool:
    try:
        return "shoal.train.torchrun" in process.cmdline() and process.environ()["RANK"] == rank
    except psutil.NoSuchProcess:  # ended since the children were listed
        return False

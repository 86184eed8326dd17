"""Two nodes of a Ray cluster, each in a network namespace and with a home of its own."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.ir import Device, Link, Machine, MemoryTier
from shoal.machine.emulate import EmulatedNetwork, emulate, unavailable

pytest.importorskip("ray")
pytest.importorskip("torch")

NO_LINKS = unavailable()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multi,
    pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS)),
]

TWO_CORES = Machine(
    name="described",
    device=Device(
        name="two cores",
        kind="cpu",
        num_cores=2,
        peak_flops={"bf16": 1e12, "fp32": 2e11},
        matmul_flops={"bf16": 6e11, "fp32": 1.5e11},
        memory=(MemoryTier(name="dram", capacity_bytes=16 * 2**30, read_bandwidth=2e10),),
    ),
    links=(Link(scope="loopback", bandwidth=1.5e9, latency_s=1e-4),),
)
TESTS = Path(__file__).parents[1]
WAIT_S = 90.0
PORT = 6379

SILENT: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
# Run on node 0. This one ends well when there are two nodes.
COMPLETE = f"""
import sys, time, ray
ray.init(f"{{sys.argv[1]}}:{PORT}")
for _ in range(600):
    if sum(node["Alive"] for node in ray.nodes()) == 2:
        sys.exit(0)
    time.sleep(0.1)
sys.exit(1)
"""
# This one has replicas, of which one is lost with its node.
SERVE = """
import json, signal, sys, time, urllib.request
from shoal.core.errors import RankError
from shoal.core.pool import POOLS, ActorResources
from shoal.ir import ServeJob
from shoal.serve.engine.client import ClientOptions
from shoal.serve.http.server import ServerOptions, running

def options():
    client = ClientOptions(ping_s=0.1, backoff_s=0.1)
    return ServerOptions(factory="fake_engine:build", client=client, port=0, grace_s=0.5)

def job(threads, **launcher):
    return ServeJob(model=sys.argv[1], replicas=2, threads=threads,
                    launcher={"name": "ray", "address": sys.argv[2], **launcher})

def where(router):
    return [(one._hosted.server.host, one.pid) for one in router.backend.all]

def say(**values):
    print(json.dumps(values), flush=True)

if __name__ == "__main__":
    try:
        with running(job(8, room_s=1), options()):
            pass
    except RankError as error:
        say(refused=str(error))
    with running(job(1, cpus_per_actor=0.5), options()) as router:
        say(replicas=where(router))
        (lost,) = [one for one in router.backend.all if one._hosted.server.host != "10.77.0.1"]
        sys.stdin.readline()
        # Ray believes in the lost node for a while; actors that it sends there go elsewhere then.
        ray = POOLS.build({"name": "ray", "address": sys.argv[2]})
        with ray.open(ActorResources(cpus=0)) as pool:
            say(actors=[pool.actor(dict).address for _ in range(2)])
        while not (lost.restarts and lost.ready):
            time.sleep(0.05)
        body = json.dumps({"model": "bytes", "prompt": [65, 66], "max_tokens": 4}).encode()
        request = urllib.request.Request(router.url + "/v1/completions", body,
                                         {"Content-Type": "application/json"})
        answer = json.load(urllib.request.urlopen(request, timeout=20))
        say(replicas=where(router), text=answer["choices"][0]["text"])
        signal.pause()
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while not (result := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.1)
    return result


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedNetwork]:
    """Two nodes with one processor each."""
    program = Path(sysconfig.get_path("scripts")) / "ray"
    with (
        tempfile.TemporaryDirectory(prefix="shoal-two-") as session,
        pytest.MonkeyPatch.context() as patch,
        emulate(2, bandwidth=1e8) as network,
    ):
        # Nobody else may join, and nothing is written to the home of the user.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(TESTS / "serve" / "http"))
        head = f"{network.addresses[0]}:{PORT}"
        joins = [
            ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={session}"],
            [f"--address={head}"],
        ]
        for node, words in enumerate(joins):
            log = (tmp_path_factory.mktemp("log") / "ray").open("w")
            with log:
                network.start(
                    node,
                    [
                        *(str(program), "start", "--block", "--num-cpus=1", *words),
                        f"--node-ip-address={network.addresses[node]}",
                        "--object-store-memory=80000000",
                    ],
                    environment={"SHOAL_HOME": str(tmp_path_factory.getbasetemp() / f"home{node}")},
                    stdout=log,
                    stderr=log,
                )
        until(lambda: complete(network), "a node does not join")
        yield network


def complete(network: EmulatedNetwork) -> bool:
    """Whether both nodes belong to the cluster."""
    request = network.start(0, [sys.executable, "-c", COMPLETE, network.addresses[0]], **SILENT)
    return request.wait() == 0


def losses(run: Path) -> dict[int, float]:
    lines = (run / "events.jsonl").read_text().splitlines()
    steps = [event for line in lines if (event := json.loads(line))["kind"] == "step"]
    return {event["step"]: event["loss"] for event in steps}


def test_ranks_of_two_nodes_equal_local_ranks(
    cluster: EmulatedNetwork, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]:
        (text / path.name).write_bytes(path.read_bytes()[:40_000])
    # A thread a rank: no node has room for both ranks.
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {
                "model": "shoal-0.3m",
                "data": {"name": "text", "path": str(text), "pattern": "*.py"},
                "steps": 6,
                "seq_len": 64,
                "global_batch": 8,
                "threads": 1,
                "precision": "fp32",
                "parallel": {"dp": 2, "tp": 1, "pp": 1},
                "checkpoint": {"every": 0},
                "evaluation": {"every": 0, "final": False, "sample_tokens": 0},
            }
        )
    )
    TWO_CORES.save(tmp_path / "home" / "machine.yaml")
    command = [sys.executable, "-m", "shoal", "train", str(job), "--dir"]
    home = {"SHOAL_HOME": str(tmp_path / "home")}
    said = tmp_path / "said"
    with said.open("w") as out:
        far = cluster.start(
            0,
            [*command, str(tmp_path / "far"), "--launch", "ray"],
            environment={**home, "RAY_ADDRESS": f"{cluster.addresses[0]}:{PORT}"},
            stdout=out,
            stderr=out,
        )
        assert far.wait(WAIT_S) == 0, said.read_text()
    subprocess.run([*command, str(tmp_path / "near"), "-q"], env={**os.environ, **home}, check=True)
    assert len(losses(tmp_path / "near")) == 6
    assert losses(tmp_path / "far") == losses(tmp_path / "near")
    shown = said.read_text()
    assert "training at step 0 of 6" in shown and "prediction and measurement" in shown
    # Both nodes took part: the tokens lie in the homes of both.
    for node in range(2):
        corpora = tmp_path_factory.getbasetemp() / f"home{node}" / "corpora"
        assert [path for path in corpora.iterdir() if path.is_dir()], node


def test_replicas_of_a_lost_node_go_elsewhere(cluster: EmulatedNetwork, tmp_path: Path) -> None:
    from shoal.corpora.tokenizer import train

    model = tmp_path / "bytes"
    model.mkdir()
    train([""], 257).save(str(model / "tokenizer.json"))
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    log = tmp_path / "log"
    head = f"{cluster.addresses[0]}:{PORT}"
    with log.open("w") as errors:
        driver = cluster.start(
            0,
            [sys.executable, str(script), str(model), head],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert driver.stdin is not None

    def heard() -> dict[str, Any]:
        # Ray prints what it notices of lost nodes between the lines.
        assert driver.stdout is not None
        while not (line := driver.stdout.readline()).startswith("{"):
            assert line, log.read_text()[-3000:]
        return dict(json.loads(line))

    assert "no node has 8 CPUs and 0 GPUs free for it" in heard()["refused"]
    first = heard()["replicas"]
    assert sorted(address for address, _ in first) == list(cluster.addresses)
    for pid in subprocess.run(
        ["ip", "netns", "pids", cluster.names[1]], capture_output=True, text=True, check=True
    ).stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    driver.stdin.write("lost\n")
    driver.stdin.flush()
    assert heard()["actors"] == [cluster.addresses[0]] * 2
    after = heard()
    assert [address for address, _ in after["replicas"]] == [cluster.addresses[0]] * 2
    assert after["text"] == "abab"
    # Nothing outlives the process that asked for it, however that ends.
    pids = [pid for _, pid in after["replicas"]]
    folders = [folder_of(pid) for pid in pids]
    driver.kill()
    until(lambda: all(ended(pid) for pid in pids), "a replica is left")
    until(lambda: not any(folder.exists() for folder in folders), "a folder is left")


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie of whoever reaps orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def folder_of(pid: int) -> Path:
    """The directory of a replica's own."""
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (place,) = [word[7:].decode() for word in words if word.startswith(b"TMPDIR=")]
    assert "shoal-replica" in place
    assert Path(place).exists()
    return Path(place)

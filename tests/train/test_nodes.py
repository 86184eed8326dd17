"""Nodes with disks of their own: what rank 0 has prepared reaches them, or the run is refused."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, DataError, RankError, ShoalError
from shoal.core.files import write_json
from shoal.corpora.tokens import files_of, open_tokens, prepare, receive
from shoal.ir import TrainPlan
from shoal.machine.emulate import emulate, unavailable
from shoal.train import nodes
from shoal.train.layout import RunDir
from shoal.train.nodes import RunNode, give, take
from shoal.train.run import execute

Make = Callable[..., TrainPlan]


def losses(run: Path) -> dict[int, float]:
    lines = (run / "events.jsonl").read_text().splitlines()
    steps = [event for line in lines if (event := json.loads(line))["kind"] == "step"]
    return {event["step"]: event["loss"] for event in steps}


class _Store:
    """The store of torch, between threads of a test."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._new = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._new:
            self._values[key] = value
            self._new.notify_all()

    def wait(self, keys: list[str], timeout: Any) -> None:
        with self._new:
            if not self._new.wait_for(lambda: set(keys) <= set(self._values), 30):
                raise RuntimeError("timed out")

    def get(self, key: str) -> bytes:
        self.wait([key], None)
        return self._values[key].encode()


@pytest.fixture
def prepared(make_plan: Make, tmp_path: Path) -> Callable[..., tuple[TrainPlan, RunDir]]:
    """``prepared(checkpoint=..., ...)`` -> plan and directory of a run, as rank 0 has them."""

    def make(**changes: Any) -> tuple[TrainPlan, RunDir]:
        plan = make_plan(parallel={"dp": 2}, **changes)
        directory = RunDir(tmp_path / "zero")
        tokens = prepare(plan.job.data, "bpe", plan.shape.vocab_size)
        plan.save(directory.plan)
        directory.tokenizer.write_bytes(tokens.tokenizer_path.read_bytes())
        write_json(directory.tokens, {"path": str(tokens.path)})
        return plan, directory

    return make


def join(plan: TrainPlan, zero: RunDir, one: RunDir, **options: Any) -> list[ShoalError | None]:
    """Give from a directory to another, as two nodes do; what each of them raised."""
    gate = _Store()
    results: list[ShoalError | None] = [None, None]
    places = [RunNode(number=n, nodes=2, first=True, address="127.0.0.1") for n in range(2)]

    def first() -> None:
        try:
            give(plan, zero, gate, places[0])
        except ShoalError as error:
            results[0] = error

    thread = threading.Thread(target=first)
    thread.start()
    try:
        take(one, gate, places[1], **{"resume": False, **options})
    except ShoalError as error:
        results[1] = error
    thread.join()
    return results


def test_a_node_takes_what_it_lacks(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, zero = prepared(checkpoint={"path": str(tmp_path / "shared")})
    path = nodes.tokens_of(zero)
    monkeypatch.setattr(nodes, "receive", lambda n, f, g: receive(n, f, g, tmp_path / "home"))
    one = RunDir(tmp_path / "one")
    assert join(plan, zero, one) == [None, None]
    assert TrainPlan.load(one.plan) == plan
    assert one.tokenizer.read_bytes() == zero.tokenizer.read_bytes()
    copy = Path(json.loads(one.tokens.read_text())["path"])
    assert copy.parent == tmp_path / "home"
    assert files_of(copy) == files_of(path)
    assert list((tmp_path / "shared").iterdir()) == []
    # What has arrived damaged is taken again.
    shard = copy / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert join(plan, zero, one) == [None, None]
    assert open_tokens(copy).fingerprint == path.name


def test_checkpoints_on_disks_of_their_own_are_refused(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_VISIBLE_S", 0.1)
    plan, zero = prepared()
    both = join(plan, zero, RunDir(tmp_path / "one"))
    for error in both:
        assert isinstance(error, RankError)
        assert f"node 1 ({socket.gethostname()}): {tmp_path / 'one' / 'checkpoints'}" in str(error)
        assert "checkpoint.path to a directory that all nodes mount" in str(error)


def test_weights_that_differ_are_refused(
    prepared: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(bytes(64))
    digests = [nodes.digest_of(model)]
    (model / "model.safetensors").write_bytes(bytes(63) + b"\1")
    assert nodes.digest_of(model) not in digests
    plan, _ = prepared(checkpoint={"path": str(tmp_path)})
    plan = plan.model_copy(update={"job": plan.job.model_copy(update={"model": str(model)})})
    with pytest.raises(ConfigError, match="other weights here than on rank 0; copy the directory"):
        nodes._check_model(plan, digests[0])
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is missing on this node"):
        nodes._check_model(plan, digests[0])


def test_another_run_in_the_way_is_named(prepared: Any, tmp_path: Path) -> None:
    plan, zero = prepared(checkpoint={"path": str(tmp_path / "shared")})
    one = RunDir(tmp_path / "one")
    plan.save(one.plan, header="another")
    assert "contains another run" in str(join(plan, zero, one)[0])
    assert join(plan, zero, one, resume=True) == [None, None]


def test_a_failure_of_rank_0_reaches_all(tmp_path: Path) -> None:
    gate = _Store()
    nodes.refuse(gate, DataError("no text"))
    place = RunNode(number=1, nodes=2, first=False, address="127.0.0.1")
    with pytest.raises(RankError, match="rank 0 could not prepare the run: no text"):
        take(RunDir(tmp_path), gate, place, resume=False)


def test_bytes_that_were_changed_on_the_way_are_refused(prepared: Any, tmp_path: Path) -> None:
    _, zero = prepared()
    path = nodes.tokens_of(zero)

    def fetch(name: str) -> list[bytes]:
        data = bytearray((path / name).read_bytes())
        if name == "train-00000.bin":
            data[100] ^= 1
        return [bytes(data)]

    with pytest.raises(DataError, match=r"train-00000\.bin: .* arrived instead of"):
        receive(path.name, files_of(path), fetch, tmp_path / "home")
    assert not [p for p in (tmp_path / "home").iterdir() if p.is_dir()]
    with pytest.raises(DataError, match="32 hexadecimal digits"):
        receive("../x", [], fetch, tmp_path / "home")


def test_files_are_sent_to_none_without_the_secret(prepared: Any) -> None:
    _, zero = prepared()
    path = nodes.tokens_of(zero)
    with nodes._serving(path, ["index.json"], "secret") as port:
        assert b"".join(nodes._fetched("127.0.0.1", port, "secret", "index.json"))
        assert not b"".join(nodes._fetched("127.0.0.1", port, "secret2", "index.json"))
        assert not b"".join(nodes._fetched("127.0.0.1", port, "secret", "../index.json"))
    with pytest.raises(DataError, match="let the nodes reach each other"):
        b"".join(nodes._fetched("127.0.0.1", port, "secret", "index.json"))


@pytest.mark.slow
@pytest.mark.multi
def test_two_nodes_with_private_disks(make_plan: Make, tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    short = {"steps": 6, "checkpoint": {"every": 0, "path": str(tmp_path / "shared")}}
    plan = make_plan(parallel={"dp": 2}, **short)
    plan.save(tmp_path / "plan.yaml")
    with emulate(2, bandwidth=1e8) as network:
        running = []
        for node in range(2):
            place = tmp_path / f"node{node}"
            place.mkdir()
            launch = (
                "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-port 29500 "
                f"--master-addr {network.addresses[0]} --node-rank {node} -m shoal train "
                f"--plan {tmp_path / 'plan.yaml'} --dir {place / 'run'}"
            )
            with (place / "out").open("w") as out, (place / "err").open("w") as err:
                running.append(
                    network.start(
                        node,
                        [sys.executable, *launch.split()],
                        environment={"HOME": str(place), "SHOAL_HOME": str(place / "home")},
                        stdout=out,
                        stderr=err,
                    )
                )
        codes = [process.wait(180) for process in running]
    said = [[(tmp_path / f"node{n}" / kind).read_text() for kind in ("out", "err")] for n in (0, 1)]
    assert codes == [0, 0], said
    # As ranks of one host, bit for bit.
    once = make_plan(parallel={"dp": 2}, steps=6, checkpoint={"every": 0})
    execute(once, tmp_path / "here")
    assert losses(tmp_path / "node0" / "run") == losses(tmp_path / "here")
    assert len(losses(tmp_path / "here")) == 6
    assert (tmp_path / "node0" / "run" / "report.json").exists()
    # What rank 0 has sent lies on the disk of node 1; events and report lie with rank 0 alone.
    (tokens,) = [p for p in (tmp_path / "node1" / "home" / "corpora").iterdir() if p.is_dir()]
    assert files_of(tokens) == files_of(tmp_path / "node0" / "home" / "corpora" / tokens.name)
    assert not (tmp_path / "node1" / "run" / "events.jsonl").exists()
    # Rank 0 prints what shoal train prints, and no other rank does.
    assert "training at step 0 of 6" in said[0][1]
    assert "prediction and measurement" in said[0][0]
    assert "training at" not in said[1][1] and "prediction" not in said[1][0]

"""Snapshot processes: what they hold outlives whoever wrote it, and is right or refused."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint.inmemory import process as process_module
from shoal.checkpoint.inmemory import snapshot as snapshot_module
from shoal.checkpoint.inmemory.fleet import Fleet
from shoal.checkpoint.inmemory.process import SnapshotProcess
from shoal.checkpoint.inmemory.recovery import InMemory
from shoal.checkpoint.inmemory.snapshot import Snapshots
from shoal.checkpoint.inmemory.wire import SnapshotAddress, SnapshotClient, receive, send
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, NonFiniteError, RankError
from shoal.core.parts import Choice

pytestmark = [pytest.mark.multi, pytest.mark.timeout(60)]

WORLD = 4


def state(step: int) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(300, 70, generator=source),
        "model.half": torch.randn(33, 5, generator=source).to(torch.bfloat16),
        "model.turned": torch.randn(40, 30, generator=source).T,
        "optimizer.a.step": torch.tensor(float(step)),
    }


class Trainers:
    """Four threads that take snapshots as four trainers would."""

    def __init__(self, fleet: Fleet, choice: Choice, ranks: Sequence[int] = range(WORLD)) -> None:
        given: dict[int, bytes] = {}
        meet = threading.Barrier(len(ranks))

        def exchange(rank: int, data: bytes) -> list[bytes]:
            given[rank] = data
            meet.wait(10)
            results = [given[r] for r in ranks]
            meet.wait(10)
            return results

        self.pool = ThreadPoolExecutor(len(ranks))
        self.all = [
            Snapshots(
                fleet.members,
                fleet.secret,
                rank=rank,
                replicas=ranks,
                choice=choice,
                exchange=lambda data, rank=rank: exchange(rank, data),
            )
            for rank in ranks
        ]

    def begin(self, step: int, which: Sequence[int] = range(WORLD)) -> None:
        held = {name: [Piece.whole(tensor)] for name, tensor in state(step).items()}
        list(self.pool.map(lambda r: self.all[r].begin(step, held, {"step": step}), which))

    def take(self, step: int) -> list[Any]:
        self.begin(step)
        return list(self.pool.map(lambda one: one.settle(), self.all))

    def end(self) -> None:
        for one in self.all:
            one.close()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), WORLD) as fleet:
        yield fleet
        processes = list(fleet.processes)
    assert all(one.returncode is not None for one in processes), "nothing stays behind"


def check(fleet: Fleet, step: int | None) -> None:
    """The version of ``step`` is in memory, bit for bit."""
    assert step is not None
    version = InMemory(fleet.members, fleet.secret, step)
    assert version.meta == {"step": step}
    for name, tensor in state(step).items():
        assert torch.equal(version.tensor(name), tensor), name
        assert version.shape(name) == tuple(tensor.shape)
    box = version.tensor("model.a", offset=(7, 3), shape=(200, 40))
    assert torch.equal(box, state(step)["model.a"][7:207, 3:43])
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.b'"):
        version.tensor("model.b")
    version.close()


def test_versions_outlive_trainers_and_nodes(fleet: Fleet) -> None:
    assert fleet.recover().reason == "no snapshot was taken yet"
    xor = Choice(name="xor", options={"bucket": 4096})
    trainers = Trainers(fleet, xor)
    for step in (1, 2, 3):
        settled = trainers.take(step)
    total = sum(tensor.nbytes for tensor in state(3).values())
    assert sum(one.bytes for one in settled) == total, "every byte is copied once"
    assert max(one.bytes for one in settled) <= total / WORLD + 4 * 64

    # Two trainers end while they fill a slot: the other one has the version before.
    trainers.begin(4, which=[0, 1])
    trainers.end()
    result = fleet.recover()
    assert (result.step, result.rung, result.rebuilt) == (3, "trainers", ())
    check(fleet, 3)

    # Any one process is rebuilt from the others.
    for rank in (0, 3):
        fleet.kill([rank])
        result = fleet.recover()
        assert (result.step, result.rung, result.rebuilt) == (3, "rebuilt", (rank,))
        check(fleet, 3)

    # And the run goes on from there.
    trainers = Trainers(fleet, xor)
    trainers.take(4)
    trainers.end()

    # Two are too many for one parity.
    fleet.kill([1, 2])
    result = fleet.recover()
    assert (result.step, result.rung) == (None, "disk")
    assert "step 4 cannot be rebuilt: the parts of ranks [1, 2] are lost" in result.reason


@pytest.mark.slow
def test_the_processes_save_without_the_trainers(fleet: Fleet, tmp_path: Path) -> None:
    trainers = Trainers(fleet, Choice(name="xor"))
    trainers.take(8)
    trainers.end()
    assert fleet.recover().step == 8
    fleet.persist(str(tmp_path / "store"), 2)
    saved = Store(tmp_path / "store").open(8)
    assert all(torch.equal(saved.tensor(name), tensor) for name, tensor in state(8).items())
    fleet.kill(range(WORLD))
    assert fleet.recover().rung == "disk"
    with pytest.raises(RankError, match="no version in memory"):
        fleet.persist(str(tmp_path / "store"), 2)


def test_two_losses_under_two_parities(fleet: Fleet) -> None:
    trainers = Trainers(fleet, Choice(name="rs", options={"losses": 2}))
    trainers.take(7)
    trainers.end()
    fleet.kill([0, 3])
    result = fleet.recover()
    assert (result.step, result.rebuilt) == (7, (0, 3))
    check(fleet, 7)


def test_damage_is_rebuilt_and_mixed_steps_are_refused(fleet: Fleet) -> None:
    trainers = Trainers(fleet, Choice(name="xor"))
    trainers.take(5)
    # A bit of a sealed version flips in the memory of rank 2.
    for slot in trainers.all[2]._slots:
        slot[100] ^= 1
    trainers.end()
    result = fleet.recover()
    assert (result.step, result.rebuilt) == (5, (2,))
    check(fleet, 5)

    # Members that commit different steps are told so, all of them; the step before stays.
    trainers = Trainers(fleet, Choice(name="xor"))
    trainers.take(6)
    trainers.begin(7, which=[0, 1, 2])
    trainers.begin(9, which=[3])
    said = []
    for one in trainers.all:
        with pytest.raises((CheckpointError, RankError)) as caught:
            one.settle()
        said.append(str(caught.value))
    assert any("a version is of one step" in text for text in said)
    trainers.end()
    assert fleet.recover().step == 6
    check(fleet, 6)


def test_who_is_let_in(fleet: Fleet) -> None:
    place = fleet.members.places[0]
    with pytest.raises(CheckpointError, match=r"belongs to run .* and this is 'other'"):
        SnapshotClient(place, "other", fleet.secret, rank=0)
    with pytest.raises(CheckpointError, match="does not prove the secret"):
        SnapshotClient(place, fleet.members.run, b"wrong", rank=0)
    with pytest.raises(RankError, match="does not answer"):
        SnapshotClient(
            SnapshotAddress(host="127.0.0.1", port=1, pid=1),
            fleet.members.run,
            fleet.secret,
            rank=3,
        )
    # What does not sign is cut off, and the process serves on.
    with socket.create_connection((place.host, place.port)) as rude:
        receive(rude)
        rude.sendall(b"\xff" * 64)
        assert b"not one of ours" in rude.recv(4096)
    with socket.create_connection((place.host, place.port)) as rude:
        receive(rude)
        send(rude, {"op": "status"})
        assert "does not prove the secret" in receive(rude)[0]["error"]
    with SnapshotClient(place, fleet.members.run, fleet.secret, rank=0) as client:
        assert client.call("status")["rank"] == 0
        with pytest.raises(CheckpointError, match="'dance' is nothing"):
            client.call("dance")
        with pytest.raises(CheckpointError, match="step 99 is not here"):
            client.call("read", step=99, block=0, offset=0, length=1)
    assert fleet.secret.hex() not in fleet.file.read_text()


def test_too_little_memory_is_said_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "memory_available", lambda: 10_000)
    one = SnapshotProcess("run", b"secret", 0)
    spec = {"code": "xor", "group": [0, 1, 2], "piece": 100_000, "manifests": {}, "world": 3}
    needed = r"free host memory = '10000 bytes': expected 303104 bytes: 2 slots of 2 blocks and 1"
    with pytest.raises(CheckpointError, match=needed):
        one.open(spec, 0, [])
    with pytest.raises(CheckpointError, match="nothing is open"):
        one.begin()


def test_they_end_with_their_starter_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from shoal.checkpoint.inmemory.fleet import Fleet\n"
        "fleet = Fleet(Path(sys.argv[1]), 2)\n"
        "print(*(one.pid for one in fleet.processes), flush=True)\n"
        "sys.stdin.readline()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdin is not None
        assert starter.stdout is not None
        pids = [int(word) for word in starter.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        starter.stdin.write("go\n")
        starter.stdin.flush()
        assert starter.wait() == -signal.SIGKILL
    for pidfd in watched:
        assert select.select([pidfd], [], [], 20)[0], "it has ended"
        os.close(pidfd)


def test_a_lost_process_is_named(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2) as fleet:
        fleet.check()
        trainers = Trainers(fleet, Choice(name="copies"), ranks=range(2))
        held = {"model.a": [Piece.whole(torch.zeros(10))]}
        fleet.kill([1])
        with pytest.raises(RankError, match=r"snapshot process of rank 1 \(pid \d+\) has ended"):
            fleet.check()

        def begin(rank: int) -> None:
            trainers.all[rank].begin(1, held, {})
            trainers.all[rank].settle()

        # The rank itself, and its neighbour that codes with it.
        for started in [trainers.pool.submit(begin, rank) for rank in range(2)]:
            with pytest.raises(RankError, match="snapshot process of rank 1"):
                started.result(10)
        trainers.end()
    assert not fleet.file.exists()


def test_what_is_not_finite_or_changes_meanwhile_is_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version before it stays; the next good one is newer again."""
    go, copies = threading.Event(), snapshot_module._copies

    def waiting(*given: Any) -> Iterator[Any]:
        go.wait(20)
        yield from copies(*given)

    monkeypatch.setattr(snapshot_module, "_copies", waiting)
    with Fleet(tmp_path, 2) as fleet:
        for spoil, message in (
            (lambda x: x.view(-1)[7].fill_(float("nan")), r"not finite: 1 of \d tensors of rank 0"),
            (None, r"'model\.a' was changed while it was copied into memory"),
        ):
            trainers = Trainers(fleet, Choice(name="xor", options={"bucket": 4096}), range(2))
            go.set()
            trainers.begin(1, range(2))
            list(trainers.pool.map(lambda one: one.settle(), trainers.all))
            go.clear()
            now = state(2)
            if spoil is not None:
                spoil(now["model.a"])
            held = {name: [Piece.whole(tensor)] for name, tensor in now.items()}
            list(trainers.pool.map(lambda one, h=held: one.begin(2, h, {"step": 2}), trainers.all))
            if spoil is None:
                now["model.a"].data.add_(1)
            go.set()
            settling = trainers.pool.submit(trainers.all[0].settle)
            with pytest.raises((NonFiniteError, CheckpointError), match=message):
                settling.result(20)
            trainers.end()
            result = fleet.recover()
            assert result.step == 1
            check(fleet, 1)

"""Records survive, wrap round, and name what communicators really did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.errors import ConfigError, RankError
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.recorder import COMPUTE, Recorder, read
from shoal.train.watch.selfcheck import check_arithmetic, check_neighbours, loopback_rate
from shoal.train.watch.watched_comm import WatchedComm, phase


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.flight"
    recorder = Recorder(path, 3, 8, capacity=16, host="here")
    for number in range(40):
        recorder.step = number // 2
        at = recorder.enter(1, recorder.name("send"), recorder.name("t"), seq=number, nbytes=10)
        recorder.issued(at)
        recorder.waited(at)
        recorder.left(at)
    recorder.left(2)  # long overwritten
    flight = read(path)
    assert flight is not None
    assert (flight.rank, flight.world, flight.host) == (3, 8, "here")
    assert (flight.lost, flight.nbytes) == (24, 400)
    assert flight.rows["seq"].tolist() == list(range(24, 40))
    assert flight.rows["step"].tolist() == [number // 2 for number in range(24, 40)]
    assert (flight.rows["left"] >= flight.rows["enter"]).all()
    assert flight.names[int(flight.rows["op"][0])] == "send"
    recorder.close()


def test_spans_and_names(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-0.flight", 0, 1, capacity=16)
    with recorder.span("load"):
        during = read(recorder.path)
        assert during is not None
        assert during.rows["left"][-1] == 0
    after = read(recorder.path)
    assert after is not None
    assert after.rows["left"][-1] > 0
    assert after.names[int(after.rows["op"][-1])] == COMPUTE
    assert after.names[int(after.rows["tag"][-1])] == "load"
    for number in range(70_000):
        if not recorder.name(f"a name that is rather long, number {number}"):
            break
    else:
        pytest.fail("names without end")
    again = read(recorder.path)
    assert again is not None
    assert again.names[-1].startswith("a name")


def test_what_is_no_flight_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.flight"
    assert read(path) is None
    path.write_bytes(b"x" * 100)
    with pytest.raises(RankError, match="no flight recorder wrote this"):
        read(path)
    Recorder(path, 0, 1, capacity=64).close()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RankError, match="cut short"):
        read(path)
    with pytest.raises(RankError, match="no rank has recorded"):
        Evidence.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"watch\.events = 3"):
        Recorder(path, 0, 1, capacity=3)


def test_every_operation_is_recorded_on_every_rank(tmp_path: Path) -> None:
    def work(inner: ThreadComm) -> list[float]:
        recorder = Recorder(tmp_path / f"rank-{inner.rank}.flight", inner.rank, 4, host="h")
        comm = WatchedComm(inner, recorder)
        for step in range(3):
            recorder.step = step
            with phase(comm, "load"):
                x = torch.full((8,), float(comm.rank))
            pending = comm.all_reduce(x, tag="sum")
            pending.wait()
            pair = comm.split([[0, 1], [2, 3]]) if step == 0 else pair  # noqa: F821
            other, got = 1 - pair.rank, torch.empty(2)
            sent = pair.send(torch.ones(2), other, tag="m")
            pair.receive(got, other, tag="m").wait()
            sent.wait()
            comm.barrier()
        assert comm.split([[0, 1, 2, 3]]).world == 4
        return x.tolist()

    assert run_ranks(4, work)[2] == [6.0] * 8
    evidence = Evidence.load(tmp_path)
    assert evidence.missing == ()
    assert {c.members for c in evidence.collectives} == {(0, 1, 2, 3)}
    assert len(evidence.collectives) == 6
    assert all(len(c.entries) == 4 for c in evidence.collectives)
    ends = {(m.source, m.target) for m in evidence.messages}
    assert ends == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert all(m.sent and m.received and m.received.done for m in evidence.messages)
    assert evidence.blocked == {}
    assert evidence.steps() == [0, 1]
    assert set(evidence.busy[0]) == {0, 1}


def test_arithmetic_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.core.errors import MachineError

    check_arithmetic()
    right = torch.nn.functional.linear

    def wrong(*args: torch.Tensor) -> torch.Tensor:
        out = right(*args)
        out.view(-1)[7] += 0.5
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", wrong)
    with pytest.raises(MachineError, match="1 of 4096 elements"):
        check_arithmetic(seed=5)


@pytest.mark.parametrize(("world", "bad"), [(4, 2), (5, 0), (5, 4), (3, 1), (2, None), (1, None)])
def test_neighbours_find_the_one_whose_sums_are_wrong(world: int, bad: int | None) -> None:
    class Spoilt:
        """Spoils the sums of one rank's groups."""

        def __init__(self, inner: ThreadComm) -> None:
            self.inner, self.rank, self.world = inner, inner.rank, inner.world
            self.ranks, self.device = inner.ranks, "cpu"

        def split(self, groups: list[list[int]]) -> Spoilt:
            return Spoilt(self.inner.split(groups))

        def all_reduce(self, x: torch.Tensor, *, tag: str) -> object:
            done = self.inner.all_reduce(x, tag=tag)
            done.wait()
            if self.world < world and bad in self.ranks and self.world > 1:
                x[0] += 1
            return done

    ranks = run_ranks(world, lambda inner: check_neighbours(Spoilt(inner)))  # type: ignore[arg-type]
    assert set(ranks) == {() if bad is None else (bad,)}


def test_loopback_has_a_rate() -> None:
    assert loopback_rate() > 1e6

"""Ways of saving: what is published is what was given, whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stored import META, ThreadPeers, flip, on_ranks, tensors

from shoal.checkpoint import SAVE_MODES, background, source
from shoal.checkpoint.background import Background
from shoal.checkpoint.image import write_image
from shoal.checkpoint.modes import lazy
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.protocols import Saver
from shoal.checkpoint.shards import shard_name
from shoal.checkpoint.states import ModuleState
from shoal.checkpoint.store import Piece, Store
from shoal.core.errors import CheckpointError, ConfigError, CorruptError

MODES = tuple(SAVE_MODES)


@contextlib.contextmanager
def saving(mode: Any, store: Store, peers: Any = None) -> Iterator[Saver]:
    saver = SAVE_MODES.build(mode).build(store, peers or SinglePeer())
    try:
        yield saver
    finally:
        saver.close()


def state(step: int) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.full((300, 5), float(step)),
        "model.v": torch.arange(70_000.0) + step,
        "optimizer.w.count": torch.tensor(step),
        "model.empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("mode", MODES)
def test_what_is_published_is_what_was_given(mode: str, tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    live = state(0)
    with saving(mode, store) as saver:
        tickets = []
        for step in range(1, 6):
            saver.before_update()
            for name, tensor in state(step).items():
                live[name].copy_(tensor)
            tickets.append(saver.save(step, live, META))
        for ticket in tickets:
            ticket.wait(30)
        assert [ticket.step for ticket in saver.finished()] == [1, 2, 3, 4, 5]
        assert saver.finished() == []
        assert [ticket.fresh_plan for ticket in tickets] == [True, False, False, False, False]
    assert store.steps() == (4, 5)
    for step in (4, 5):
        saved = store.open(step)
        assert saved.meta["seed"] == 7 and saved.meta["step"] == step
        for name, tensor in state(step).items():
            assert torch.equal(saved.tensor(name), tensor), (name, step)
    assert all(path.name.startswith("step-") for path in tmp_path.iterdir())


@pytest.mark.parametrize("mode", MODES)
def test_copies_are_written_once_and_in_equal_shares(mode: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    whole = {f"model.{i}": torch.randn(40 + i, 8) for i in range(30)}
    own = [torch.randn(10, 3) for _ in range(4)]

    def work(peers: ThreadPeers) -> int:
        given: dict[str, Any] = dict(whole)
        given["model.split"] = Piece(own[peers.rank], (40, 3), (10 * peers.rank, 0))
        with saving(mode, store, peers) as saver:
            ticket = saver.save(3, given, META)
        ticket.wait(30)
        return ticket.bytes

    sizes = on_ranks(4, work)
    saved = store.open(3)
    for name, tensor in whole.items():
        assert torch.equal(saved.tensor(name), tensor)
        assert len(saved.pieces(name)) == 1
    assert torch.equal(saved.tensor("model.split"), torch.cat(own))
    assert max(sizes) <= 1.2 * min(sizes), sizes


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_is_told_and_the_old_one_stays(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    pwrite = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        raise OSError(28, "No space left on device")

    with saving(mode, store) as saver:
        saver.save(1, state(1), META).wait(30)
        monkeypatch.setattr(os, "pwrite", full)
        for step in (2, 3, 4):  # more than there are pools: each must come back
            ticket = saver.save(step, state(step), META)
            saver.before_update()
            with pytest.raises(CheckpointError, match=rf"disk full while saving step {step}"):
                ticket.wait(30)
        monkeypatch.setattr(os, "pwrite", pwrite)
        saver.save(5, state(5), META).wait(30)
    assert store.steps() == (1, 5)
    for path in tmp_path.iterdir():
        assert path.name.startswith("step-"), path


def test_one_rank_that_cannot_write_drops_the_save_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    write = write_image

    def refuse(draft: Any, rank: int, *rest: Any) -> Any:
        if rank == 1 and draft.step == 2:
            raise PermissionError(13, "Permission denied", "rank-00001")
        return write(draft, rank, *rest)

    monkeypatch.setattr(background, "write_image", refuse)

    def work(peers: ThreadPeers) -> list[str]:
        given = {"w": Piece(torch.ones(5), (10,), (5 * peers.rank,))}
        with saving("snapshot", store, peers) as saver:
            for step in (1, 2, 3):
                saver.save(step, given, META)
            saver.close()
            return [str(ticket.error) for ticket in saver.finished()]

    ranks = on_ranks(2, work)
    assert ranks[0][0] == ranks[0][2] == "None"
    assert "rank 1" in ranks[0][1] and "Permission denied" in ranks[0][1]
    assert "Permission denied" in ranks[1][1]
    assert store.steps() == (1, 3)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_run_is_refused_on_all_ranks(mode: str, tmp_path: Path) -> None:
    with saving(mode, Store(tmp_path)) as first:

        def work(peers: ThreadPeers) -> str:
            with pytest.raises(CheckpointError) as caught:
                SAVE_MODES.build(mode).build(Store(tmp_path), peers)
            return str(caught.value)

        for result in on_ranks(2, work):
            assert "another process is saving here" in result
        first.save(1, state(1), META).wait(30)
    with saving(mode, Store(tmp_path)) as second:
        second.save(2, state(2), META).wait(30)
    assert Store(tmp_path).steps() == (1, 2)


def test_what_was_abandoned_never_becomes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    write = write_image

    def slow(*given: Any) -> Any:
        go.wait(30)
        return write(*given)

    monkeypatch.setattr(background, "write_image", slow)

    class Two(SinglePeer):
        world = 2  # the other one never votes

    saver = SAVE_MODES.build("snapshot").build(Store(tmp_path), Two())
    ticket = saver.save(1, state(1), META)
    saver.close(abandon=True)
    go.set()
    with pytest.raises(CheckpointError, match="not saved"):
        ticket.wait(30)
    assert Store(tmp_path).steps() == ()


def test_nothing_is_deleted_when_the_new_one_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep=1)
    rename = os.rename

    def rot(source: Any, target: Any) -> None:
        rename(source, target)
        if Path(target).name == "step-00000002":
            flip(Path(target) / "rank-00000.safetensors", -9)

    monkeypatch.setattr(os, "rename", rot)
    with saving("snapshot", store) as saver:
        saver.save(1, state(1), META).wait(30)
        with pytest.raises(CorruptError, match=r"step 1 in .* is intact"):
            saver.save(2, state(2), META).wait(30)
    assert store.steps() == (1, 2)


@pytest.mark.parametrize("mode", MODES)
def test_what_cannot_be_stored_is_refused_at_once(mode: str, tmp_path: Path) -> None:
    with saving(mode, Store(tmp_path)) as saver:
        with pytest.raises(CheckpointError, match=r"'w'\.dtype"):
            saver.save(1, {"w": torch.ones(2, dtype=torch.complex64)}, META)
        saver.save(2, tensors(), META).wait(30)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="pools"):
        SAVE_MODES.build({"name": "snapshot", "pools": 0})
    with pytest.raises(ConfigError, match="host_buffer"):
        SAVE_MODES.build({"name": "lazy", "host_buffer": "1MiB"})


class Small:
    """A ring of two chunks of 4 KiB, so that small tensors fill many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (lazy, source):
            monkeypatch.setattr(module, "CHUNK_BYTES", 4096)
        self.mode = {"name": "lazy", "host_buffer": 8192}
        self.in_use = self.most = 0
        take, give_back = lazy.RingBuffer.take, lazy.RingBuffer.give_back
        fill = source.ByteSource.fill
        self.before_fill: Callable[[int], None] = lambda _: None

        def taken(ring: Any) -> Any:
            result = take(ring)
            self.in_use += 1
            self.most = max(self.most, self.in_use)
            return result

        def given(ring: Any) -> None:
            self.in_use -= 1
            give_back(ring)

        def filled(of: Any, at: int, out: Any) -> None:
            self.before_fill(at)
            fill(of, at, out)

        monkeypatch.setattr(lazy.RingBuffer, "take", taken)
        monkeypatch.setattr(lazy.RingBuffer, "give_back", given)
        monkeypatch.setattr(source.ByteSource, "fill", filled)


def test_a_slow_copier_never_sees_an_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch)
    small.before_fill = lambda _: time.sleep(0.0005)
    store = Store(tmp_path, keep=20)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    with saving(small.mode, store) as saver:
        optimizer.register_step_pre_hook(lambda *_: saver.before_update())
        for step in range(1, 9):
            model(torch.randn(5, 30)).square().sum().backward()
            optimizer.step()
            live = {
                f"optimizer.{name}.{key}": value
                for name, p in model.named_parameters()
                for key, value in optimizer.state[p].items()
            }
            live |= {f"model.{name}": p for name, p in model.named_parameters()}
            expected[step] = {name: t.detach().clone() for name, t in live.items()}
            ticket = saver.save(step, live, META)
        ticket.wait(30)
    assert store.steps() == tuple(range(1, 9))
    for step, tensors_ in expected.items():
        saved = store.open(step)
        for name, tensor in tensors_.items():
            assert torch.equal(saved.tensor(name), tensor), (step, name)
    assert small.in_use == 0 and small.most == 2
    assert ticket.blocked_s.keys() <= {"plan", "watch", "before_update", "back_pressure"}


def through_numpy(tensor: torch.Tensor) -> None:
    """As a kernel of another library changes it."""
    tensor.numpy()[:] += 1


def one_row(tensor: torch.Tensor) -> None:
    """Neighbouring elements, as many as lie between two samples of the largest tensor here."""
    tensor.data[1000 : 1000 + -(-len(tensor) // 1024)] = 1


@pytest.mark.parametrize(
    "change",
    [lambda x: x.add_(1), lambda x: x.data.add_(1), through_numpy, one_row],
    ids=["counted", "data", "numpy", "one row"],
)
def test_a_change_behind_its_back_drops_the_save_by_name(
    change: Callable[[torch.Tensor], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch)
    go = threading.Event()
    small.before_fill = lambda at: (go.wait(30), None)[1]
    store = Store(tmp_path)
    live = {"model.a": torch.zeros(3000), "model.b": torch.zeros(3000)}
    with saving(small.mode, store) as saver:
        ticket = saver.save(1, live, META)
        change(live["model.b"])  # nobody asked
        go.set()
        with pytest.raises(CheckpointError, match=r"'model\.b' was changed while"):
            ticket.wait(30)
        saver.before_update()
        saver.save(2, live, META).wait(30)
    assert store.steps() == (2,)
    assert small.in_use == 0


def test_buffers_that_the_forward_pass_changes_are_saved_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch)
    go = threading.Event()
    small.before_fill = lambda at: (go.wait(30), None)[1]
    store = Store(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(40, 600), torch.nn.BatchNorm1d(600))
    with saving(small.mode, store) as saver:
        then = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        ticket = saver.save(1, ModuleState(model).shards(), META)
        model(torch.randn(5, 40))  # nothing was copied yet but the running means
        assert not torch.equal(model[1].running_mean, then["1.running_mean"])
        go.set()
        ticket.wait(30)
    assert ticket.blocked_s["copy"] > 0
    saved = store.open(1)
    for name, tensor in then.items():
        assert torch.equal(saved.tensor(name), tensor), name


def test_a_group_that_is_copied_may_change_before_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch)
    go = threading.Event()

    def hold(at: int) -> None:
        if at >= 5 * 4096:
            go.wait(30)

    small.before_fill = hold
    store = Store(tmp_path)
    sizes = {"model.a": 2000, "optimizer.a.m": 2000, "model.z": 9000}
    live = {name: torch.zeros(size) for name, size in sizes.items()}
    with saving(small.mode, store) as saver:
        ticket = saver.save(1, live, META)
        saver.before_update({"model.a", "optimizer.a.m"})
        live["model.a"].add_(1)
        assert not ticket.done()
        go.set()
        ticket.wait(30)
    assert torch.equal(store.open(1).tensor("model.a"), torch.zeros(2000))


def test_a_tensor_larger_than_the_buffer_goes_through_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Small(monkeypatch)
    large = {"w": torch.randn(50_000)}
    with saving(small.mode, Store(tmp_path / "a")) as saver:
        saver.save(1, large, META).wait(30)
    assert torch.equal(Store(tmp_path / "a").open(1).tensor("w"), large["w"])
    with (
        saving({**small.mode, "chunked": False}, Store(tmp_path / "b")) as saver,
        pytest.raises(CheckpointError, match="'w': 200000 bytes do not fit into the host buffer"),
    ):
        saver.save(1, large, META)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "blocking"])
def test_rank_0_knows_what_every_rank_took(mode: str, tmp_path: Path) -> None:
    store = Store(tmp_path)

    def work(peers: ThreadPeers) -> list[dict[str, float]]:
        given = {"w": Piece(torch.ones(500), (1500,), (500 * peers.rank,))}
        with saving(mode, store, peers) as saver:
            ticket = saver.save(1, given, META)
            saver.before_update()
        ticket.wait(30)
        return [share.phases_s for share in ticket.ranks]

    first, *others = on_ranks(3, work)
    assert len(first) == 3 and others == [[], []]
    assert all(set(phases) == {"plan", "copy", "write"} for phases in first)
    assert all(min(phases.values()) > 0 for phases in first)


def test_votes_are_looked_for_once_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted:
        step = 1
        looks = asked = 0

        def names(self) -> set[str]:
            self.looks += 1
            return {shard_name(rank) for rank in range(40 * self.looks)}

        def get(self, name: str) -> bytes | None:
            self.asked += 1
            return None

    draft: Any = Counted()
    waiting: Any = SimpleNamespace(
        peers=SimpleNamespace(world=100), _abandoned=threading.Event(), store=None
    )
    Background._await_votes(waiting, draft)
    assert (draft.looks, draft.asked) == (3, 0)

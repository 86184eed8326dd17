"""Farther levels: sent behind training, in bounded turns, with retries; a failure stays there."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from stored import META, ThreadPeers, flip, on_ranks, split, tensors

from shoal.checkpoint import SAVE_MODES, levels
from shoal.checkpoint.levels import CheckpointLevels, LevelCopier, LevelReport, nearest
from shoal.checkpoint.peers import SinglePeer
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, ConfigError
from shoal.ir import CheckpointPolicy


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits before another try."""
    monkeypatch.setattr(levels, "_PAUSE_S", 0.0)


@pytest.fixture
def far() -> Store:
    return Store(f"memory://{uuid.uuid4().hex}/run", keep=9)


def done(level: LevelCopier) -> list[LevelReport]:
    level.close()
    return level.reports()


def refuse(store: Store, monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """The place refuses so many uploads; returns those that it was asked for."""
    fs = store.storage._fs  # type: ignore[attr-defined]
    real, request = fs.open, []

    def open_(path: str, *args: Any, **options: Any) -> Any:
        if not path.endswith(".safetensors"):
            return real(path, *args, **options)
        request.append(path)
        if len(request) <= times:
            raise OSError(5, "the server is not well", path)
        return real(path, *args, **options)

    monkeypatch.setattr(fs, "open", open_)
    return request


@pytest.mark.parametrize("mode", list(SAVE_MODES))
def test_from_every_mode_to_the_far_place(mode: str, tmp_path: Path, far: Store) -> None:
    near = Store(tmp_path, keep=1)
    level = LevelCopier(near, far)
    saver = SAVE_MODES.build(mode).build(near, SinglePeer())
    for step in (1, 2, 3):
        saver.save(step, tensors(step), META).wait(30)
        while not any(report.step == step for report in level._reports):
            level._thread.join(0.001)
    saver.close()
    reports = done(level)
    assert [(report.step, report.state, report.tries) for report in reports] == [
        (1, "complete", 1),
        (2, "complete", 1),
        (3, "complete", 1),
    ]
    assert near.steps() == (3,) and far.steps() == (1, 2, 3)  # each keeps what it was told to
    assert all(report.bytes > 0 for report in reports)
    for step in far.steps():
        saved = far.open(step)
        assert saved.index == saved.index and saved.meta == {**META, "step": step}
        for name, tensor in tensors(step).items():
            assert torch.equal(saved.tensor(name), tensor)


def test_files_of_several_ranks_arrive_as_they_were(tmp_path: Path, far: Store) -> None:
    near, whole = Store(tmp_path), torch.randn(9, 4)

    def work(peers: ThreadPeers) -> None:
        checkpoint_levels = CheckpointLevels(peers, [lambda: LevelCopier(near, far)])
        saver = SAVE_MODES.build("snapshot").build(near, peers)
        saver.save(4, {"w": split(whole, 0, 3)[peers.rank], "same": whole}, META)
        saver.close()
        peers.barrier()
        checkpoint_levels.close()

    assert on_ranks(3, work) == [None] * 3
    assert far.open(4).index.raw == near.open(4).index.raw
    assert torch.equal(far.open(4).tensor("w"), whole)


def test_a_place_that_fails_is_tried_again(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Store(tmp_path)
    refuse(far, monkeypatch, 2)
    level = LevelCopier(near, far, tries=3)
    near.save(1, tensors(1), META)
    reports = done(level)
    assert [(one.state, one.tries) for one in reports] == [
        ("retry", 1),
        ("retry", 2),
        ("complete", 3),
    ]
    assert "the server is not well" in reports[0].message and not reports[2].message
    assert far.steps() == (1,) and far.open(1)
    # What the tries have left is gone.
    assert len(far.storage._names()) == 1  # type: ignore[attr-defined]


def test_a_place_that_stays_away_leaves_the_near_one_as_it_is(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Store(tmp_path, keep=2)
    refuse(far, monkeypatch, 1000)
    level = LevelCopier(near, far, tries=2)
    for step in (1, 2, 3):
        near.save(step, tensors(step), META)
    reports = done(level)
    assert [one.state for one in reports if one.step == 3] == ["retry", "failed"]
    assert {one.state for one in reports} <= {"retry", "failed", "skipped"}
    assert far.steps() == ()
    near.save(4, tensors(4), META)  # nothing stays pinned
    assert near.steps() == (3, 4) and near.latest() is not None


class Gate:
    """Holds up uploads until it is opened."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked, self.open = threading.Event(), threading.Event()
        fs = store.storage._fs  # type: ignore[attr-defined]
        real = fs.open

        def open_(path: str, *args: Any, **options: Any) -> Any:
            if path.endswith(".safetensors"):
                self.asked.set()
                assert self.open.wait(30)
            return real(path, *args, **options)

        monkeypatch.setattr(fs, "open", open_)


def test_a_slow_place_gets_the_newest_and_holds_nobody_up(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, gate = Store(tmp_path, keep=1), Gate(far, monkeypatch)
    level = LevelCopier(near, far)
    near.save(1, tensors(1), META)
    assert gate.asked.wait(30)
    for step in (2, 3, 4, 5):  # none of these waits for the place
        near.save(step, tensors(step), META)
        # One is on its way and one waits: these are not deleted.
        assert near.steps() == tuple(sorted({1, step}))
    gate.open.set()
    reports = done(level)
    assert far.steps() == (1, 5)
    assert [one.step for one in reports if one.state == "skipped"] == [2, 3, 4]


def test_every_and_the_last_one(tmp_path: Path, far: Store) -> None:
    near = Store(tmp_path)
    level = LevelCopier(near, far, every=3)
    for step in range(1, 6):
        near.save(step, tensors(step), META)
        while step == 3 and not far.steps():
            level._thread.join(0.001)
    assert [one.step for one in done(level)] == [3, 5]
    assert far.steps() == (3, 5)


def test_giving_up_sends_nothing_more(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, gate = Store(tmp_path), Gate(far, monkeypatch)
    level = LevelCopier(near, far)
    near.save(1, tensors(1), META)
    assert gate.asked.wait(30)
    near.save(2, tensors(2), META)
    level.close(abandon=True)
    gate.open.set()
    level._thread.join(30)
    assert far.steps() == () and not level._thread.is_alive()
    assert [one.state for one in level.reports()] == ["failed"]


def test_what_is_damaged_here_is_not_sent(tmp_path: Path, far: Store) -> None:
    near = Store(tmp_path)
    near.save(1, tensors(1), META)
    file = near.folder(1) / "rank-00000.safetensors"
    flip(file, file.stat().st_size - 1)
    level = LevelCopier(near, far, tries=1)
    level._put(1)
    (report,) = done(level)
    assert report.state == "failed" and "model.b" in report.message and str(file) in report.message
    assert far.steps() == ()


def test_two_runs_may_not_share_a_level(tmp_path: Path, far: Store) -> None:
    def second(peers: ThreadPeers) -> str:
        with pytest.raises(CheckpointError) as refused:
            CheckpointLevels(peers, [lambda: LevelCopier(Store(tmp_path / "b"), far)])
        return str(refused.value)

    first = CheckpointLevels(SinglePeer(), [lambda: LevelCopier(Store(tmp_path / "a"), far)])
    for result in on_ranks(2, second):
        assert "another process is saving here" in result
    first.close()


def test_a_place_that_is_away_at_first_is_taken_up_later(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = far.storage._fs  # type: ignore[attr-defined]

    def away(*args: Any) -> None:
        raise OSError(111, "connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(fs, "pipe_file", away)
        level = LevelCopier(Store(tmp_path), far)
    level.near.save(1, tensors(1), META)
    reports = done(level)
    assert [one.state for one in reports] == ["unreachable", "complete"]
    assert "connection refused" in reports[0].message
    assert far.steps() == (1,)


def test_the_nearest_of_the_newest(tmp_path: Path, far: Store) -> None:
    near = Store(tmp_path)
    assert nearest([near, far]) == (None, [], [])
    near.save(1, tensors(1), META)
    far.save(1, tensors(1), META)
    assert nearest([near, far])[:2] == (1, [0, 1])
    far.save(2, tensors(2), META)
    assert nearest([near, far])[:2] == (2, [1])
    assert nearest([near, far], 1)[:2] == (1, [0, 1])
    assert nearest([near, far], 7)[:2] == (7, [])


def test_a_place_that_does_not_answer(
    tmp_path: Path, far: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = Store(tmp_path)

    def away(*args: Any) -> None:
        raise OSError(111, "connection refused")

    monkeypatch.setattr(far.storage._fs, "find", away)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="cannot be asked for its checkpoints"):
        nearest([near, far])  # it may have one, so the run must not begin anew
    near.save(3, tensors(3), META)
    step, result, silent = nearest([near, far])
    assert (step, result) == (3, [0]) and silent[0].state == "unreachable"


def test_bad_levels() -> None:
    for raw in ({"levels": ["s3://a", "s3://a/"]}, {"path": "x", "levels": [{"path": "x"}]}):
        with pytest.raises(ValueError, match="is given twice; give each level its own place"):
            CheckpointPolicy.model_validate(raw)
    with pytest.raises(ConfigError, match=r"checkpoint\.levels\.tries"):
        LevelCopier(Store("a"), Store("b"), tries=0)

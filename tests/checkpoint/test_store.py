"""The store: round trips, resharding, retention, refusals, full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from old_format import rewrite_as
from stored import META, MODEL, flip, save_on_ranks, split, tensors

from shoal.checkpoint.index import INDEX_NAME, sealed
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.storage import LocalDraft
from shoal.checkpoint.store import Piece, Store
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, ConfigError, CorruptError

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def test_everything_comes_back(tmp_path: Path) -> None:
    given_tensors = {f"model.{d}": (torch.arange(12) % 2).view(3, 4).to(d) for d in DTYPES}
    given_tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4)}
    given_tensors["strided"] = torch.arange(12).view(3, 4).t()
    given_tensors["grad"] = torch.nn.Parameter(torch.randn(3))
    Store(tmp_path).save(100, given_tensors, META)
    saved = Store(tmp_path).open(100)
    assert set(saved.names()) == set(given_tensors)
    for name, tensor in given_tensors.items():
        again = saved.tensor(name)
        assert again.dtype == tensor.dtype and torch.equal(again, tensor.detach())
        assert saved.shape(name) == tuple(tensor.shape)
    assert saved.meta == {**META, "step": 100}
    assert sorted(p.name for p in (tmp_path / "step-00000100").iterdir()) == [
        INDEX_NAME,
        "rank-00000.json",
        "rank-00000.safetensors",
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    Store(tmp_path).save(1, tensors(), META)
    again = load_file(str(tmp_path / "step-00000001" / "rank-00000.safetensors"))
    for name, tensor in tensors().items():
        assert torch.equal(again[name], tensor)


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    Store(tmp_path).save(1, tensors(), META)
    saved = Store(tmp_path).open(1)
    saved.tensor("model.w").zero_()
    assert torch.equal(saved.tensor("model.w"), tensors()["model.w"])
    SavedCheckpoint(Path(saved.path)).verify()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_split_loads_into_any_other(data: st.DataObject, tmp_path_factory: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3), label="shape"))
    dtype = data.draw(st.sampled_from(DTYPES), label="dtype")
    whole = (torch.arange(torch.Size(shape).numel()) % 200).view(shape).to(dtype)
    dim = data.draw(st.integers(0, len(shape) - 1), label="dim")
    world = data.draw(st.sampled_from([1, 2, 4]), label="world")
    replicated = data.draw(st.booleans(), label="replicated")
    pieces = split(whole, dim, world)
    per_rank: list[dict[str, Any]] = [
        {"w": pieces[rank]} if rank < len(pieces) else {} for rank in range(world)
    ]
    if replicated:
        per_rank[-1]["w"] = whole
        per_rank[0].setdefault("w", whole)
    root = tmp_path_factory.mktemp("split")
    assert save_on_ranks(Store(root), 3, per_rank) == [None] * world
    saved = Store(root).open(3)
    offset = tuple(data.draw(st.integers(0, n)) for n in shape)
    size = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))
    box = Box(offset, size)
    expected = whole[box.slices(Box.whole(shape))]
    assert torch.equal(saved.tensor("w", offset, size), expected)
    into = torch.empty(size, dtype=torch.float64)
    saved.read_into("w", into, offset)
    assert torch.equal(into, expected.double())
    assert torch.equal(saved.tensor("w"), whole)


def test_a_rank_writes_several_pieces_of_a_tensor(tmp_path: Path) -> None:
    # Two ranks, each with rows out of the middle of both halves: a fused matrix that was split.
    whole = torch.arange(32.0).view(8, 4)
    twins = torch.tensor([5.0, -5.0, 5.0, -5.0])

    def piece(first: int) -> Piece:
        return Piece(whole[first : first + 2], (8, 4), (first, 0))

    ranks: list[dict[str, Any]] = [
        {
            "model.w": [piece(0), piece(4)],
            "model.w#2": torch.zeros(3),
            "model.t": [Piece(twins[:2], (4,), (0,)), Piece(twins[2:], (4,), (2,))],
        },
        {"model.w": [piece(2), piece(6)], "model.t": []},
    ]
    store = Store(tmp_path)
    assert save_on_ranks(store, 1, ranks) == [None, None]
    saved = store.open(1)
    assert set(saved.names()) == {"model.w", "model.w#2", "model.t"}
    assert torch.equal(saved.tensor("model.w"), whole)
    assert torch.equal(saved.tensor("model.w", offset=(3, 1), shape=(4, 2)), whole[3:7, 1:3])
    assert torch.equal(saved.tensor("model.w#2"), torch.zeros(3))
    # The twins have one checksum and two places; damage in either is found.
    path = tmp_path / "step-00000001" / "rank-00000.safetensors"
    raw = path.read_bytes()
    places = [i for i in range(len(raw)) if raw.startswith(twins[:2].numpy().tobytes(), i)]
    assert len(places) == 2
    for place in places:
        flip(path, place)
        with pytest.raises(CorruptError, match=r"'model\.t' in .*rank-00000"):
            SavedCheckpoint(path.parent).verify()
        flip(path, place)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_older_versions_are_read_and_their_damage_is_found(version: int, tmp_path: Path) -> None:
    store = Store(tmp_path)
    pieces = split(torch.randn(7, 3), 0, 2)
    save_on_ranks(store, 1, [{"cut": pieces[0], **tensors()}, {"cut": pieces[1]}])
    folder = tmp_path / "step-00000001"
    rewrite_as(folder, version)
    assert (b"crc32c" in (folder / INDEX_NAME).read_bytes()) == (version == 3)
    assert len(list(folder.iterdir())) == 3
    result = store.open(1)
    assert result.index.version == version
    for name, tensor in tensors().items():
        assert torch.equal(result.tensor(name), tensor)
    assert torch.equal(result.tensor("cut"), torch.cat([piece.tensor for piece in pieces]))
    flip(folder / "rank-00000.safetensors", -1)
    with pytest.raises(CorruptError, match="CRC32C" if version == 3 else "SHA-256 differs"):
        store.open(1)
    flip(folder / "rank-00000.safetensors", -1)
    flip(folder / "rank-00001.safetensors", 20)  # its header, which is looked at when it is opened
    with pytest.raises(CorruptError, match="rank-00001"):
        store.open(1, verify=False)


def test_one_to_two_to_four_to_one(tmp_path: Path) -> None:
    whole = {"a": torch.randn(9, 4), "b": torch.randn(4, 6).bfloat16()}
    store = Store(tmp_path, keep=9)
    store.save(0, whole, META)
    saved = store.open(0)
    for step, world in enumerate((2, 4, 2, 1), start=1):
        per_rank: list[dict[str, Any]] = [{} for _ in range(world)]
        for name, dim in (("a", 0), ("b", 1)):
            for rank, piece in enumerate(split(whole[name], dim, world)):
                part = saved.tensor(name, piece.offset, tuple(piece.tensor.shape))
                per_rank[rank][name] = Piece(part, piece.global_shape, piece.offset)
        assert save_on_ranks(store, step, per_rank) == [None] * world
        saved = store.open(step)
        assert len(saved.index.files) == world
    for name, tensor in whole.items():
        assert torch.equal(saved.tensor(name), tensor)


def test_another_model_is_refused_by_its_fields(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(), META)
    store.open(1, expect_model={**MODEL, "layers": (1, 2)})
    other = {"hidden": 128, "rope": {"base": 5e5}, "layers": [1, 2], "tied": True}
    with pytest.raises(CheckpointError) as caught:
        store.latest(expect_model=other)
    message = str(caught.value)
    assert "another model" in message and "hidden = 64 there, 128 here" in message
    assert "rope.base = 10000.0 there, 500000.0 here" in message
    assert "tied = absent there, True here" in message and "layers" not in message
    store.save(2, tensors(), {})
    with pytest.raises(CheckpointError, match="does not say which model"):
        store.open(2, expect_model=MODEL)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({"w": Piece(torch.ones(2), (3,), (0,))}, r"no rank has the elements \[2:3\]"),
        ({"w": Piece(torch.ones(2), (3,), (2,))}, "a box of the whole shape"),
        ({"w": Piece(torch.ones(2), (2, 2), (0,))}, "a box of the whole shape"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "dtype = 'torch.complex64'"),
        ({"w": torch.ones(2, device="meta")}, "a dense tensor that has values"),
        ({"w": torch.eye(2).to_sparse()}, "a dense tensor"),
        ({"__metadata__": torch.ones(2)}, "a name of a tensor"),
        (
            {"w": [Piece(torch.ones(2), (4,), (0,)), Piece(torch.ones(2), (5,), (2,))]},
            r"float32 \[5\].*as of its first piece",
        ),
    ],
)
def test_what_cannot_be_stored_is_named(pieces: Any, expected: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(), META)
    with pytest.raises(CheckpointError, match=expected):
        store.save(2, pieces, META)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    store.open(1)


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, torch.ones(1)])
def test_meta_is_plain_data(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="meta of step 2: not plain data"):
        Store(tmp_path).save(2, tensors(), {"x": value})
    assert not list(tmp_path.iterdir())


def test_wrong_questions_have_answers(tmp_path: Path) -> None:
    store = Store(tmp_path / "absent")
    assert store.latest() is None and store.steps() == ()
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are: none"):
        store.open(4)
    store.save(3, tensors(), META)
    with pytest.raises(CheckpointError, match="no checkpoint of step 4; there are: 3"):
        store.open(4)
    saved = store.open(3)
    with pytest.raises(CheckpointError, match=r"no tensor 'model\.v'; did you mean 'model\.w'"):
        saved.tensor("model.v")
    for offset, shape in (((0, 0), (7, 5)), ((6, 5), (1, 0)), ((-1, 0), (1, 1)), ((0,), (1,))):
        with pytest.raises(CheckpointError, match="a box of the whole shape"):
            saved.tensor("model.w", offset, shape)
    with pytest.raises(ConfigError, match="keep = 0"):
        Store(tmp_path, keep=0)
    with pytest.raises(CheckpointError, match="step = -1"):
        store.save(-1, tensors(), META)
    with pytest.raises(CheckpointError, match="barrier = None"):
        store.save(1, tensors(), META, world=2)
    with pytest.raises(CheckpointError, match="rank = 2"):
        store.save(1, tensors(), META, rank=2, world=2)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot be saved"):
        Store(file).save(1, tensors(), META)


def test_a_distributed_tensor_is_not_taken_for_its_local_part(tmp_path: Path) -> None:
    class Distributed(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self.as_subclass(torch.Tensor)

    with pytest.raises(CheckpointError, match=r"the local part .* to_local\(\)"):
        Store(tmp_path).save(1, {"w": torch.ones(2).as_subclass(Distributed)}, META)


def test_ranks_that_disagree_are_named(tmp_path: Path) -> None:
    outcomes = save_on_ranks(Store(tmp_path), 1, [{"w": torch.ones(2)}, {"w": torch.ones(3)}])
    assert "rank 1 gives F32 [3]" in str(outcomes[0])
    assert "another rank failed" in str(outcomes[1])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_failing_rank_fails_all_and_hangs_none(bad: int, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    good = [{f"w{rank}": torch.ones(2)} for rank in range(3)]
    good[bad] = {"w": torch.ones(1, dtype=torch.complex64)}
    for step in (1, 2):  # step 1 would replace what is there
        outcomes = save_on_ranks(store, step, good)
        assert all(isinstance(one, CheckpointError) for one in outcomes)
        assert "complex64" in str(outcomes[bad])
        assert "complex64" in str(outcomes[0]), "rank 0 says it for all"
        others = sum("see its own error" in str(one) for one in outcomes)
        assert others == (2 if bad == 0 else 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    latest = store.latest()
    assert latest is not None and torch.equal(latest.tensor("model.w"), tensors(1)["model.w"])


def test_many_ranks_write_at_once(tmp_path: Path) -> None:
    whole = torch.randn(64, 33)
    per_rank: list[dict[str, Any]] = [{"w": piece} for piece in split(whole, 0, 8)]
    for rank in range(8):
        per_rank[rank][f"only.{rank}"] = torch.full((5,), rank)
    store = Store(tmp_path, keep=2)
    for step in range(4):
        assert save_on_ranks(store, step, per_rank) == [None] * 8
    assert store.steps() == (2, 3)
    saved = store.open(3)
    assert torch.equal(saved.tensor("w"), whole) and len(saved.index.files) == 8
    assert all(torch.equal(saved.tensor(f"only.{r}"), torch.full((5,), r)) for r in range(8))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    store.save(1, tensors(1), META)
    store.save(1, tensors(2), META)
    assert torch.equal(store.open(1).tensor("model.w"), tensors(2)["model.w"])
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_what_was_set_aside_is_found_and_put_back(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=5)
    store.save(1, tensors(1), META)
    os.rename(tmp_path / "step-00000001", tmp_path / ".step-00000001.old")
    (tmp_path / ".step-00000002.tmp").mkdir()
    (tmp_path / ".step-00000002.tmp" / "rank-00000.safetensors").write_bytes(b"half")
    latest = store.latest()
    assert latest is not None and latest.step == 1
    store.save(3, tensors(3), META)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def test_two_processes_do_not_save_into_one_place(tmp_path: Path) -> None:
    import fcntl

    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    (tmp_path / ".step-00000002.tmp").mkdir()  # the other's, half-way
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(CheckpointError, match="another process is saving here"):
            store.save(2, tensors(2), META)
        assert (tmp_path / ".step-00000002.tmp").is_dir()
    finally:
        os.close(fd)
    store.save(2, tensors(2), META)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    keep=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=8),
)
def test_retention_keeps_the_newest_and_always_one_that_loads(
    keep: int, steps: list[tuple[int, bool]], tmp_path_factory: Any
) -> None:
    """Any order of steps, any of them damaged after being saved."""
    root = tmp_path_factory.mktemp("retention")
    store = Store(root, keep=keep)
    for step, damage in steps:
        before = set(store.steps())
        store.save(step, {"w": torch.tensor([step])}, META)
        after = set(store.steps())
        assert step in after and len(after) <= max(keep, 1)
        gone = before - after
        kept_others = after - {step}
        assert not gone or not kept_others or max(gone) < min(kept_others)
        assert len(after) == min(keep, len(before | {step}))
        result = store.latest(on_corrupt=lambda _: None)
        assert result is not None and int(result.tensor("w")) == result.step
        if damage and len(after) > 1:
            flip(root / f"step-{step:08d}" / "rank-00000.safetensors", -1)
            if not any(_loads(store, other) for other in after):
                flip(root / f"step-{step:08d}" / "rank-00000.safetensors", -1)
    shutil.rmtree(root)


def _loads(store: Store, step: int) -> bool:
    try:
        store.open(step)
    except CorruptError:
        return False
    return True


def test_nothing_is_deleted_when_the_new_one_does_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path, keep=1)
    store.save(1, tensors(1), META)
    rename = os.rename

    def rot(source: Any, target: Any) -> None:
        rename(source, target)
        if Path(target).name == "step-00000002":
            flip(Path(target) / "rank-00000.safetensors", -1)

    monkeypatch.setattr(os, "rename", rot)
    with pytest.raises(CorruptError, match=r"step 1 in .* is intact"):
        store.save(2, tensors(2), META)
    assert store.steps() == (1, 2)
    store.open(1)


def test_the_commit_comes_after_everything_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(fd: int) -> None:
        events.append(("fsync", Path(f"/proc/self/fd/{fd}").readlink().name))
        fsync(fd)

    def noted_rename(source: Any, target: Any) -> None:
        events.append(("rename", Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    Store(tmp_path).save(1, tensors(), META)
    commit = events.index(("rename", "step-00000001"))
    before = [name for kind, name in events[:commit] if kind == "fsync"]
    assert "rank-00000.safetensors" in before
    assert any(name.startswith(".index.json.") for name in before)
    assert before[-1] == ".step-00000001.tmp"
    assert events[commit + 1] == ("fsync", tmp_path.name)


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("free_space_lies", [False, True])
def test_a_full_disk_leaves_the_old_one_valid(
    free_space_lies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen beforehand, or met while writing because someone else took the space."""
    with small_disk(tmp_path / "small", "1m") as disk:
        store = Store(disk / "run")
        store.save(1, {"w": torch.ones(100_000)}, META)
        if free_space_lies:
            import collections

            usage = collections.namedtuple("usage", "total used free")
            monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, 2**40))
        with pytest.raises(CheckpointError) as caught:
            store.save(2, {"w": torch.ones(200_000)}, META)
        message = str(caught.value)
        assert str(disk / "run") in message and "disk full while saving step 2" in message
        assert "bytes are needed" in message and "are free" in message
        assert "stay valid: 1" in message
        assert [p.name for p in (disk / "run").iterdir()] == ["step-00000001"]
        latest = store.latest()
        assert latest is not None and torch.equal(latest.tensor("w"), torch.ones(100_000))
        del latest


def test_a_full_disk_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as disk:
        store = Store(disk / "run")
        store.save(1, {"a": torch.ones(10)}, META)
        outcomes = save_on_ranks(store, 2, [{"a": torch.ones(10)}, {"b": torch.ones(300_000)}])
        assert "rank 1 wrote nothing" in str(outcomes[0])
        assert "disk full" in str(outcomes[1])
        assert store.steps() == (1,)


def test_the_index_vouches_for_itself(tmp_path: Path) -> None:
    Store(tmp_path).save(1, tensors(), META)
    raw = (tmp_path / "step-00000001" / INDEX_NAME).read_bytes()
    import json

    table = json.loads(raw)
    del table["sha256"]
    assert sealed(table) == raw


def test_the_cause_of_another_ranks_full_disk_reaches_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalDraft.put

    def put(draft: LocalDraft, name: str, data: bytes) -> None:
        if name.startswith("rank-00001") and data:  # it has room for names alone
            raise OSError(errno.ENOSPC, "No space left on device", name)
        real(draft, name, data)

    monkeypatch.setattr(LocalDraft, "put", put)
    first, second = save_on_ranks(Store(tmp_path), 1, [{"model.a": piece} for piece in PAIR])
    assert "rank 1 wrote nothing: its disk is full" in str(first)
    assert "disk full while saving" in str(second)
    monkeypatch.undo()

    write = Store._write

    def refused(store: Store, draft: LocalDraft, rank: int, *rest: Any) -> str:
        if rank:
            raise OSError(errno.EIO, "Input/output error", "rank-00001.safetensors")
        return write(store, draft, rank, *rest)

    monkeypatch.setattr(Store, "_write", refused)
    first, _ = save_on_ranks(Store(tmp_path), 2, [{"model.a": piece} for piece in PAIR])
    assert "Input/output error" in str(first)


PAIR = split(torch.arange(8.0), 0, 2)

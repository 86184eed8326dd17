"""The store: damaged, forged, torn and newer files are refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from old_format import rewrite_as
from stored import META, flip, save_on_ranks, split, tensors

from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.store import Store
from shoal.core.errors import CheckpointError, CorruptError


@pytest.mark.slow
def test_flipping_any_byte_is_refused_by_name(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    pieces = split(tensors(2)["model.w"], 0, 2)
    others = {name: t for name, t in tensors(2).items() if name != "model.w"}
    save_on_ranks(store, 2, [{"model.w": pieces[0], **others}, {"model.w": pieces[1]}])
    folder = tmp_path / "step-00000002"
    flips = 0
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        for position in range(size) if size < 2000 else range(0, size, 3):
            mask = 1 << (position % 8)
            flip(path, position, mask)
            with pytest.raises(CorruptError, match=path.name) as caught:
                store.open(2)
            assert "step 1 in" in str(caught.value) and "is intact" in str(caught.value)
            flip(path, position, mask)
            flips += 1
    store.open(2)
    record_property("figure", f"{flips} bytes flipped, {flips} refused with the file's name")


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), which=st.integers(0, 2))
def test_any_damage_anywhere_is_refused(
    where: float, mask: int, which: int, tmp_path_factory: Any
) -> None:
    root = tmp_path_factory.getbasetemp() / "damaged"
    store = Store(root)
    if not root.exists():
        store.save(1, tensors(1), META)
        store.save(2, tensors(2), META)
    path = sorted((root / "step-00000002").iterdir())[which]
    position = int(where * path.stat().st_size)
    flip(path, position, mask)
    passed_over: list[CorruptError] = []
    try:
        with pytest.raises(CorruptError, match=path.name):
            store.latest()
        result = store.latest(on_corrupt=passed_over.append)
        assert result is not None and result.step == 1
        assert torch.equal(result.tensor("model.w"), tensors(1)["model.w"])
        assert len(passed_over) == 1 and path.name in str(passed_over[0])
    finally:
        flip(path, position, mask)


def test_damage_is_named_by_tensor_and_found_lazily(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    store.save(2, tensors(2), META)
    path = tmp_path / "step-00000002" / "rank-00000.safetensors"
    flip(path, path.stat().st_size - 1)  # the last tensor is the narrowest: bfloat16
    saved = store.open(2, verify=False)
    assert torch.equal(saved.tensor("model.w"), tensors(2)["model.w"])
    with pytest.raises(CorruptError, match=r"'model\.b' in .*rank-00000.*step 1 in .* is intact"):
        saved.tensor("model.b")
    assert [p for p in saved.problems() if "model.b" in p] == list(saved.problems())


def test_only_intact_steps_are_offered(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, tensors(step), META)
    for step in (2, 3):
        flip(tmp_path / f"step-{step:08d}" / "rank-00000.safetensors", -1)
    with pytest.raises(CorruptError, match="step 1 in"):
        store.open(3)
    flip(tmp_path / "step-00000001" / INDEX_NAME, 100)
    with pytest.raises(CorruptError, match="no earlier step is intact"):
        store.open(3)
    seen: list[CorruptError] = []
    with pytest.raises(CorruptError, match="step-00000001"):
        store.latest(on_corrupt=seen.append)
    assert len(seen) == 2


@pytest.mark.parametrize("keep_bytes", [0, 1, 60, 80, 400, -1])
def test_a_torn_index_is_refused(keep_bytes: int, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, tensors(1), META)
    store.save(2, tensors(2), META)
    path = tmp_path / "step-00000002" / INDEX_NAME
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(CorruptError, match=r"index\.json.*step 1 in"):
        store.open(2)


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00001.safetensors", INDEX_NAME])
def test_a_missing_file_is_refused(name: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_on_ranks(store, 5, [{"a": torch.ones(3)}, {"b": torch.ones(3)}])
    (tmp_path / "step-00000005" / name).unlink()
    with pytest.raises(CorruptError, match=f"{name}: missing"):
        store.open(5)


def test_cut_and_lengthened_files_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(5, tensors(), META)
    path = tmp_path / "step-00000005" / "rank-00000.safetensors"
    raw = path.read_bytes()
    for changed in (raw[:-1], raw + b"x", b""):
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match=r"rank-00000\.safetensors.*bytes where"):
            store.open(5)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change an index and give it a checksum that fits."""
    table = json.loads(path.read_bytes())
    del table["sha256"]
    change(table)
    body = json.dumps(table).encode()[1:]
    lead = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n'
    path.write_bytes(lead + body)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(5, tensors(), META)
    rewrite(tmp_path / "step-00000005" / INDEX_NAME, lambda t: t.update(version=5, extra=1))
    with pytest.raises(
        CheckpointError, match=r"version 5 of the format.*install a newer"
    ) as caught:
        store.latest(on_corrupt=lambda _: None)
    assert not isinstance(caught.value, CorruptError)


def _piece(table: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = table["tensors"]["model.w"]["pieces"][0]
    return result


FORGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a trillion elements": (
        lambda t: t["tensors"]["model.w"].update(shape=[10**6, 10**6]),
        "no rank has",
    ),
    "a trillion elements in one piece": (
        lambda t: (
            t["tensors"]["model.w"].update(shape=[10**12]),
            _piece(t).update(shape=[10**12], offset=[0], bytes=4 * 10**12),
        ),
        "not there as the index says",
    ),
    "a piece that sticks out": (lambda t: _piece(t).update(offset=[1, 0]), "no box"),
    "a path that leaves": (lambda t: _piece(t).update(file="../../etc/passwd"), "not a possible"),
    "a file nobody lists": (
        lambda t: _piece(t).update(file="rank-00009.safetensors"),
        "does not list",
    ),
    "bytes that do not fit": (lambda t: _piece(t).update(bytes=1), "cannot be"),
    "a foreign dtype": (lambda t: t["tensors"]["model.w"].update(dtype="X"), "unknown dtype"),
    "another dtype": (lambda t: t["tensors"]["model.w"].update(dtype="I32"), "not there as"),
    "a changed meta": (lambda t: t["meta"].update(seed=8), "meta has changed since it was written"),
    "a missing key": (lambda t: t.pop("step"), "not a possible index"),
    "another format": (lambda t: t.update(format="zip"), "not the index"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_old_index_is_refused_without_allocating(case: str, tmp_path: Path) -> None:
    change, expected = FORGED[case]
    store = Store(tmp_path)
    store.save(5, tensors(), META)
    rewrite_as(tmp_path / "step-00000005", 3)
    rewrite(tmp_path / "step-00000005" / INDEX_NAME, change)
    with pytest.raises(CorruptError, match=expected):
        store.open(5, verify=False)


def _runs(table: dict[str, Any], run: list[int], **tensor: Any) -> None:
    table["tensors"]["model.w"].update(runs=[run], **tensor)


FORGED_RUNS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a trillion elements": (
        lambda t: _runs(t, [0, 1, 1, 0, 0, 0, 0, 6, 5], shape=[10**6, 10**6]),
        "no rank has",
    ),
    "a trillion boxes": (
        lambda t: _runs(t, [0, 1, 10**12, 0, 0, 1, 0, 1, 5], shape=[10**12, 5]),
        "boxes from owner 0 on",
    ),
    "many boxes of one file": (lambda t: _runs(t, [0, 0, 6, 0, 0, 1, 0, 1, 5]), "boxes from owner"),
    "more elements than can be counted": (
        lambda t: _runs(t, [0, 1, 1, 0, 0, 0, 0, 2**40, 2**40], shape=[2**40, 2**40]),
        "impossible shape",
    ),
    "a number that overflows": (lambda t: _runs(t, [2**70, 1, 1, 0, 0, 0, 0, 6, 5]), "beyond 64"),
    "a piece that sticks out": (lambda t: _runs(t, [0, 1, 1, 1, 0, 0, 0, 6, 5]), "no box"),
    "another rank": (lambda t: _runs(t, [1, 1, 1, 0, 0, 0, 0, 6, 5]), "from owner 1 on"),
    "too few numbers": (lambda t: _runs(t, [0, 1, 1, 0, 0, 6, 5]), "has 9 numbers"),
    "a path that leaves": (
        lambda t: t["files"].update({"../../etc/passwd": t["files"]["rank-00000.safetensors"]}),
        "not a possible",
    ),
    "a file too many": (
        lambda t: t["files"].update(
            {"rank-00009.safetensors": t["files"]["rank-00000.safetensors"]}
        ),
        "not those of 1 ranks",
    ),
    "a foreign dtype": (lambda t: t["tensors"]["model.w"].update(dtype="X"), "unknown dtype"),
    "a changed meta": (lambda t: t["meta"].update(seed=8), "meta has changed since it was written"),
    "a missing key": (lambda t: t.pop("step"), "not a possible index"),
    "another format": (lambda t: t.update(format="zip"), "not the index"),
}


@pytest.mark.parametrize("case", FORGED_RUNS)
def test_a_forged_index_is_refused_without_allocating(case: str, tmp_path: Path) -> None:
    change, expected = FORGED_RUNS[case]
    store = Store(tmp_path)
    store.save(5, tensors(), META)
    rewrite(tmp_path / "step-00000005" / INDEX_NAME, change)
    with pytest.raises(CorruptError, match=expected):
        store.open(5, verify=False)


def _shard(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change a shard and give index and shard checksums that fit."""

    def forge(folder: Path) -> None:
        path = folder / "rank-00000.json"
        table = json.loads(path.read_bytes())
        change(table)
        lines = [f'"{key}": {json.dumps(value)}' for key, value in table.items()]
        path.write_text("{" + ",\n".join(lines) + "}\n")
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        rewrite(
            folder / INDEX_NAME,
            lambda t: t["files"]["rank-00000.safetensors"].update(shard_sha256=sha256),
        )

    return forge


FORGED_SHARDS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another dtype": (lambda t: t["tensors"][0].__setitem__(1, "I32"), "not there as the index"),
    "a tensor of no name": (lambda t: t["pieces"][0].__setitem__(0, 9), "a piece of no tensor"),
    "a place behind the end": (lambda t: t["pieces"][0].__setitem__(1, 10**9), "behind the end"),
    "a box that sticks out": (lambda t: t["pieces"][0].__setitem__(4, 99), "no box of its tensor"),
    "a piece that is missing": (
        lambda t: (t["pieces"].pop(), t["checks"]["crc32c"].pop()),
        "pieces where the index says",
    ),
    "a box that nobody listed": (
        lambda t: t["pieces"][0].__setitem__(4, 1),
        "not there as the index says",
    ),
    "a checksum too few": (lambda t: t["checks"]["crc32c"].pop(), "one checksum for every piece"),
    "another rank's": (lambda t: t["rank"].update(rank=1), "is that of rank 1"),
    "a line too many": (lambda t: t.update(more=1), "5 lines"),
}


@pytest.mark.parametrize("case", FORGED_SHARDS)
def test_a_forged_shard_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, expected = FORGED_SHARDS[case]
    store = Store(tmp_path)
    store.save(5, {"w": torch.ones(6, 5), "z": torch.ones(3)}, META)
    _shard(lambda table: None)(tmp_path / "step-00000005")
    assert torch.equal(store.open(5).tensor("w"), torch.ones(6, 5))
    _shard(change)(tmp_path / "step-00000005")
    with pytest.raises(CorruptError, match=rf"rank-00000\.(json|safetensors).*{expected}"):
        store.open(5, verify=False).tensor("w")


def test_a_shard_that_is_gone_or_damaged_is_named_when_its_file_is_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save_on_ranks(store, 5, [{"a": torch.ones(3)}, {"b": torch.ones(3)}])
    shard = tmp_path / "step-00000005" / "rank-00001.json"
    raw = shard.read_bytes()
    for change in (lambda: flip(shard, 50), shard.unlink):
        change()
        with pytest.raises(CorruptError, match=r"rank-00001\.json"):
            store.open(5)
        saved = store.open(5, verify=False)
        assert torch.equal(saved.tensor("a"), torch.ones(3))  # of another file
        with pytest.raises(CorruptError, match=r"rank-00001\.json"):
            saved.tensor("b")
        shard.write_bytes(raw)
    assert torch.equal(store.open(5).tensor("b"), torch.ones(3))


def test_a_step_without_its_index_is_none(tmp_path: Path) -> None:
    from shoal.checkpoint.levels import nearest
    from shoal.checkpoint.simple import Checkpoints

    store = Store(tmp_path)
    for step in (1, 2):
        store.save(step, tensors(), META)
    (tmp_path / "step-00000002" / INDEX_NAME).unlink()
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.steps() == (1,)
    assert store.unfinished() == (2,)
    # Whoever continues from step 1 hears of it, and asking for it says what is missing.
    step, result, reports = nearest([store])
    assert (step, result) == (1, [0])
    assert [(one.step, one.state) for one in reports] == [(2, "passed_over")]
    with pytest.raises(CorruptError, match=f"{INDEX_NAME}: missing"):
        store.open(2)

"""Loading: plans of reads, exchange between ranks, bytes counted, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import META, flip, save_on_ranks, split, tensors

from shoal.checkpoint.checksum import combined, copy_crc32c, crc32c
from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.store import Piece, Store
from shoal.claims.lab.thread_ranks import ThreadComm, run_ranks
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, CorruptError

WHOLE = {
    "model.w": torch.randn(37, 24, generator=torch.Generator().manual_seed(0)),
    "model.b": torch.arange(19).bfloat16(),
    "model.flag": torch.tensor([True, False, True]),
    "optimizer.count": torch.tensor(7),
    "optimizer.none": torch.empty(0, 4),
}


def want(pieces: list[Piece]) -> list[Piece]:
    """Places of the same boxes, with nothing in them yet."""
    return [Piece(torch.full_like(p.tensor, 1), p.global_shape, p.offset) for p in pieces]


def saved_by(path: Path, ranks: int, dim: int = 0) -> SavedCheckpoint:
    given_by = [
        {
            name: split(x, dim if x.dim() > dim else 0, ranks)[rank : rank + 1]
            if x.dim() and x.numel() > 4
            else ([Piece.whole(x)] if rank == 0 else [])
            for name, x in WHOLE.items()
        }
        for rank in range(ranks)
    ]
    assert save_on_ranks(Store(path), 1, given_by) == [None] * ranks
    return Store(path).open(1, verify=False)


def load_on(
    path: Path, world: int, wanted: Any, **options: Any
) -> list[tuple[LoadReport, dict[str, list[Piece]]]]:
    def rank(comm: ThreadComm) -> tuple[LoadReport, dict[str, list[Piece]]]:
        request = wanted(comm.rank)
        saved = Store(path).open(1, verify=False)
        return load_pieces(saved, request, comm, **options), request

    return run_ranks(world, rank, timeout_s=20)


def same(pieces: list[Piece], whole: torch.Tensor) -> bool:
    return all(
        torch.equal(p.tensor, whole[p.box.slices(Box.whole(tuple(whole.shape)))]) for p in pieces
    )


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("saved", "loading"), [(1, 1), (1, 3), (3, 1), (3, 2), (2, 4)])
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, saved: int, loading: int, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.loading.READ_BYTES", 512)
    saved_by(tmp_path, saved)

    def wanted(rank: int) -> dict[str, list[Piece]]:
        # Rows of one tensor, columns of another, copies of the rest.
        return {
            "model.w": want(split(WHOLE["model.w"], 1, loading)[rank : rank + 1]),
            "model.b": want(split(WHOLE["model.b"], 0, loading)[rank : rank + 1]),
            **{
                name: want([Piece.whole(WHOLE[name])])
                for name in ("model.flag", "optimizer.count", "optimizer.none")
            },
        }

    for _, result in load_on(tmp_path, loading, wanted, verify=verify):
        for name, pieces in result.items():
            assert same(pieces, WHOLE[name]), name


def test_copies_are_read_once_and_in_equal_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.loading.READ_BYTES", 256)
    saved_by(tmp_path, 2)
    size = sum(x.nbytes for x in WHOLE.values())

    def wanted(rank: int) -> dict[str, list[Piece]]:
        return {name: want([Piece.whole(x)]) for name, x in WHOLE.items()}

    result = load_on(tmp_path, 4, wanted)
    read = [report.read_bytes for report, _ in result]
    assert size <= sum(read) <= 1.01 * size
    assert max(read) - min(read) <= 256
    assert all(report.wanted_bytes == size for report, _ in result)
    assert sum(report.sent_bytes for report, _ in result) == 3 * size
    # Alone, every rank reads everything.
    alone = [load_pieces(Store(tmp_path).open(1), wanted(rank)).read_bytes for rank in range(4)]
    assert sum(alone) == 4 * size


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("read_bytes", [64, 2**23])
def test_a_flipped_bit_is_found_whoever_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, read_bytes: int
) -> None:
    monkeypatch.setattr("shoal.checkpoint.loading.READ_BYTES", read_bytes)
    saved = saved_by(tmp_path, 1)
    piece = saved.pieces("model.w")[0]
    file = tmp_path / "step-00000001" / piece.file
    flip(file, saved.place("model.w", piece) + 1000)

    def wanted(rank: int) -> dict[str, list[Piece]]:
        return {"model.w": want(split(WHOLE["model.w"], 0, world)[rank : rank + 1])}

    with pytest.raises(CorruptError, match=r"model\.w.*rank-00000.*CRC32C differs"):
        load_on(tmp_path, world, wanted)
    (report, _), *_ = load_on(tmp_path, world, wanted, verify=False)
    assert report.read_bytes


@pytest.mark.parametrize("world", [1, 2])
def test_wrong_wishes_are_refused_on_every_rank(tmp_path: Path, world: int) -> None:
    saved_by(tmp_path, 1)
    w = WHOLE["model.w"]
    cases: list[tuple[dict[str, list[Piece]], str]] = [
        ({"model.v": [Piece.whole(w)]}, "holds no tensor 'model.v'.*model.w"),
        ({"model.w": [Piece.whole(w[:4])]}, r"has shape \[37, 24\], and \[4, 24\] is wanted"),
        ({"model.w": [Piece(w, (37, 24), (1, 0))]}, "no box of shape"),
        ({"model.w": [Piece.whole(w.double())]}, "is float32, .* float64; give cast=True"),
    ]
    for wrong, message in cases:
        with pytest.raises(CheckpointError, match=message):
            # Only the last rank asks for what is not there; the others are told.
            load_on(tmp_path, world, lambda r, wrong=wrong: wrong if r == world - 1 else {})
    places = {"model.w": [Piece.whole(torch.zeros(37, 24, dtype=torch.float64))]}
    load_on(tmp_path, 1, lambda rank: places, cast=True)
    assert torch.equal(places["model.w"][0].tensor, w.double())


def test_a_file_that_vanishes_is_told_by_every_rank(tmp_path: Path) -> None:
    saved_by(tmp_path, 1)

    def rank(comm: ThreadComm) -> str:
        saved = Store(tmp_path).open(1, verify=False)
        comm.barrier()
        if comm.rank == 0:
            (tmp_path / "step-00000001" / "rank-00000.safetensors").unlink()
        comm.barrier()
        wanted = {"model.w": want(split(WHOLE["model.w"], 0, 2)[comm.rank : comm.rank + 1])}
        with pytest.raises(CheckpointError, match=r"rank-00000.*missing"):
            load_pieces(saved, wanted, comm)
        return "told"

    assert run_ranks(2, rank, timeout_s=20) == ["told", "told"]


@settings(max_examples=50, deadline=None)
@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_checksums_of_halves_make_that_of_the_whole(first: bytes, second: bytes) -> None:
    def of(data: bytes) -> int:
        return crc32c(np.frombuffer(data, dtype=np.uint8))

    assert combined(of(first), of(second), len(second)) == of(first + second)
    out = np.zeros(len(second) + 1, dtype=np.uint8)
    data = np.frombuffer(second, dtype=np.uint8)
    assert copy_crc32c(out[1:], data, of(first)) == of(first + second)
    assert out.tobytes() == b"\0" + second
    assert of(b"123456789") == 0xE3069283


def test_what_was_loaded_is_not_hashed_again(tmp_path: Path) -> None:
    Store(tmp_path).save(1, tensors(), META)
    saved = Store(tmp_path).open(1, verify=False)
    places = {"model.w": [Piece.whole(torch.empty(6, 5))]}
    load_pieces(saved, places)
    piece = saved.pieces("model.w")[0]
    flip(tmp_path / "step-00000001" / piece.file, saved.place("model.w", piece))
    assert saved.intact("model.w", piece)


def drawn(data: st.DataObject, whole: torch.Tensor, ranks: int) -> list[list[Piece]]:
    """A tensor as some ranks hold it: in parts of a dimension, of a flat buffer, or as copies."""
    how = data.draw(st.sampled_from(["copies", "flat", *range(whole.dim())]))
    if how == "copies":
        return [[Piece.whole(whole)]] * ranks
    if how == "flat":
        cuts = sorted(data.draw(st.integers(0, whole.numel())) for _ in range(ranks - 1))
        edges = [0, *cuts, whole.numel()]
        flat = whole.reshape(-1)
        shape = tuple(whole.shape)
        return [list(Piece.flat(flat[a:b], shape, a)) for a, b in itertools.pairwise(edges)]
    assert isinstance(how, int)
    parts = split(whole, how, ranks)
    return [parts[rank : rank + 1] for rank in range(ranks)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_two_hundred_pairs_of_layouts(data: st.DataObject, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("pairs")
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    whole = {
        name: torch.arange(np.prod(shape)).reshape(shape).to(data.draw(dtypes))
        for name in ("a", "b")
        for shape in [data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))]
    }
    world = data.draw(st.integers(1, 4))
    held = {name: drawn(data, tensor, world) for name, tensor in whole.items()}
    per_rank: list[dict[str, Any]] = [
        {name: parts[rank] for name, parts in held.items()} for rank in range(world)
    ]
    assert save_on_ranks(Store(path), 1, per_rank) == [None] * world
    other = data.draw(st.integers(1, 4))
    taken = {name: drawn(data, tensor, other) for name, tensor in whole.items()}
    verify, read_bytes = data.draw(st.booleans()), data.draw(st.sampled_from([16, 100, 2**23]))

    def wanted(rank: int) -> dict[str, list[Piece]]:
        return {name: want(parts[rank]) for name, parts in taken.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.checkpoint.loading.READ_BYTES", read_bytes)
        for _, result in load_on(path, other, wanted, verify=verify):
            assert all(same(pieces, whole[name]) for name, pieces in result.items())


def test_another_step_of_the_same_layout_is_read_by_the_same_plan(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = torch.randn(12, 5), torch.randn(12, 5)
    for step, whole in ((1, first), (2, second), (3, second)):
        held: list[dict[str, Any]] = [{"w": piece} for piece in split(whole, 0, 3)]
        assert save_on_ranks(store, step, held) == [None] * 3

    def load(step: int, ranks: int, dim: int = 0) -> list[tuple[bool, torch.Tensor]]:
        def rank(comm: ThreadComm) -> tuple[bool, torch.Tensor]:
            pieces = want(split(first, dim, ranks)[comm.rank : comm.rank + 1])
            report = load_pieces(Store(tmp_path).open(step, verify=False), {"w": pieces}, comm)
            return report.fresh_plan, pieces[0].tensor

        return run_ranks(ranks, rank, timeout_s=20)

    for step, whole, fresh in ((1, first, True), (2, second, False), (1, first, False)):
        loaded = load(step, 2)
        assert [one for one, _ in loaded] == [fresh] * 2
        assert torch.equal(torch.cat([tensor for _, tensor in loaded]), whole)
    assert all(fresh for fresh, _ in load(2, 2, dim=1))  # other wishes
    assert all(fresh for fresh, _ in load(2, 3))  # other ranks
    # A plan says nothing of what lies in the files.
    folder = tmp_path / "step-00000003"
    flip(folder / "rank-00001.safetensors", -1)
    with pytest.raises(CorruptError, match=r"'w' in .*rank-00001"):
        load(3, 2)
    flip(folder / "rank-00001.safetensors", -1)
    flip(folder / "rank-00001.json", 100)
    with pytest.raises(CorruptError, match=r"rank-00001\.json"):
        load(3, 2)


def test_a_damaged_shard_is_told_by_every_rank(tmp_path: Path) -> None:
    saved_by(tmp_path, 3)
    flip(tmp_path / "step-00000001" / "rank-00002.json", 100)
    w = WHOLE["model.w"]

    def rank(comm: ThreadComm) -> str:
        # Only the last rank wants something of the file; the others must not wait for it.
        pieces = want(split(w, 0, 3)[comm.rank : comm.rank + 1])
        with pytest.raises(CorruptError, match=r"rank-00002\.json.*SHA-256 differs"):
            load_pieces(Store(tmp_path).open(1, verify=False), {"model.w": pieces}, comm)
        return "told"

    assert run_ranks(3, rank, timeout_s=20) == ["told"] * 3

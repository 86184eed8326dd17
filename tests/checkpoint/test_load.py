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
from shoal.checkpoint.index import Index, StoredFile, StoredPiece, Tensor, digest
from shoal.checkpoint.loading import LoadReport, load_pieces
from shoal.checkpoint.reads import Wish, plan_reads
from shoal.checkpoint.saved import Saved
from shoal.checkpoint.store import Piece, Store
from shoal.core.boxes import Box, uncovered
from shoal.core.errors import CheckpointError, CorruptError
from shoal.parallel.thread_comm import ThreadComm, run_ranks

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


def saved_by(path: Path, ranks: int, dim: int = 0) -> Saved:
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
        asked = wanted(comm.rank)
        saved = Store(path).open(1, verify=False)
        return load_pieces(saved, asked, comm, **options), asked

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

    for _, found in load_on(tmp_path, loading, wanted, verify=verify):
        for name, pieces in found.items():
            assert same(pieces, WHOLE[name]), name


def test_copies_are_read_once_and_in_equal_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.checkpoint.loading.READ_BYTES", 256)
    saved_by(tmp_path, 2)
    size = sum(x.nbytes for x in WHOLE.values())

    def wanted(rank: int) -> dict[str, list[Piece]]:
        return {name: want([Piece.whole(x)]) for name, x in WHOLE.items()}

    found = load_on(tmp_path, 4, wanted)
    read = [report.read_bytes for report, _ in found]
    assert size <= sum(read) <= 1.01 * size
    assert max(read) - min(read) <= 256
    assert all(report.wanted_bytes == size for report, _ in found)
    assert sum(report.sent_bytes for report, _ in found) == 3 * size
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
    piece = saved.index.tensors["model.w"].pieces[0]
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
        with pytest.raises(CheckpointError, match=r"rank-00000.*cannot be read"):
            load_pieces(saved, wanted, comm)
        return "told"

    assert run_ranks(2, rank, timeout_s=20) == ["told", "told"]


def indexed(shape: tuple[int, ...], pieces: list[Box]) -> Index:
    stored = tuple(
        StoredPiece(
            file="rank-00000.safetensors",
            offset=box.offset,
            shape=box.shape,
            bytes=4 * box.volume,
            crc32c=0,
            key=f"w#{number}",
        )
        for number, box in enumerate(pieces)
    )
    return Index(
        step=1,
        world=1,
        meta={},
        meta_sha256=digest({}),
        files={"rank-00000.safetensors": StoredFile(bytes=10**6, header_sha256="0" * 64)},
        tensors={"w": Tensor(dtype="F32", shape=shape, pieces=stored)},
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cuts_tile_every_wish(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    parts = data.draw(st.integers(1, 3))
    edges = [min(shape[0], round(n * shape[0] / parts)) for n in range(parts + 1)]
    boxes = [
        Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))
        for low, high in itertools.pairwise(edges)
        if high > low
    ]
    index = indexed(shape, boxes)
    starts: dict[str, int] = {}
    at = 64
    for piece in index.tensors["w"].pieces:
        starts[str(piece.key)] = at
        at += piece.bytes

    def wish() -> Wish:
        low = [data.draw(st.integers(0, n - 1)) for n in shape]
        high = [data.draw(st.integers(a + 1, n)) for a, n in zip(low, shape, strict=True)]
        return Wish("w", tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    wishes = [[wish() for _ in range(data.draw(st.integers(0, 2)))] for _ in range(3)]
    plan = plan_reads(
        index,
        lambda name, piece: starts[str(piece.key)],
        wishes,
        whole=data.draw(st.booleans()),
        read_bytes=data.draw(st.sampled_from([8, 40, 10**6])),
        gap_bytes=data.draw(st.sampled_from([0, 16, 10**6])),
    )
    reads = [read for own in plan.rounds for read in own]
    spans = sorted((read.start, read.stop) for read in reads)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for rank, own in enumerate(wishes):
        cuts = [cut for read in reads for cut in plan.cuts(read, rank)]
        for number, one in enumerate(own):
            mine = [cut.common for cut in cuts if cut.wish == number]
            assert not uncovered(one.box, mine)
            assert sum(box.volume for box in mine) == one.box.volume


def test_rows_far_apart_are_read_by_themselves_and_near_ones_together() -> None:
    index = indexed((100, 1000), [Box.whole((100, 1000))])
    column = [[Wish("w", (0, 0), (100, 10))]]
    apart = plan_reads(index, lambda *_: 0, column, whole=False, gap_bytes=1000)
    assert (len(apart.rounds[0]), apart.bytes_of(0)) == (100, 4000)
    near = plan_reads(index, lambda *_: 0, column, whole=False, gap_bytes=4000)
    assert (len(near.rounds[0]), near.bytes_of(0)) == (1, 4 * (99 * 1000 + 10))
    rows = [[Wish("w", (10, 0), (5, 1000)), Wish("w", (15, 0), (2, 1000))]]
    together = plan_reads(index, lambda *_: 0, rows, whole=False)
    assert (len(together.rounds[0]), together.bytes_of(0)) == (1, 28_000)


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
    piece = saved.index.tensors["model.w"].pieces[0]
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
        for _, found in load_on(path, other, wanted, verify=verify):
            assert all(same(pieces, whole[name]) for name, pieces in found.items())

"""Checkpoints as versions 1 to 3 wrote them, and reads as they were planned for all ranks."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.checkpoint.image import bytes_of
from shoal.checkpoint.index import INDEX_NAME, CheckpointIndex, digest, sealed
from shoal.checkpoint.reads import BoxRequest, FileRead, ReadSegment, _grouped, _needed, _runs
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.shards import shard_name
from shoal.core.boxes import Box
from shoal.core.safetensors_header import ITEM_BYTES


def rewrite_as(folder: Path, version: int) -> None:
    """Make an index of an old version of a checkpoint; its shards are removed."""
    saved = SavedCheckpoint(folder)
    tensors: dict[str, Any] = {}
    for name in saved.names():
        pieces = []
        for piece in saved.pieces(name):
            entry = piece.model_dump(exclude_none=True)
            if version < 3:
                del entry["crc32c"]
                values = saved.tensor(name, piece.offset, piece.shape)
                entry["sha256"] = hashlib.sha256(bytes_of(values).data).hexdigest()
            pieces.append(entry)
        one = saved.index.tensors[name]
        tensors[name] = {"dtype": one.dtype, "shape": one.shape, "pieces": pieces}
    table = {
        "format": "shoal-checkpoint",
        "version": version,
        "step": saved.step,
        "world": saved.index.world,
        "meta": saved.meta,
        "meta_sha256": digest(saved.meta),
        "files": {
            name: file.model_dump(exclude={"shard_sha256"})
            for name, file in saved.index.files.items()
        },
        "tensors": tensors,
    }
    for rank in range(saved.index.world):
        (folder / shard_name(rank)).unlink()
    (folder / INDEX_NAME).write_bytes(sealed(table))


def planned_with_all(
    index: CheckpointIndex,
    wishes: Sequence[Sequence[BoxRequest]],
    *,
    whole: bool,
    read_bytes: int,
    gap_bytes: int,
) -> list[list[FileRead]]:
    """Rank -> its reads, as every rank planned them for all before plans were local."""
    wanted: dict[str, list[tuple[Box, int]]] = {}
    for rank, own in enumerate(wishes):
        for wish in own:
            if wish.box.volume:
                wanted.setdefault(wish.name, []).append((wish.box, rank))
    segments: dict[str, list[ReadSegment]] = {}
    for name, boxes in wanted.items():
        entry = index.tensors[name]
        item = ITEM_BYTES[entry.dtype]
        distinct = sorted({box for box, _ in boxes}, key=lambda box: (box.offset, box.shape))
        pieces = sorted(entry.runs.owned(), key=lambda one: one.owner)
        for (owner, piece), parts in _needed(pieces, distinct):
            file = f"rank-{owner:05d}.safetensors"
            runs = [(0, piece.volume)] if whole else _runs(piece, parts, gap_bytes // item)
            _, number, start = index.stored(name, file, piece)
            segments.setdefault(file, []).extend(
                ReadSegment(name, number, piece, item, first, last, start + first * item)
                for first, last in runs
            )
    reads: list[FileRead] = []
    for file in sorted(segments):
        ordered = sorted(segments[file], key=lambda segment: segment.start)
        for group in _grouped(ordered, read_bytes, gap_bytes):
            reads.append(FileRead(file, group, _takers(group, wanted)))
    return _dealt(reads, wanted, len(wishes))


def _takers(
    segments: Sequence[ReadSegment], wanted: Mapping[str, Sequence[tuple[Box, int]]]
) -> tuple[int, ...]:
    return tuple(
        sorted(
            {
                rank
                for segment in segments
                for (_, box), (wish, rank) in itertools.product(
                    segment.boxes(), wanted[segment.name]
                )
                if box.intersect(wish)
            }
        )
    )


def _dealt(
    reads: Sequence[FileRead], wanted: Mapping[str, Sequence[tuple[Box, int]]], world: int
) -> list[list[FileRead]]:
    load = [0] * world
    taken: list[list[int]] = [[] for _ in range(world)]
    able = [
        list(read.ranks)
        or sorted(
            {
                rank
                for segment in read.segments
                for box, rank in wanted[segment.name]
                if box.intersect(segment.piece)
            }
        )
        for read in reads
    ]
    order = sorted(
        range(len(reads)),
        key=lambda n: (len(able[n]) > 1, reads[n].start - reads[n].stop, n),
    )
    for number in order:
        rank = min(able[number], key=lambda r: (load[r], r))
        load[rank] += reads[number].stop - reads[number].start
        taken[rank].append(number)
    return [[reads[number] for number in sorted(numbers)] for numbers in taken]

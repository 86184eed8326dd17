"""Who reads what: every needed byte is read once, in large pieces, by one of those who want it.

Wanted boxes are intersected with stored ones. What lies close together in a file becomes one read,
long reads are cut, and each read is given to the rank that has least to read so far of those that
want some of it (worst fit, decreasing). Every rank comes to the same plan from the same wishes.

A checksum is over a whole stored piece, so pieces are read whole where they are verified. Where
they are not, rows that lie far apart are read by themselves, and near ones with what is between.

Source: Wan et al., ByteCheckpoint, 2024, sections 3.3 (load-time resharding) and 4.1 (redundant
reads eliminated).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.checkpoint.index import Index, StoredPiece
from shoal.core.boxes import Box, flat_boxes
from shoal.core.safetensors_header import ITEM_BYTES

__all__ = ["GAP_BYTES", "READ_BYTES", "Cut", "Read", "ReadPlan", "Segment", "Wish", "plan_reads"]

READ_BYTES = 2**23
"""Most bytes of one read: a disk's full rate, and still short enough to overlap."""

GAP_BYTES = 2**18
"""Bytes that nobody wants are read where there are fewer in between: about what a disk
delivers in the time that one more read takes to begin."""


class Wish(NamedTuple):
    """A box of a tensor that a rank wants.

    Args:
        name: of the tensor.
        offset: where it begins.
        shape: its size.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements of a stored piece that lie one after the other in a read.

    Args:
        name: of the tensor.
        piece: which of its pieces.
        item: bytes of an element.
        first: number of the first element in the piece, counted row by row.
        last: one past the last.
        start: where they begin in the file.
    """

    name: str
    piece: StoredPiece
    item: int
    first: int
    last: int
    start: int

    @property
    def stop(self) -> int:
        """One past the last byte in the file."""
        return self.start + (self.last - self.first) * self.item

    @property
    def whole(self) -> bool:
        """Whether these are all elements of the piece."""
        return self.stop - self.start == self.piece.bytes

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Byte in the file -> box of the whole tensor that is contiguous from there on."""
        at = self.start
        for box in flat_boxes(self.piece.shape, self.first, self.last):
            offset = tuple(a + b for a, b in zip(self.piece.offset, box.offset, strict=True))
            yield at, Box(offset, box.shape)
            at += box.volume * self.item


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a file.

    Args:
        file: its name.
        segments: what is used of it, in the order of the file.
        ranks: who takes some of it.
    """

    file: str
    segments: tuple[Segment, ...]
    ranks: tuple[int, ...]

    @property
    def start(self) -> int:
        """First byte."""
        return self.segments[0].start

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.segments[-1].stop


class Cut(NamedTuple):
    """What a rank takes out of a read.

    Args:
        wish: number of the wish among the rank's.
        name: of the tensor.
        at: byte in the file where ``box`` begins.
        box: contiguous in the file.
        common: what the wish and it have in common.
    """

    wish: int
    name: str
    at: int
    box: Box
    common: Box


class ReadPlan:
    """What all ranks read and take.

    Args:
        rounds: of each rank the reads it does, in their order.
        wishes: of each rank.
    """

    def __init__(self, rounds: Sequence[Sequence[Read]], wishes: Sequence[Sequence[Wish]]) -> None:
        self.rounds = tuple(tuple(reads) for reads in rounds)
        self.count = max((len(reads) for reads in self.rounds), default=0)
        self._wishes = [_by_name(own) for own in wishes]
        self._numbered = wishes

    def read(self, rank: int, number: int) -> Read | None:
        """The read of a rank in a round; None if it has no more."""
        own = self.rounds[rank]
        return own[number] if number < len(own) else None

    def wish(self, rank: int, number: int) -> Wish:
        """A wish of a rank."""
        return self._numbered[rank][number]

    def cuts(self, read: Read, rank: int) -> list[Cut]:
        """What a rank takes out of a read, in an order that both ends know."""
        if rank not in read.ranks:
            return []
        return [cut for segment in read.segments for cut in self.cuts_of(segment, rank)]

    def cuts_of(self, segment: Segment, rank: int) -> list[Cut]:
        """What a rank takes out of a segment, in the order of the file."""
        return [
            Cut(number, segment.name, at, box, common)
            for at, box in segment.boxes()
            for number, wish in self._wishes[rank].get(segment.name, ())
            for common in (box.intersect(wish),)
            if common is not None
        ]

    def bytes_of(self, rank: int) -> int:
        """Bytes that a rank reads."""
        return sum(read.stop - read.start for read in self.rounds[rank])


def plan_reads(
    index: Index,
    place: Callable[[str, StoredPiece], int],
    wishes: Sequence[Sequence[Wish]],
    *,
    whole: bool = True,
    read_bytes: int = READ_BYTES,
    gap_bytes: int = GAP_BYTES,
) -> ReadPlan:
    """What every rank reads.

    Args:
        index: of the checkpoint.
        place: name of a tensor and a piece of it -> where the piece begins in its file.
        wishes: of every rank; boxes of tensors that are there.
        whole: read pieces whole, so that they can be verified.
        read_bytes: most bytes of a read.
        gap_bytes: what is read along, so as not to begin another read.
    """
    wanted: dict[str, list[tuple[Box, int]]] = {}
    for rank, own in enumerate(wishes):
        for wish in own:
            if wish.box.volume:
                wanted.setdefault(wish.name, []).append((wish.box, rank))
    segments: dict[str, list[Segment]] = {}
    for name, boxes in wanted.items():
        entry = index.tensors[name]
        item = ITEM_BYTES[entry.dtype]
        distinct = sorted({box for box, _ in boxes}, key=lambda box: (box.offset, box.shape))
        for piece, parts in _needed(entry.pieces, distinct):
            volume = piece.box.volume
            runs = [(0, volume)] if whole else _runs(piece, parts, gap_bytes // item)
            start = place(name, piece)
            segments.setdefault(piece.file, []).extend(
                Segment(name, piece, item, first, last, start + first * item)
                for first, last in runs
            )
    reads: list[Read] = []
    for file in sorted(segments):
        ordered = sorted(segments[file], key=lambda segment: segment.start)
        for group in _grouped(ordered, read_bytes, gap_bytes):
            reads.append(Read(file, group, _takers(group, wanted)))
    return ReadPlan(_shared(reads, wanted, len(wishes)), wishes)


def _by_name(wishes: Sequence[Wish]) -> dict[str, list[tuple[int, Box]]]:
    found: dict[str, list[tuple[int, Box]]] = {}
    for number, wish in enumerate(wishes):
        found.setdefault(wish.name, []).append((number, wish.box))
    return found


def _needed(
    pieces: Sequence[StoredPiece], boxes: Sequence[Box]
) -> Iterator[tuple[StoredPiece, list[Box]]]:
    """Pieces that are read, and what of each; of copies of the same elements the first."""
    if len(pieces) == 1:  # it is the whole tensor
        yield pieces[0], list(boxes)
        return
    ordered = sorted(pieces, key=lambda piece: piece.offset)
    starts = [piece.offset[:1] for piece in ordered]
    # Before this one none reaches so far: the widest piece says how far back one has to look.
    widest = max((piece.shape[0] for piece in ordered if piece.shape), default=0)
    taken: dict[int, list[Box]] = {}
    for box in boxes:
        left = [box]
        low = bisect.bisect_left(starts, tuple(n - widest for n in box.offset[:1]))
        high = bisect.bisect_left(starts, box.stop[:1]) if box.shape else len(ordered)
        # What is read anyhow comes first.
        for number in sorted(range(low, high), key=lambda n: (n not in taken, n)):
            piece = ordered[number].box
            common = [c for part in left if (c := part.intersect(piece)) is not None]
            if common:
                taken.setdefault(number, []).extend(common)
                left = [rest for part in left for rest in part.subtract(piece)]
            if not left:
                break
        # The index was checked to cover every tensor.
        assert not left
    for number in sorted(taken):
        yield ordered[number], taken[number]


def _runs(piece: StoredPiece, parts: Iterable[Box], gap: int) -> list[tuple[int, int]]:
    """Runs of elements of a piece that hold the parts, with gaps of more than ``gap``."""
    strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
    found: list[tuple[int, int]] = []
    for part in parts:
        common = part.intersect(piece.box)
        if common is None:
            continue
        low = [a - b for a, b in zip(common.offset, piece.offset, strict=True)]
        run, dim = 1, len(strides)
        # Inwards out: as long as the next row is near, it is read together with this one.
        while dim and (strides[dim - 1] - run <= gap or common.shape[dim - 1] == 1):
            dim -= 1
            run += strides[dim] * (common.shape[dim] - 1)
        inner = sum(a * b for a, b in zip(low[dim:], strides[dim:], strict=True))
        outer = zip(low[:dim], common.shape[:dim], strict=True)
        for row in itertools.product(*(range(a, a + n) for a, n in outer)):
            first = inner + sum(a * b for a, b in zip(row, strides[:dim], strict=True))
            found.append((first, first + run))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(found):
        if merged and first - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _grouped(
    segments: Sequence[Segment], read_bytes: int, gap_bytes: int
) -> Iterator[tuple[Segment, ...]]:
    """Segments of a file that are read together; long ones are cut."""
    group: list[Segment] = []
    for segment in segments:
        first = segment.first
        while first < segment.last:
            start = segment.start + (first - segment.first) * segment.item
            if group and (
                start - group[-1].stop > gap_bytes
                or start + segment.item - group[0].start > read_bytes
            ):
                yield tuple(group)
                group = []
            room = read_bytes - (start - group[0].start if group else 0)
            last = min(segment.last, first + max(1, room // segment.item))
            group.append(Segment(segment.name, segment.piece, segment.item, first, last, start))
            first = last
    if group:
        yield tuple(group)


def _takers(
    segments: Sequence[Segment], wanted: Mapping[str, Sequence[tuple[Box, int]]]
) -> tuple[int, ...]:
    """The ranks that take some of these segments."""
    found: set[int] = set()
    for segment in segments:
        boxes = [box for _, box in segment.boxes()]
        for wish, rank in wanted[segment.name]:
            if rank not in found and any(box.intersect(wish) for box in boxes):
                found.add(rank)
    return tuple(sorted(found))


def _shared(
    reads: Sequence[Read], wanted: Mapping[str, Sequence[tuple[Box, int]]], world: int
) -> list[list[Read]]:
    """Rank -> its reads, in the order of the files."""
    load = [0] * world
    taken: list[list[int]] = [[] for _ in range(world)]

    def readers(read: Read) -> list[int]:
        # What is read for its checksum alone is read by those who want its piece.
        return list(read.ranks) or sorted(
            {
                rank
                for segment in read.segments
                for box, rank in wanted[segment.name]
                if box.intersect(segment.piece.box)
            }
        )

    able = [readers(read) for read in reads]
    # Reads that one rank alone wants leave no choice, so they come first; then the longest.
    order = sorted(
        range(len(reads)),
        key=lambda n: (len(able[n]) > 1, reads[n].start - reads[n].stop, n),
    )
    for number in order:
        rank = min(able[number], key=lambda r: (load[r], r))
        load[rank] += reads[number].stop - reads[number].start
        taken[rank].append(number)
    return [[reads[number] for number in sorted(numbers)] for numbers in taken]

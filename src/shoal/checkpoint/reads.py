"""Who reads what: every needed byte is read once, in large pieces, by one of those who want it.

Wanted boxes are intersected with stored ones. What lies close together in a file becomes one read,
long reads are cut, and each read is given to one of the ranks that want some of it: among ranks
that share the same files to the one that has least to read of them so far (worst fit, decreasing).

A rank plans the files that it wants something of, for all ranks that do, and no others; so ranks
that share a file come to the same plan of it, and the work follows a rank's own part. What all
ranks want is known as runs (:mod:`~shoal.checkpoint.runs`), which are small.

A checksum is over a whole stored piece, so pieces are read whole where they are verified. Where
they are not, rows that lie far apart are read by themselves, and near ones with what is between.

Source: Wan et al., ByteCheckpoint, 2024, sections 3.3 (load-time resharding) and 4.1 (redundant
reads eliminated).
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.checkpoint.index import CheckpointIndex
from shoal.checkpoint.runs import BoxRuns, OwnedBox
from shoal.checkpoint.shards import file_name, rank_of
from shoal.core.boxes import Box, flat_boxes
from shoal.core.safetensors_header import ITEM_BYTES

READ_BYTES = 2**23
"""Most bytes of one read: a disk's full rate, and still short enough to overlap."""

GAP_BYTES = 2**18
"""Bytes that no rank wants are read where there are fewer in between: about what a disk
delivers in the time that one more read takes to begin."""


Wants = Mapping[str, BoxRuns]
"""Name of a tensor -> the boxes of it that ranks want, by rank."""


class BoxRequest(NamedTuple):
    """A box of a tensor that a rank wants."""

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box of the whole tensor."""
        return Box(self.offset, self.shape)


class ReadSegment(NamedTuple):
    """Elements of a stored piece that lie one after the other in a read.

    Args:
        number: of the piece in its file.
        piece: the box of the whole tensor that the piece holds.
        item: bytes of an element.
        first: number of the first element in the piece, counted row by row.
        last: one past the last.
        start: where they begin in the file.
    """

    name: str
    number: int
    piece: Box
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
        return self.last - self.first == self.piece.volume

    def boxes(self) -> Iterator[tuple[int, Box]]:
        """Byte in the file -> box of the whole tensor that is contiguous from there on."""
        if self.whole:
            yield self.start, self.piece
            return
        at = self.start
        for box in flat_boxes(self.piece.shape, self.first, self.last):
            offset = tuple(a + b for a, b in zip(self.piece.offset, box.offset, strict=True))
            yield at, Box(offset, box.shape)
            at += box.volume * self.item


@dataclass(frozen=True, slots=True)
class FileRead:
    """One read of a file.

    Args:
        segments: what is used of it, in the order of the file.
        ranks: those that take some of it.
    """

    file: str
    segments: tuple[ReadSegment, ...]
    ranks: tuple[int, ...]

    @property
    def start(self) -> int:
        """First byte."""
        return self.segments[0].start

    @property
    def stop(self) -> int:
        """One past the last."""
        return self.segments[-1].stop


class ReadSlice(NamedTuple):
    """What a rank takes out of a read.

    Args:
        wish: number of the wish among the rank's; 0 where another rank's is meant.
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
    """What one rank reads, and what it takes of the reads of others.

    It names no checksum, so it holds for every checkpoint of the same layout.

    Args:
        reads: what it reads, in its order.
        takes: reads of others of which it takes some: the rank that reads, and the read.
    """

    def __init__(
        self,
        rank: int,
        reads: Sequence[FileRead],
        takes: Sequence[tuple[int, FileRead]],
        wishes: Sequence[BoxRequest],
        wants: Wants,
    ) -> None:
        self.rank = rank
        self.reads = tuple(reads)
        self.takes = tuple(takes)
        self.wishes = tuple(wishes)
        self._wants = wants
        self._own: dict[str, list[tuple[int, Box]]] = {}
        # The order of boxes, which others know too, and not that of numbers, which they do not.
        for number in sorted(range(len(wishes)), key=lambda n: (wishes[n].offset, wishes[n].shape)):
            wish = wishes[number]
            self._own.setdefault(wish.name, []).append((number, wish.box))

    @property
    def files(self) -> list[str]:
        """Files that this rank reads or takes some of, in order."""
        return sorted({read.file for read in (*self.reads, *(read for _, read in self.takes))})

    @property
    def bytes(self) -> int:
        """Bytes that this rank reads."""
        return sum(read.stop - read.start for read in self.reads)

    def cuts(self, read: FileRead) -> list[ReadSlice]:
        """What this rank takes out of a read, in an order that the rank that reads knows too."""
        if self.rank not in read.ranks:
            return []
        return [cut for segment in read.segments for cut in self.cuts_of(segment)]

    def cuts_of(self, segment: ReadSegment) -> list[ReadSlice]:
        """What this rank takes out of a segment, in the order of the file."""
        return [
            ReadSlice(number, segment.name, at, box, common)
            for at, box in segment.boxes()
            for number, wish in self._own.get(segment.name, ())
            for common in (box.intersect(wish),)
            if common is not None
        ]

    def cuts_of_others(self, read: FileRead) -> dict[int, list[ReadSlice]]:
        """Rank -> what it takes out of a read of this one, in the order in which it expects it."""
        cuts: defaultdict[int, list[ReadSlice]] = defaultdict(list)
        for segment in read.segments:
            for at, box in segment.boxes():
                wishes = self._wants[segment.name].overlapping(box)
                for rank, wish in sorted(wishes, key=lambda one: (one[1].offset, one[1].shape)):
                    common = box.intersect(wish)
                    if rank != self.rank and common is not None:
                        cuts[rank].append(ReadSlice(0, segment.name, at, box, common))
        return cuts


def plan_reads(
    index: CheckpointIndex,
    wants: Wants,
    wishes: Sequence[BoxRequest],
    rank: int,
    *,
    whole: bool = True,
    read_bytes: int = READ_BYTES,
    gap_bytes: int = GAP_BYTES,
) -> ReadPlan:
    """What a rank reads and takes.

    Args:
        index: of the checkpoint; only shards of files that the rank wants some of are read.
        wants: what all ranks want; boxes of tensors that are there.
        wishes: what this one wants.
        rank: this one.
        whole: read pieces whole, so that they can be verified.
        read_bytes: most bytes of a read.
        gap_bytes: what is read along, so as not to begin another read.

    Raises:
        CheckpointError: a file cannot be read.
        CorruptError: a file or its shard has changed since it was written.
    """
    with _no_collections():
        return _Planning(index, wants, whole, read_bytes, gap_bytes).plan(wishes, rank)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Without searches for cycles: a plan has none, and millions of tuples to be searched."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Planning:
    """One plan being made."""

    def __init__(
        self, index: CheckpointIndex, wants: Wants, whole: bool, read_bytes: int, gap_bytes: int
    ) -> None:
        self.index, self.wants = index, wants
        self.whole, self.read_bytes, self.gap_bytes = whole, read_bytes, gap_bytes
        self._chosen: dict[str, dict[tuple[int, Box], list[Box]] | None] = {}
        self._ranks: dict[tuple[str, tuple[tuple[int, int, int], ...]], tuple[int, ...]] = {}

    def plan(self, wishes: Sequence[BoxRequest], rank: int) -> ReadPlan:
        """See :func:`plan_reads`."""
        groups: dict[tuple[int, ...], list[tuple[FileRead, tuple[int, ...]]]] = {}
        for file in self._files(wishes):
            planned = self._file(file)
            sharing = tuple(sorted({one for _, able in planned for one in able}))
            groups.setdefault(sharing, []).extend(planned)
        reads: list[FileRead] = []
        takes: list[tuple[int, FileRead]] = []
        for ranks, planned in groups.items():
            for reader, read in _shared(planned, ranks):
                if reader == rank:
                    reads.append(read)
                elif rank in read.ranks:
                    takes.append((reader, read))
        reads.sort(key=lambda read: (rank_of(read.file), read.start))
        return ReadPlan(rank, reads, takes, wishes, self.wants)

    def _files(self, wishes: Sequence[BoxRequest]) -> list[str]:
        """Files that hold some of what is wished."""
        owners: set[int] = set()
        for wish in wishes:
            chosen = self._of_copies(wish.name)
            if chosen is None:
                runs = self.index.tensors[wish.name].runs
                owners.update(runs.owners_of(runs.spans(wish.box)))
            else:
                owners.update(owner for owner, box in chosen if box.intersect(wish.box))
        return [file_name(owner) for owner in sorted(owners)]

    def _of_copies(self, name: str) -> dict[tuple[int, Box], list[Box]] | None:
        """Pieces that are read of a tensor and what of each, where some hold the same elements.

        None where no two do, so that every piece with wanted elements is read.
        """
        if name not in self._chosen:
            tensor = self.index.tensors[name]
            if tensor.disjoint:
                self._chosen[name] = None
            else:
                pieces = sorted(tensor.runs.owned(), key=lambda one: one.owner)
                boxes = {box for _, box in self.wants[name].owned() if box.volume}
                ordered = sorted(boxes, key=lambda box: (box.offset, box.shape))
                self._chosen[name] = dict(_needed(pieces, ordered))
        return self._chosen[name]

    def _file(self, file: str) -> list[tuple[FileRead, tuple[int, ...]]]:
        """Reads of a file, and of each the ranks that may do it."""
        shard, owner = self.index.check_file(file), rank_of(file)
        sizes = [ITEM_BYTES[one.dtype] for one in shard.tensors]
        segments: list[ReadSegment] = []
        wanting: dict[int, tuple[int, ...]] = {}
        for number, tensor, box, start in shard.boxes():
            name, item = shard.tensors[tensor].name, sizes[tensor]
            runs = self.wants.get(name)
            if runs is None:
                continue
            chosen = self._of_copies(name)
            if chosen is None:
                spans = runs.spans(box)
                if not spans:
                    continue
                wanting[number] = self._ranks_of(name, tuple(spans))
                parts: Iterable[Box] = () if self.whole else {b for _, b in runs.overlapping(box)}
            elif (owner, box) in chosen:
                parts = chosen[owner, box]
            else:
                continue
            ends = [(0, box.volume)] if self.whole else _runs(box, parts, self.gap_bytes // item)
            segments.extend(
                ReadSegment(name, number, box, item, first, last, start + first * item)
                for first, last in ends
            )
        return [
            (FileRead(file, group, takers), takers or self._readers(group))
            for group in _grouped(segments, self.read_bytes, self.gap_bytes)
            for takers in (self._takers(group, wanting),)
        ]

    def _takers(
        self, segments: Sequence[ReadSegment], wanting: Mapping[int, tuple[int, ...]]
    ) -> tuple[int, ...]:
        """The ranks that take some of these segments; of some whole pieces they are known."""
        several: set[tuple[int, ...]] = set()
        for segment in segments:
            if segment.whole and segment.number in wanting:
                several.add(wanting[segment.number])
            else:
                several.update(
                    self._ranks_of(segment.name, tuple(self.wants[segment.name].spans(box)))
                    for _, box in segment.boxes()
                )
        return _union(several)

    def _readers(self, segments: Sequence[ReadSegment]) -> tuple[int, ...]:
        """The ranks that want some of the pieces, of which none takes these segments."""
        return _union(
            {self._ranks_of(s.name, tuple(self.wants[s.name].spans(s.piece))) for s in segments}
        )

    def _ranks_of(self, name: str, spans: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
        key = name, spans
        if key not in self._ranks:
            self._ranks[key] = self.wants[name].owners_of(spans)
        return self._ranks[key]


def _union(several: set[tuple[int, ...]]) -> tuple[int, ...]:
    if len(several) == 1:
        return next(iter(several))
    return tuple(sorted({rank for ranks in several for rank in ranks}))


def _needed(
    pieces: Sequence[OwnedBox], boxes: Sequence[Box]
) -> Iterator[tuple[tuple[int, Box], list[Box]]]:
    """Pieces that are read, and what of each; of copies of the same elements the first."""
    ordered = sorted(pieces, key=lambda piece: piece.box.offset)
    starts = [piece.box.offset[:1] for piece in ordered]
    # Before this one none reaches so far: the widest piece says how far back one has to look.
    widest = max((piece.box.shape[0] for piece in ordered if piece.box.shape), default=0)
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


def _runs(piece: Box, parts: Iterable[Box], gap: int) -> list[tuple[int, int]]:
    """Runs of elements of a piece that hold the parts, with gaps of more than ``gap``."""
    strides = [math.prod(piece.shape[dim + 1 :]) for dim in range(len(piece.shape))]
    results: list[tuple[int, int]] = []
    for part in parts:
        common = part.intersect(piece)
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
            results.append((first, first + run))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(results):
        if merged and first - merged[-1][1] <= gap:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged


def _grouped(
    segments: Sequence[ReadSegment], read_bytes: int, gap_bytes: int
) -> Iterator[tuple[ReadSegment, ...]]:
    """Segments of a file that are read together; long ones are cut."""
    group: list[ReadSegment] = []
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
            cut = (first, last) != (segment.first, segment.last)
            group.append(segment._replace(first=first, last=last, start=start) if cut else segment)
            first = last
    if group:
        yield tuple(group)


def _shared(
    planned: Sequence[tuple[FileRead, tuple[int, ...]]], ranks: Sequence[int]
) -> Iterator[tuple[int, FileRead]]:
    """Who does each read."""
    place = {rank: number for number, rank in enumerate(ranks)}
    load = np.zeros(len(ranks), dtype=np.int64)
    able: dict[tuple[int, ...], np.ndarray] = {}
    # Reads that one rank alone wants leave no choice, so they come first; then the longest.
    order = sorted(
        range(len(planned)),
        key=lambda n: (len(planned[n][1]) > 1, planned[n][0].start - planned[n][0].stop, n),
    )
    for number in order:
        read, may = planned[number]
        if may not in able:
            able[may] = np.array([place[rank] for rank in may])
        least = able[may][np.argmin(load[able[may]])]
        load[least] += read.stop - read.start
        yield ranks[least], read

"""Every nest of strided types as one strided block.

However a type was spelled, what it means is a few numbers: where the first byte lies, how
many bytes lie together, and how often and how far apart that repeats, dimension by dimension.
Rules that change neither the bytes nor their order are applied until none applies:

- *elide*: a stream of one is its child;
- *fold*: a stream whose stride is the length of its dense bytes is dense itself;
- *flatten*: a stream whose stride is its child's count x stride continues the child.

Two types with the same typemap have the same canonical form: the first byte that does not
follow its predecessor gives the length of the block, the first block that does not lie a
stride behind its predecessor the count of the first dimension, and so on; nothing is left
open. Types without such a form are lists of blocks; one that is written as a list but has
the form is recognised.

Where both ends of a message share the type, the order in which it is packed does not
matter (``order_free``): streams are then also *reversed* if they go backwards and
*swapped* until the largest stride is outside.

Source: Pearson et al., TEMPI, 2021, sections 3 and 4.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import KernelError, require
from shoal.kernel.strided.datatype import Datatype, Dense, Node, StridedStream, Struct

_LINE = 64
# Blocks that are looked at one by one.
_BLOCKS = 2**20
_SORTED = 2**22


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """``counts[0]`` bytes together, repeated ``counts[1]`` times ``strides[1]`` apart, ...

    Args:
        start: offset of the first byte.
        counts: of each dimension, the dense one first; (0,) if there are no bytes.
        strides: bytes; ``strides[0]`` is 1.
        extent: bytes from this to the next one of its kind.
    """

    start: int
    counts: tuple[int, ...]
    strides: tuple[int, ...]
    extent: int

    @property
    def size(self) -> int:
        """Bytes when packed."""
        return math.prod(self.counts)

    @property
    def runs(self) -> int:
        """Blocks of bytes that lie together."""
        return self.size // self.counts[0] if self.counts[0] else 0

    @property
    def span(self) -> tuple[int, int]:
        """Offsets of the first byte and behind the last one."""
        if not self.size:
            return 0, 0
        reach = [(n - 1) * s for n, s in zip(self.counts, self.strides, strict=True)]
        low = self.start + sum(min(0, r) for r in reach)
        return low, self.start + sum(max(0, r) for r in reach) + 1

    @property
    def touched(self) -> int:
        """Bytes of the cache lines that hold it, at least."""
        if not self.size:
            return 0
        width, lines = self.counts[0], 1
        for stride, count in self._by_stride():
            if lines == 1 and stride <= _LINE:
                width += stride * (count - 1)
            else:
                lines *= count
        return max(self.counts[0], lines * -(-width // _LINE) * _LINE)

    @property
    def overlaps(self) -> bool:
        """Whether some byte is named twice; True too where that cannot be determined."""
        dims = self._by_stride()
        # A dimension whose stride is beyond all that lies below it keeps its copies apart.
        while dims:
            stride, _ = dims[-1]
            if stride < self.counts[0] + sum(s * (n - 1) for s, n in dims[:-1]):
                break
            dims.pop()
        if not dims:
            return False
        if dims[0][0] == 0 or math.prod(n for _, n in dims) > _SORTED:
            return True
        places = np.zeros(1, np.int64)
        for stride, count in dims:
            places = (places[:, None] + stride * np.arange(count, dtype=np.int64)).reshape(-1)
        places.sort()
        return bool((np.diff(places) < self.counts[0]).any())

    def _by_stride(self) -> list[tuple[int, int]]:
        return sorted((abs(s), n) for s, n in zip(self.strides[1:], self.counts[1:], strict=True))


@dataclass(frozen=True, slots=True)
class BlockList:
    """Irregular blocks.

    Args:
        offsets: of each block, in packed order.
        lengths: bytes of each.
        extent: bytes from this to the next one of its kind.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    extent: int

    @property
    def size(self) -> int:
        """Bytes when packed."""
        return sum(self.lengths)

    @property
    def runs(self) -> int:
        """Blocks."""
        return len(self.offsets)

    @property
    def span(self) -> tuple[int, int]:
        """Offsets of the first byte and behind the last one."""
        ends = (o + n for o, n in zip(self.offsets, self.lengths, strict=True))
        return min(self.offsets), max(ends)

    @property
    def touched(self) -> int:
        """Bytes of the cache lines that hold it, about."""
        low, high = self.span
        return min(sum(-(-n // _LINE) * _LINE for n in self.lengths), max(self.size, high - low))

    @property
    def overlaps(self) -> bool:
        """Whether some byte is named twice."""
        order = np.argsort(np.asarray(self.offsets))
        offsets, lengths = np.asarray(self.offsets)[order], np.asarray(self.lengths)[order]
        return bool((offsets[1:] < offsets[:-1] + lengths[:-1]).any())


Layout = StridedBlock | BlockList


@dataclass(frozen=True, slots=True)
class RewriteStep:
    """One rewriting: the rule, and the streams (count, stride), outermost first, behind it."""

    rule: str
    streams: tuple[tuple[int, int], ...]
    dense: int


@functools.lru_cache(maxsize=4096)
def canonical(datatype: Datatype, count: int = 1, *, order_free: bool = False) -> Layout:
    """The canonical form of ``count`` such types, each its extent behind the one before.

    Args:
        datatype: a type; its spelling does not matter.
        count: how many.
        order_free: packed bytes may be in another order; both ends must ask for it.

    Raises:
        KernelError: a negative count, or more irregular blocks than can be listed.
    """
    return rewritten(datatype, count, order_free=order_free)[0]


def rewritten(
    datatype: Datatype, count: int = 1, *, order_free: bool = False
) -> tuple[Layout, tuple[RewriteStep, ...]]:
    """The same, and the steps that led there; none where the type is a list of blocks."""
    require(count >= 0, "strided count", count, expected="0 or more", error=KernelError)
    extent = count * datatype.extent
    if count == 0 or datatype.size == 0:
        return StridedBlock(0, (0,), (1,), extent), ()
    start, streams, leaf = _chain(StridedStream(0, count, datatype.extent, datatype.node))
    if isinstance(leaf, Dense):
        return _strided(start, streams, leaf.extent, extent, order_free)
    offsets, lengths = _merged(*_listed(start, streams, leaf))
    result = _recognised(offsets, lengths)
    if result is not None:
        return _strided(offsets[0].item(), result[0], result[1], extent, order_free)
    if order_free:
        order = np.argsort(offsets, kind="stable")
        offsets, lengths = offsets[order], lengths[order]
    return BlockList(tuple(offsets.tolist()), tuple(lengths.tolist()), extent), ()


def word_bytes(layout: StridedBlock, *addresses: int, largest: int = 16) -> int:
    """The largest power of two that divides start, block length, strides and addresses."""
    common = math.gcd(layout.start, layout.counts[0], *layout.strides[1:], *addresses)
    word = 1
    while word < largest and common % (2 * word) == 0:
        word *= 2
    return word


def _chain(node: Node) -> tuple[int, list[tuple[int, int]], Dense | Struct]:
    """Offset of the first, streams (count, stride) outermost first, and what they repeat."""
    start, streams = 0, []
    while True:
        if isinstance(node, Struct) and len(node.children) == 1:
            at, node = node.children[0]
            start += at
        elif isinstance(node, StridedStream):
            start += node.offset
            streams.append((node.count, node.stride))
            node = node.child
        elif isinstance(node, Dense):
            return start + node.offset, streams, node
        else:
            return start, streams, node


def _strided(
    start: int, streams: list[tuple[int, int]], dense: int, extent: int, order_free: bool
) -> tuple[StridedBlock, tuple[RewriteStep, ...]]:
    steps = [RewriteStep("given", tuple(streams), dense)]
    while (result := _apply(start, streams, dense, order_free)) is not None:
        rule, start, streams, dense = result
        steps.append(RewriteStep(rule, tuple(streams), dense))
    counts = (dense, *(n for n, _ in reversed(streams)))
    strides = (1, *(s for _, s in reversed(streams)))
    return StridedBlock(start, counts, strides, extent), tuple(steps)


def _apply(
    start: int, streams: list[tuple[int, int]], dense: int, order_free: bool
) -> tuple[str, int, list[tuple[int, int]], int] | None:
    """The first rule that applies, and what it leaves; None at the end."""
    for place, (count, stride) in enumerate(streams):
        rest = streams[:place], streams[place + 1 :]
        if count == 1:
            return "elide", start, [*rest[0], *rest[1]], dense
        if not rest[1]:
            if stride == dense:
                return "fold", start, rest[0], dense * count
        else:
            inner_count, inner_stride = rest[1][0]
            if stride == inner_count * inner_stride:
                joined = (count * inner_count, inner_stride)
                return "flatten", start, [*rest[0], joined, *rest[1][1:]], dense
        if order_free:
            if stride < 0:
                turned = (count, -stride)
                back = start + (count - 1) * stride
                return "reverse", back, [*rest[0], turned, *rest[1]], dense
            if rest[1] and stride < abs(rest[1][0][1]):
                return "swap", start, [*rest[0], rest[1][0], (count, stride), *rest[1][1:]], dense
    return None


def _listed(
    start: int, streams: list[tuple[int, int]], leaf: Struct
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and lengths of all blocks, in order."""
    offsets, lengths = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for at, child in leaf.children:
        first, inner, end = _chain(child)
        if isinstance(end, Dense):
            # Most children are simple; their own canonical form is the shortest list.
            block, _ = _strided(at + first, inner, end.extent, 0, False)
            dims = list(zip(block.counts[:0:-1], block.strides[:0:-1], strict=True))
            _few(math.prod(block.counts[1:]) if block.size else 0)
            part = _expanded(block.start, dims, np.zeros(1, np.int64))
            offsets.append(part if block.size else part[:0])
            lengths.append(np.full(len(offsets[-1]), block.counts[0], np.int64))
        else:
            part, sizes = _listed(at + first, inner, end)
            offsets.append(part)
            lengths.append(sizes)
    places, sizes = _merged(np.concatenate(offsets), np.concatenate(lengths))
    copies = math.prod(n for n, _ in streams)
    _few(copies * len(places))
    return _expanded(start, streams, places), np.tile(sizes, copies)


def _expanded(start: int, streams: list[tuple[int, int]], places: np.ndarray) -> np.ndarray:
    for count, stride in reversed(streams):
        steps = stride * np.arange(count, dtype=np.int64)
        places = (steps[:, None] + places[None, :]).reshape(-1)
    return start + places


def _few(blocks: int) -> None:
    require(
        blocks <= _BLOCKS,
        "strided type",
        f"{blocks} irregular blocks",
        expected=f"at most {_BLOCKS}",
        hint="describe it with vectors or subarrays, or pack it in parts",
        error=KernelError,
    )


def _merged(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks that follow each other in memory as in order are one."""
    if not len(offsets):
        return offsets, lengths
    first = np.concatenate([[True], offsets[1:] != offsets[:-1] + lengths[:-1]])
    return offsets[first], np.add.reduceat(lengths, np.flatnonzero(first))


def _recognised(
    offsets: np.ndarray, lengths: np.ndarray
) -> tuple[list[tuple[int, int]], int] | None:
    """Streams and dense bytes of a list of blocks that has the form, or None.

    A strided block never has three of its blocks behind each other without a gap, so every
    run of bytes is one block long or two.
    """
    dense = int(lengths[0])
    if not np.isin(lengths, (dense, 2 * dense)).all():
        return None
    block = np.repeat(np.arange(len(offsets)), lengths // dense)
    places = offsets[block]
    places[1:][block[1:] == block[:-1]] += dense
    streams: list[tuple[int, int]] = []
    while len(places) > 1:
        gaps = np.diff(places)
        other = np.flatnonzero(gaps != gaps[0])
        count = int(other[0]) + 1 if len(other) else len(places)
        if len(places) % count:
            return None
        rows = places.reshape(-1, count)
        if (rows - rows[:, :1] != rows[0] - rows[0, 0]).any():
            return None
        streams.insert(0, (count, int(gaps[0])))
        places = rows[:, 0]
    return streams, dense

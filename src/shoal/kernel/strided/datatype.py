"""Bytes with holes between them, as MPI describes them.

A :class:`Datatype` is an ordered list of bytes at offsets from an address: its *typemap*. It
is never written down, but described by a tree: ``Dense`` bytes, ``StridedStream`` s of a child at a
stride, and ``Struct`` s of children anywhere. Packing copies the bytes in this order.

Source: MPI: A Message-Passing Interface Standard, 4.1, chapter 5 (derived datatypes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.errors import KernelError, nearest, require

if TYPE_CHECKING:
    from torch import Tensor

BYTES_OF = {
    "byte": 1,
    "char": 1,
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "fp8": 1,
    "int16": 2,
    "short": 2,
    "fp16": 2,
    "bf16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int": 4,
    "int32": 4,
    "fp32": 4,
    "float": 4,
    "float32": 4,
    "int64": 8,
    "long": 8,
    "fp64": 8,
    "double": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Name of a primitive type -> its bytes."""

# A type nested deeper is a mistake, and would exhaust Python's stack.
_DEPTH = 100
_LARGEST = 2**62


@dataclass(frozen=True, slots=True)
class Dense:
    """``extent`` bytes from ``offset`` on."""

    offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class StridedStream:
    """``count`` copies of ``child``, at ``offset``, ``offset + stride``, ..."""

    offset: int
    count: int
    stride: int
    child: Node


@dataclass(frozen=True, slots=True)
class Struct:
    """Children behind each other in the packed bytes, each at its own displacement."""

    children: tuple[tuple[int, Node], ...]


Node = Dense | StridedStream | Struct


@dataclass(frozen=True, slots=True)
class Datatype:
    """What the constructors of this module return.

    Args:
        node: the tree.
        lower: offset at which the type begins for the constructors above it, holes included.
        extent: bytes from one such type to the next, when several lie behind each other.
        size: bytes of it, holes excluded.
        depth: constructors inside each other.
    """

    node: Node
    lower: int
    extent: int
    size: int
    depth: int = 1

    def typemap(self, count: int = 1) -> np.ndarray:
        """Offsets of the bytes of ``count`` such types, in packed order: int64 [count * size].

        By plain enumeration, which is what every faster way is compared with.
        """
        _counted("count", count)
        places = np.arange(count, dtype=np.int64)[:, None] * self.extent
        return np.ravel(places + _enumerate(self.node)[None, :])


def _enumerate(node: Node) -> np.ndarray:
    if isinstance(node, Dense):
        return np.arange(node.offset, node.offset + node.extent, dtype=np.int64)
    if isinstance(node, StridedStream):
        places = node.offset + node.stride * np.arange(node.count, dtype=np.int64)
        return np.ravel(places[:, None] + _enumerate(node.child)[None, :])
    parts = [at + _enumerate(child) for at, child in node.children]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def named(name: str | int) -> Datatype:
    """A primitive type, by name or by its bytes.

    Raises:
        KernelError: the name is unknown, or it has no bytes.
    """
    if isinstance(name, str):
        require(
            name in BYTES_OF,
            "strided.named",
            name,
            expected=f"one of {', '.join(BYTES_OF)}",
            hint=nearest(name, BYTES_OF),
            error=KernelError,
        )
    size = BYTES_OF[name] if isinstance(name, str) else name
    require(
        1 <= size < _LARGEST,
        "strided.named",
        name,
        expected="at least 1 byte",
        error=KernelError,
    )
    return Datatype(Dense(0, size), 0, size, size)


def contiguous(count: int, base: Datatype) -> Datatype:
    """``count`` of ``base`` behind each other, its extent apart."""
    return hvector(count, 1, base.extent, base)


def vector(count: int, length: int, stride: int, base: Datatype) -> Datatype:
    """``count`` blocks of ``length``, ``stride`` apart, both in extents of ``base``."""
    return hvector(count, length, stride * base.extent, base)


def hvector(count: int, length: int, stride: int, base: Datatype) -> Datatype:
    """The same with ``stride`` in bytes; it may be negative, or smaller than a block.

    Raises:
        KernelError: a count is negative.
    """
    _counted("vector.count", count)
    _counted("vector.length", length)
    inner = StridedStream(0, length, base.extent, base.node)
    places = [
        i * stride + j * base.extent
        for i in (0, count - 1)
        for j in (0, length - 1)
        if count and length
    ]
    return _placed(StridedStream(0, count, stride, inner), places, base, count * length)


def subarray(
    sizes: Sequence[int],
    subsizes: Sequence[int],
    starts: Sequence[int],
    base: Datatype,
    order: str = "C",
) -> Datatype:
    """A box of an array.

    Args:
        sizes: of the whole array.
        subsizes: of the box.
        starts: its first index in every dimension.
        base: an element.
        order: C: the last dimension is the dense one; F: the first.

    Raises:
        KernelError: the box does not lie in the array.
    """
    require(
        len(sizes) == len(subsizes) == len(starts) and len(sizes) >= 1,
        "strided.subarray",
        f"{len(sizes)} sizes, {len(subsizes)} subsizes, {len(starts)} starts",
        expected="equally many, at least one",
        error=KernelError,
    )
    require(
        order in ("C", "F"),
        "strided.subarray order",
        order,
        expected="C or F",
        error=KernelError,
    )
    for dim, (size, box, start) in enumerate(zip(sizes, subsizes, starts, strict=True)):
        require(
            box >= 0 and start >= 0 and start + box <= size,
            f"strided.subarray dimension {dim}",
            f"{start} .. {start + box} of {size}",
            expected=f"a box inside 0 .. {size}",
            error=KernelError,
        )
    dims = range(len(sizes)) if order == "F" else range(len(sizes) - 1, -1, -1)
    node, stride = base.node, base.extent
    for dim in dims:  # the dense one first
        node = StridedStream(starts[dim] * stride, subsizes[dim], stride, node)
        stride *= sizes[dim]
    size = math.prod(subsizes) * base.size
    return _checked(Datatype(node, 0, stride, size, base.depth + len(sizes)))


def resized(base: Datatype, lower: int, extent: int) -> Datatype:
    """The same bytes, as if the type began at ``lower`` and were ``extent`` bytes long.

    Raises:
        KernelError: the extent is negative.
    """
    require(
        extent >= 0,
        "strided.resized extent",
        extent,
        expected="0 or more bytes",
        hint="for a reversed type use a negative stride, not a negative extent",
        error=KernelError,
    )
    return _checked(Datatype(base.node, lower, extent, base.size, base.depth + 1))


def indexed(lengths: Sequence[int], displacements: Sequence[int], base: Datatype) -> Datatype:
    """Blocks of ``lengths`` at ``displacements``, both in extents of ``base``."""
    return hindexed(lengths, [at * base.extent for at in displacements], base)


def hindexed(lengths: Sequence[int], displacements: Sequence[int], base: Datatype) -> Datatype:
    """The same with displacements in bytes."""
    return struct(lengths, displacements, [base] * len(lengths))


def struct(
    lengths: Sequence[int], displacements: Sequence[int], bases: Sequence[Datatype]
) -> Datatype:
    """Blocks of several types, each at its displacement in bytes.

    Raises:
        KernelError: not one displacement and one type a block, or a negative length.
    """
    require(
        len(lengths) == len(displacements) == len(bases),
        "strided.struct",
        f"{len(lengths)} lengths, {len(displacements)} displacements, {len(bases)} types",
        expected="equally many",
        error=KernelError,
    )
    children, lows, highs, size = [], [], [], 0
    for length, at, base in zip(lengths, displacements, bases, strict=True):
        _counted("struct.length", length)
        if length:
            children.append((at, StridedStream(0, length, base.extent, base.node)))
            lows.append(at + base.lower)
            highs.append(at + base.lower + length * base.extent)
            size += length * base.size
    lower = min(lows, default=0)
    depth = 1 + max((base.depth for base in bases), default=0)
    return _checked(
        Datatype(Struct(tuple(children)), lower, max(highs, default=0) - lower, size, depth)
    )


def from_strides(shape: Sequence[int], strides: Sequence[int], item: int) -> Datatype:
    """Elements of ``item`` bytes, the last dimension fastest; strides in bytes."""
    node: Node = Dense(0, item)
    low = high = 0
    for count, stride in zip(reversed(shape), reversed(strides), strict=True):
        node = StridedStream(0, count, stride, node)
        low += min(0, (count - 1) * stride)
        high += max(0, (count - 1) * stride)
    size = item * math.prod(shape)
    extent = high - low + item if size else 0
    return _checked(Datatype(node, low if size else 0, extent, size, 1 + len(shape)))


def from_tensor_view(view: Tensor, base: Tensor | None = None) -> Datatype:
    """The bytes of a tensor of any strides, from its own address or from that of ``base``.

    Raises:
        KernelError: the two do not share memory.
    """
    item = view.element_size()
    strides = from_strides(view.shape, [stride * item for stride in view.stride()], item)
    if base is None:
        return strides
    require(
        view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr(),
        "strided.from_tensor_view",
        f"a view {list(view.shape)} of another storage than base {list(base.shape)}",
        expected="a view of base",
        error=KernelError,
    )
    at = view.data_ptr() - base.data_ptr()
    return Datatype(
        StridedStream(at, 1, 0, strides.node),
        strides.lower + at,
        strides.extent,
        strides.size,
        strides.depth + 1,
    )


def _placed(node: Node, places: list[int], base: Datatype, copies: int) -> Datatype:
    low, high = min(places, default=0), max(places, default=0)
    if not places:
        return Datatype(node, 0, 0, 0, base.depth + 1)
    return _checked(
        Datatype(
            node, low + base.lower, high - low + base.extent, copies * base.size, base.depth + 1
        )
    )


def _counted(what: str, count: int) -> None:
    require(
        0 <= count < _LARGEST, f"strided.{what}", count, expected="0 or more", error=KernelError
    )


def _checked(found: Datatype) -> Datatype:
    require(
        found.depth <= _DEPTH,
        "strided types",
        f"{found.depth} nested types",
        expected=f"at most {_DEPTH}",
        error=KernelError,
    )
    require(
        found.size < _LARGEST and found.extent < _LARGEST and abs(found.lower) < _LARGEST,
        "strided type",
        f"{found.size} bytes over {found.extent}",
        expected="less than 2^62",
        error=KernelError,
    )
    return found

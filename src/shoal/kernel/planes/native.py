"""Weights repacked for ``planes.cpp``, and calls of it.

Shapes: N rows of the weights, K their length, M rows of the input, G groups of K.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.native import function
from shoal.kernel.pages import room
from shoal.kernel.planes.engines import ENGINES, PlanesEngine, bound
from shoal.kernel.planes.layout import words

_KINDS = {torch.int32: 0, torch.int64: 1, torch.float32: 2, torch.bfloat16: 3}


_NUMBERS = ("n", "k", "group", "groups", "w", "a", "kind", "low", "rest")
_POINTERS = ("bits", "correction", "scale", "offset", "bias")


class _Job(ctypes.Structure):
    """struct Job of ``planes.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


@dataclass(frozen=True)
class PlanesWeights:
    """Weights as an engine wants them.

    Args:
        n: rows.
        k: their length.
        a: bits of the input.
        group: numbers of K that are summed exactly; ``groups`` of them.
        groups: of a row.
        out: type of the result.
        rest: the kernel wants the sums of the groups of the input.
        tiles: as tiles of planes; else as masks.
        job: what the kernel reads.
        keep: the tensors that it points to.
    """

    n: int
    k: int
    a: int
    group: int
    groups: int
    out: torch.dtype
    rest: bool
    tiles: bool
    job: _Job
    keep: tuple[Tensor | None, ...]


def coded(codes_NK: Tensor) -> Tensor:
    """Codes uint8 with rows of whole 64 bytes, zeros behind."""
    k = codes_NK.shape[1]
    return torch.nn.functional.pad(codes_NK, (0, words(k) * 64 - k)).contiguous()


def weights(
    codes_NK: Tensor,
    w: int,
    a: int,
    *,
    tiles: bool,
    out: torch.dtype | None = None,
    group: int | None = None,
    scale_NG: Tensor | None = None,
    offset_NG: Tensor | None = None,
    bias_N: Tensor | None = None,
) -> PlanesWeights:
    """Repack codes uint8 [N, K] for the engines that take tiles, or for those that take masks.

    Args:
        codes_NK: of the weights.
        w: their bits.
        a: bits of the input.
        tiles: which form.
        out: float type of the result; None for exact integers: int32, or int64 where the
            sums may exceed it.
        group: numbers along K that share a scale; None for all.
        scale_NG: what a value counts, with ``out``.
        offset_NG: what is added to each weight; None for nothing.
        bias_N: added to the result.
    """
    n, k = codes_NK.shape
    limit = bound(w, a)
    if out is None:
        out = torch.int32 if k < limit else torch.int64
    size, repeat = group or k, 1
    if size >= limit:  # exact sums of less than what shares a scale
        whole = size
        size = _part(size, limit) if size < k else min(2**15, (limit - 1) // 64 * 64)
        repeat = -(-whole // size)
    elif size == k:
        size = words(k) * 64
    groups = -(-k // size)
    padded = -(-n // 32) * 32
    wide = coded(codes_NK)
    grouped = torch.nn.functional.pad(wide, (0, max(0, groups * size - wide.shape[1])))
    sums = grouped[:, : groups * size].reshape(n, groups, size).sum(-1, dtype=torch.int64)
    counts = torch.tensor([min(size, k - g * size) for g in range(groups)])
    values = 2 * sums - (2**w - 1) * counts
    # Modulo 2^32: the kernel's sums wrap, and only what they come to must fit.
    correction = ((2**a - 1) * values + 2**31).remainder(2**32) - 2**31

    def sixteens(of_NG: Tensor, dtype: torch.dtype) -> Tensor:
        full = torch.zeros(padded, groups, dtype=dtype)
        full[:n] = of_NG.to(dtype)
        return full.view(padded // 16, 16, groups).transpose(1, 2).contiguous()

    def floats(of_NG: Tensor | None) -> Tensor | None:
        if of_NG is None:
            return None
        return sixteens(of_NG.float().repeat_interleave(repeat, 1)[:, :groups], torch.float32)

    low, rest, planes_w = 0, 0, w
    if tiles:
        planes = torch.empty(n, w, words(k), dtype=torch.int64)
        function("planes", "planes_split", "pplll")(wide.data_ptr(), planes.data_ptr(), n, w, k)
        low, planes_w, rest = _constant(codes_NK, w)
        planes = planes[:, low : low + planes_w].contiguous()
        bits = room(padded * planes_w * words(k) * 8).view(torch.int64)
        function("planes", "planes_tiles", "pplll")(
            planes.data_ptr(), bits.data_ptr(), n, k, planes_w
        )
    else:
        # The kernel loads whole vectors, of which it uses the first w words.
        bits = room((padded * words(k) * w + 8) * 8).view(torch.int64)
        function("planes", "planes_masks", "pplll")(wide.data_ptr(), bits.data_ptr(), n, k, w)
    scale, offset = floats(scale_NG), floats(offset_NG)
    bias = None if bias_N is None else bias_N.detach().float().contiguous()
    held = (bits, sixteens(correction, torch.int32), scale, offset, bias)
    job = _Job(
        n, k, size, groups, planes_w, a, _KINDS[out], low, rest,
        *(None if tensor is None else tensor.data_ptr() for tensor in held),
    )  # fmt: skip
    needs = rest != 0 or offset is not None
    return PlanesWeights(n, k, a, size, groups, out, needs, tiles, job, held)


def _part(group: int, limit: int) -> int:
    """The largest part of a group, of whole words, whose sums fit in 32 bits.

    Raises:
        KernelError: there is none.
    """
    fitting = (group // n for n in range(2, group // 64 + 1) if group % n == 0)
    size = next((part for part in fitting if part < limit and part % 64 == 0), None)
    if size is None:
        raise KernelError(
            f"a group of {group} along K, whose sums overflow 32 bits: expected at most "
            f"{limit - 1}, or a multiple of {2**15}; nearest {round(group / 2**15) * 2**15}"
        )
    return size


def _constant(codes: Tensor, w: int) -> tuple[int, int, int]:
    """Planes that say something: the first and how many; and the sum of what the others add.

    A product with a plane that is the same everywhere is a sum of the input, so planes at
    either end that are constant need not be multiplied.
    """
    # Codes seen, as a set of at most 256.
    seen = torch.bincount(codes.flatten().int(), minlength=2**w).nonzero().flatten().tolist()
    ones = functools.reduce(operator.and_, seen)
    some = functools.reduce(operator.or_, seen)
    same = [bool(ones >> i & 1) or not some >> i & 1 for i in range(w)]
    first, last = 0, w
    while last - first > 1 and same[last - 1]:
        last -= 1
    while last - first > 1 and same[first]:
        first += 1
    outside = [i for i in range(w) if not first <= i < last]
    return first, last - first, sum((1 if ones >> i & 1 else -1) << i for i in outside)


@functools.cache
def _run(engine: str) -> Callable[..., Any]:
    reason = ENGINES[engine].refuses()  # and so asks for matrix tiles
    if reason is not None:
        raise KernelError(f"planes: engine {engine} {reason}")
    return function("planes", f"planes_{ENGINES[engine].symbol}", "pppppl")


def result(held: PlanesWeights, rows: int) -> Tensor:
    """Memory for the result [rows, N]."""
    return torch.empty(rows, held.n, dtype=held.out)


def product(engine: PlanesEngine, held: PlanesWeights, planes_MaW: Tensor, out_MN: Tensor) -> None:
    """The product with input given as planes; exact integers."""
    rows, at, sums_at = planes_MaW.shape[0], planes_MaW.data_ptr(), 0
    if engine.block:
        step = words(held.k) * 64
        codes = torch.empty(-(-rows // engine.block) * engine.block * step, dtype=torch.uint8)
        _codes()(at, codes.data_ptr(), rows, held.a, held.k, engine.block)
        at = codes.data_ptr()
    elif held.rest:
        sums = torch.empty(rows, held.groups, dtype=torch.int32)
        _sums()(at, sums.data_ptr(), rows, held.a, held.k, held.group)
        sums_at = sums.data_ptr()
    _run(engine.name)(ctypes.addressof(held.job), at, 0, sums_at, out_MN.data_ptr(), rows)


def quantized(engine: PlanesEngine, held: PlanesWeights, x_MK: Tensor, out_MN: Tensor) -> None:
    """The product with fp32 or bf16 rows, rounded to bipolar integers on the way."""
    rows, count = x_MK.shape[0], words(held.k)
    scale = torch.empty(rows, dtype=torch.float32)
    sums = torch.empty(rows, held.groups, dtype=torch.int32) if held.rest else None
    sums_at = 0 if sums is None else sums.data_ptr()
    if engine.block:
        places = -(-rows // engine.block) * engine.block
        held_x = torch.empty(places * count * 8, dtype=torch.int64)
        at = held_x.data_ptr()
        _quantize(x_MK.dtype)(
            x_MK.data_ptr(), rows, held.k, held.a, held.group, engine.block, at, 0,
            scale.data_ptr(), sums_at,
        )  # fmt: skip
    else:
        held_x = torch.empty(rows * held.a * count, dtype=torch.int64)
        at = held_x.data_ptr()
        _quantize(x_MK.dtype)(
            x_MK.data_ptr(), rows, held.k, held.a, held.group, 1, 0, at,
            scale.data_ptr(), sums_at,
        )  # fmt: skip
    _run(engine.name)(
        ctypes.addressof(held.job), at, scale.data_ptr(), sums_at, out_MN.data_ptr(), rows
    )


@functools.cache
def _codes() -> Callable[..., Any]:
    return function("planes", "planes_codes", "ppllll")


@functools.cache
def _sums() -> Callable[..., Any]:
    return function("planes", "planes_sums", "ppllll")


@functools.cache
def _quantize(dtype: torch.dtype) -> Callable[..., Any]:
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    return function("planes", f"planes_quantize_{name}", "plllllpppp")

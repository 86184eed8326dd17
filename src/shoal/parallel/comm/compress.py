"""Collectives whose numbers travel in a few bits: packed bytes on the wire, sums in fp32.

A row is cut in blocks of 256 values. A block travels as signed integers of ``bits`` bits, two of
four bits to a byte, and one fp32 scale, its largest magnitude over 7 or 127: symmetric, rounded to
the nearest, so a value is off by half a scale at most, and zero stays zero. A block with a number
that is not finite arrives as numbers that are not.

Integers are never added up: the sum turns what arrived into fp32 first, and so every value is
rounded once on each hop.

Source: Wang et al., ZeRO++, 2023, sections 3.1 and 3.3 (block-based quantisation, all-to-all for
gradients); Dettmers et al., 8-bit Optimizers via Block-wise Quantization, 2022.

Shapes: P rows, n values of a row, b bytes of a packed row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shoal.core.errors import require
from shoal.parallel.comm.wire import BLOCK, packed_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm

_MOST = {4: 7, 8: 127}


def _most(bits: int) -> int:
    require(bits in _MOST, "compress: bits", bits, expected="4 or 8")
    return _MOST[bits]


def pack(x_Pn: Tensor, bits: int) -> Tensor:
    """Rows of numbers as bytes: the codes of a row, then its scales.

    Returns:
        uint8 [P, b], of :func:`~shoal.parallel.comm.wire.packed_bytes`.

    Raises:
        ConfigError: other bits.
    """
    most = _most(bits)
    rows, n = x_Pn.shape
    missing = -n % BLOCK
    blocks = torch.nn.functional.pad(x_Pn.detach().float(), (0, missing)).view(rows, -1, BLOCK)
    # No scale is smaller than the smallest normal number: what is below is rounded to zero.
    scales = (blocks.abs().amax(-1) / most).clamp(min=torch.finfo(torch.float32).tiny)
    codes = (blocks / scales.unsqueeze(-1)).round().clamp(-most, most).nan_to_num(0.0)
    codes = codes.view(rows, -1)[:, : n + n % 2 if bits == 4 else n].to(torch.int8)
    if bits == 4:
        halves = (codes + 8).view(torch.uint8)
        codes = halves[:, 0::2] | (halves[:, 1::2] << 4)
    joined = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], 1)
    assert joined.shape[1] == packed_bytes(n, bits)
    return joined


def unpack(packed_Pb: Tensor, n: int, bits: int) -> Tensor:
    """The fp32 numbers [P, n] that packed rows stand for.

    Raises:
        ConfigError: other bits, or rows of another length.
    """
    _most(bits)
    rows = packed_Pb.shape[0]
    require(
        packed_Pb.shape[1] == packed_bytes(n, bits),
        "compress: bytes of a row",
        packed_Pb.shape[1],
        expected=f"{packed_bytes(n, bits)}, of {n} values in {bits} bits",
    )
    size = packed_Pb.shape[1] - 4 * (-(-n // BLOCK))
    # Copied, because fp32 numbers begin at a multiple of four bytes.
    scales = packed_Pb[:, size:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    codes = packed_Pb[:, :size]
    if bits == 4:
        halves = torch.stack([codes & 15, codes >> 4], -1).view(rows, -1)[:, :n]
        values = halves.float() - 8.0
    else:
        values = codes.contiguous().view(torch.int8).float()
    blocks = torch.nn.functional.pad(values, (0, -n % BLOCK)).view(rows, -1, BLOCK)
    return (blocks * scales.unsqueeze(-1)).view(rows, -1)[:, :n]


def gather_packed(comm: Comm, packed: Tensor, *, tag: str) -> Tensor:
    """Every rank's ``packed`` [...], as bytes or as any numbers, in rank order: [ranks, ...]."""
    if comm.world == 1:
        return packed.unsqueeze(0)
    out = packed.new_empty((comm.world, *packed.shape))
    comm.all_gather(out.view(-1), packed.contiguous().view(-1), tag=tag).wait()
    return out


def reduce_scatter_packed(comm: Comm, x_Pn: Tensor, bits: int, *, tag: str) -> Tensor:
    """This rank's row of the sum of ``x`` over the ranks: fp32 [n].

    Every rank sends each other one its row, packed; it adds up what it gets in rank order. A
    rank's own row is rounded as well, so that each rank's share of a sum is as exact as any
    other's. Among one rank nothing is rounded.

    Args:
        comm: P ranks.
        x_Pn: a row for each of them.
        bits: 4 or 8.
        tag: of the bytes.
    """
    if comm.world == 1:
        return x_Pn[0].float()
    packed = pack(x_Pn, bits)
    received = torch.empty_like(packed)
    comm.all_to_all(list(received), list(packed), tag=tag).wait()
    return unpack(received, x_Pn.shape[1], bits).sum(0)

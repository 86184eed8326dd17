"""Bit planes of bipolar integers, and the map between them and other integer codes.

Planes are int64 [R, b, W]: word t of plane i has bit i of the codes 64 t to 64 t + 63 of a row,
the first in its lowest bit; W = ceil(K / 64), and bits beyond K are 0.

An affine quantizer ``w = s u + z`` with codes u of b bits is, without any loss, the bipolar
``w = (s / 2) v + (z + s (2^b - 1) / 2)`` with ``v = 2u - (2^b - 1)``: the same bits. For a
quantizer that is symmetric around 0, ``z = -s (2^b - 1) / 2``, the offset is 0.

Shapes: R rows, K numbers of a row, b bits, W words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import KernelError, require
from shoal.kernel.formats.bipolar import codes_of, meant

WORD = 64


def words(k: int) -> int:
    """Words of a row of ``k`` bits."""
    return -(-k // WORD)


def split(codes_RK: Tensor, bits: int) -> Tensor:
    """Codes uint8 [R, K], each below 2^bits -> planes int64 [R, bits, W].

    Raises:
        KernelError: more than 8 bits or none, or a code that has more.
    """
    require(1 <= bits <= 8, "planes", bits, expected="1 to 8", error=KernelError)
    if codes_RK.dtype != torch.uint8 or codes_RK.dim() != 2 or codes_RK.shape[1] < 1:
        raise KernelError(
            f"codes: {codes_RK.dtype} {list(codes_RK.shape)}: expected uint8 [R, K], K at least 1"
        )
    if codes_RK.numel() and int(codes_RK.max()) >> bits:
        raise KernelError(
            f"codes: the largest is {int(codes_RK.max())}, which does not fit in {bits} bits; "
            f"expected 0 to {2**bits - 1}"
        )
    count = words(codes_RK.shape[1])
    wide = torch.nn.functional.pad(codes_RK, (0, count * WORD - codes_RK.shape[1]))
    eights = wide.view(len(wide), -1, 8)
    powers = (1 << torch.arange(8, device=wide.device)).to(torch.uint8)
    planes = [
        (((eights >> i) & 1) * powers).sum(-1, dtype=torch.uint8).view(torch.int64)
        for i in range(bits)
    ]
    return torch.stack(planes, dim=1)


def join(planes_RbW: Tensor, k: int) -> Tensor:
    """Planes -> codes uint8 [R, k]; the inverse of :func:`split`.

    Raises:
        KernelError: no planes of rows of ``k``.
    """
    if (
        planes_RbW.dtype != torch.int64
        or planes_RbW.dim() != 3
        or not (1 <= planes_RbW.shape[1] <= 8 and planes_RbW.shape[2] == words(k))
    ):
        raise KernelError(
            f"planes: {planes_RbW.dtype} {list(planes_RbW.shape)}: expected int64 "
            f"[R, 1 to 8, {words(k)}] for rows of K = {k}"
        )
    places = torch.arange(WORD, device=planes_RbW.device)
    codes = torch.zeros(
        planes_RbW.shape[0], words(k) * WORD, dtype=torch.uint8, device=planes_RbW.device
    )
    for i in range(planes_RbW.shape[1]):
        plane = (planes_RbW[:, i, :, None] >> places) & 1
        codes |= plane.flatten(1).to(torch.uint8) << i
    return codes[:, :k].contiguous()


def pack(integers_RK: Tensor, bits: int) -> Tensor:
    """Odd integers -> planes.

    Raises:
        KernelError: one is even or too large for so many bits.
    """
    return split(codes_of(integers_RK, bits), bits)


def unpack(planes_RbW: Tensor, k: int) -> Tensor:
    """Planes -> odd integers int64 [R, k]."""
    return meant(join(planes_RbW, k), planes_RbW.shape[1])


def bipolar_of(scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale and offset of v that mean what scale and zero of u mean; codes stay as they are.

    Args:
        scale: s of ``w = s u + z``.
        zero: z.
        bits: of u.
    """
    return scale / 2, zero + scale * ((2**bits - 1) / 2)

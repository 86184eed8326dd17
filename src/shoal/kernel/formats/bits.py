"""Codes of any width from 1 to 8 bits as a dense little-endian bit stream.

Code number k of a row fills the bits k·b to (k+1)·b - 1 of that row, counted from the
lowest bit of its first byte; a code may lie across two bytes. A row begins at a byte, and its
last bits are 0. So 8 codes are b whole bytes, for every b.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import KernelError, require


def row_bytes(k: int, bits: int) -> int:
    """Bytes of a row of ``k`` codes."""
    return -(-k * bits // 8)


def _checked(bits: int) -> None:
    require(1 <= bits <= 8, "bits of a code", bits, expected="1 to 8", error=KernelError)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., K], each below 2^bits -> bytes uint8 [..., row_bytes(K, bits)].

    Raises:
        KernelError: a code needs more bits, or the type is not uint8.
    """
    _checked(bits)
    if codes.dtype != torch.uint8 or codes.dim() < 1:
        raise KernelError(
            f"codes: {codes.dtype} {list(codes.shape)}: expected uint8 of one or more dimensions"
        )
    if codes.numel() and int(codes.max()) >> bits:
        raise KernelError(
            f"codes: the largest is {int(codes.max())}, which {bits} bits cannot hold; "
            f"expected 0 to {2**bits - 1}"
        )
    k = codes.shape[-1]
    if bits == 8:
        return codes.clone(memory_format=torch.contiguous_format)
    eights = -(-k // 8)
    wide = torch.nn.functional.pad(codes, (0, eights * 8 - k))
    wide = wide.reshape(*codes.shape[:-1], eights, 8)
    word = torch.zeros(wide.shape[:-1], dtype=torch.int64, device=codes.device)
    for place in range(8):
        word |= wide[..., place].to(torch.int64) << (bits * place)
    out = torch.empty(*wide.shape[:-1], bits, dtype=torch.uint8, device=codes.device)
    for place in range(bits):
        out[..., place] = (word >> (8 * place)) & 0xFF
    return out.flatten(-2)[..., : row_bytes(k, bits)].contiguous()


def unpack(stream: Tensor, bits: int, k: int) -> Tensor:
    """Bytes uint8 [..., row_bytes(k, bits)] -> codes uint8 [..., k]; the inverse of :func:`pack`.

    Raises:
        KernelError: the rows are not as long as ``k`` codes are.
    """
    _checked(bits)
    if stream.dtype != torch.uint8 or stream.dim() < 1 or stream.shape[-1] != row_bytes(k, bits):
        raise KernelError(
            f"bit stream: {stream.dtype} {list(stream.shape)}: expected uint8 rows of "
            f"{row_bytes(k, bits)} bytes for {k} codes of {bits} bits"
        )
    if bits == 8:
        return stream.clone(memory_format=torch.contiguous_format)
    eights = -(-k // 8)
    wide = torch.nn.functional.pad(stream, (0, eights * bits - stream.shape[-1]))
    wide = wide.reshape(*stream.shape[:-1], eights, bits)
    word = torch.zeros(wide.shape[:-1], dtype=torch.int64, device=stream.device)
    for place in range(bits):
        word |= wide[..., place].to(torch.int64) << (8 * place)
    out = torch.empty(*wide.shape[:-1], 8, dtype=torch.uint8, device=stream.device)
    for place in range(8):
        out[..., place] = (word >> (bits * place)) & (2**bits - 1)
    return out.flatten(-2)[..., :k].contiguous()

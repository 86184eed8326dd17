"""Unsigned numbers of any width in bytes, and tensors that must be what a compressor writes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shoal.fields.federate.protocols import UpdateRefusedError

# Numbers whose bits are spread at a time; a multiple of 8, so that each piece ends with a byte.
_PIECE = 1 << 18


def pack_bits(values: np.ndarray, width: int) -> np.ndarray:
    """The low bits of unsigned numbers [K], one number after the other: uint8 [ceil(K width/8)]."""
    places = np.arange(width, dtype=np.uint32)
    pieces = [
        np.packbits(
            (values[at : at + _PIECE, None].astype(np.uint32) >> places) & 1, None, "little"
        )
        for at in range(0, len(values), _PIECE)
    ]
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def unpack_bits(data: np.ndarray, count: int, width: int) -> np.ndarray:
    """The numbers, uint32 [count], of such bytes."""
    places = np.arange(width, dtype=np.uint32)
    result = np.empty(count, np.uint32)
    for at in range(0, count, _PIECE):
        size = min(_PIECE, count - at)
        first = at * width // 8
        piece = data[first : first + packed_bytes(size, width)]
        bits = np.unpackbits(piece, count=size * width, bitorder="little").reshape(size, width)
        result[at : at + size] = (bits.astype(np.uint32) << places).sum(1, dtype=np.uint32)
    return result


def packed_bytes(count: int, width: int) -> int:
    """Bytes of so many numbers."""
    return (count * width + 7) // 8


def bits_for(values: int) -> int:
    """Bits that tell so many values apart."""
    return max(1, (values - 1).bit_length())


def kept(share: float, size: int) -> int:
    """A share of the numbers, at least one of them."""
    return min(size, max(1, round(share * size)))


def check_tensors(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Compare tensors with their names, types and shapes.

    Args:
        tensors: that have arrived.
        wanted: name -> type and shape.

    Raises:
        UpdateRefusedError: they differ, or a number of them is not finite.
    """
    if set(tensors) != set(wanted):
        raise UpdateRefusedError(
            f"update: tensors {sorted(tensors)}; expected {', '.join(sorted(wanted))}"
        )
    for name, (dtype, shape) in wanted.items():
        tensor = tensors[name]
        if tensor.dtype != dtype or tensor.shape != shape:
            raise UpdateRefusedError(
                f"update: tensor {name} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} "
                f"{list(shape)}",
                reason="shape",
            )
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise UpdateRefusedError(
                f"update: tensor {name} has numbers that are not finite", reason="not finite"
            )

"""Numbers that are not finite, in bytes that are about to become a checkpoint.

All bits of the exponent are set in an infinity and in NaN. A native loop looks at them at the rate
of the memory, on the thread that writes, so training does not wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.checkpoint.checksum import native
from shoal.checkpoint.pieces import DTYPE_NAMES
from shoal.core.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import Tensor

# Names of dtypes in safetensors -> the bits of a number, and those of its exponent.
_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F32": (np.uint32, 0x7F800000),
    "F64": (np.uint64, 0x7FF0000000000000),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F),  # it has no infinities, and this NaN
}


class FiniteCheck(NamedTuple):
    """What of a rank's tensors is not finite.

    Args:
        bad: their names, in order.
        total: tensors that were looked at.
    """

    bad: tuple[str, ...]
    total: int


def all_finite(data: np.ndarray, dtype: str) -> bool:
    """Whether bytes hold finite numbers only; integers and truth values always do.

    Args:
        data: uint8, contiguous, whole elements from the first byte on.
        dtype: safetensors' name of the type.
    """
    if dtype not in _BITS:
        return True
    bits, exponent = _BITS[dtype]
    if not data.nbytes:
        return True
    library = native()
    aligned = data.ctypes.data % np.dtype(bits).itemsize == 0
    if library is None or bits is np.uint8 or not aligned:
        numbers = np.frombuffer(data.data, dtype=bits)
        return not bool(((numbers & bits(exponent)) == bits(exponent)).any())
    look = getattr(library, f"shoal_not_finite{8 * np.dtype(bits).itemsize}")
    return not look(data.ctypes.data, data.nbytes // np.dtype(bits).itemsize, exponent)


def finite_part(tensor: Tensor, first: int, last: int) -> bool:
    """Whether the elements are finite that some bytes of a tensor belong to.

    Args:
        tensor: contiguous, in host memory.
        first: first byte.
        last: one past the last.
    """
    import torch

    size = tensor.element_size()
    first, last = first // size * size, -(-last // size) * size
    data = tensor.reshape(-1).view(torch.uint8)[first:last].numpy()
    return all_finite(data, DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."), ""))


def of_tensors(tensors: Collection[tuple[str, Tensor]]) -> FiniteCheck:
    """What of named tensors is not finite, wherever they lie."""
    bad = tuple(dict.fromkeys(name for name, tensor in tensors if not _finite(tensor)))
    return FiniteCheck(bad, len({name for name, _ in tensors}))


def _finite(tensor: Tensor) -> bool:
    import torch

    tensor = tensor.detach()
    if not tensor.dtype.is_floating_point:
        return True
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return finite_part(tensor, 0, tensor.numel() * tensor.element_size())
    # Not every device has the question for its shortest types.
    return bool(torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all())


def refusal(what: str, found: FiniteCheck, rank: int) -> NonFiniteError:
    """The error about tensors that are not finite.

    Args:
        what: such as ``step 20: weights and optimizer state``.
        found: which.
        rank: whose.
    """
    return NonFiniteError(
        f"{what} not finite: {len(found.bad)} of {found.total} tensors of rank {rank}, the first "
        f"is {found.bad[0]!r}"
    )

"""Arrays as the algorithms see them, and memory that lies where it will be used."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import KernelError, require
from shoal.kernel.algorithms.policy import Policy, block, inline, par

# Types of elements, and what C++ calls them.
TYPES = {
    "float64": "double",
    "float32": "float",
    "int64": "int64_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
    "bool": "bool",
}
_LINE = 64


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array of one dimension.

    Args:
        array: keeps the memory.
        address: of the first element.
        dtype: name of the type of its elements.
        step: elements from one to the next.
    """

    array: np.ndarray
    address: int
    dtype: str
    step: int
    n: int


def view(where: str, given: Any) -> ArrayView:
    """An array of NumPy or a CPU tensor of PyTorch, of one dimension, with any stride.

    Raises:
        KernelError: it is something else.
    """
    torch = sys.modules.get("torch")
    array = given.detach().numpy() if torch and isinstance(given, torch.Tensor) else given
    if not isinstance(array, np.ndarray):
        raise KernelError(
            f"{where}: {type(given).__name__}; expected a NumPy array or a PyTorch tensor"
        )
    dtype, size = array.dtype.name, array.dtype.itemsize
    if array.ndim != 1 or dtype not in TYPES or not array.dtype.isnative:
        raise KernelError(
            f"{where}: {dtype} {list(array.shape)}; expected one dimension of "
            f"{', '.join(TYPES)} (reshape(-1) gives one)"
        )
    stride = array.strides[0]
    if stride % size or array.ctypes.data % size:
        raise KernelError(
            f"{where}: elements of {size} bytes at a stride of {stride} from address "
            f"{array.ctypes.data:#x}; expected multiples of {size} (a copy has them)"
        )
    return ArrayView(array, array.ctypes.data, dtype, stride // size, array.shape[0])


def overlaps(out: ArrayView, other: ArrayView) -> bool:
    """Whether they share memory other than element by element."""
    same = out.address == other.address and out.step == other.step and out.dtype == other.dtype
    return not same and np.shares_memory(out.array, other.array)


def allocate(n: int, dtype: str = "float64", *, policy: Policy = par) -> np.ndarray:
    """Zeros, each page first touched by the thread that has its share of such a range.

    Args:
        n: elements.
        dtype: float64, float32, int64, int32, uint8 or bool.
        policy: whose executor and cores will use them.

    Raises:
        KernelError: the type is none of these, or ``n`` is negative.
    """
    require(n >= 0, "algorithms.allocate n", n, expected="0 or more", error=KernelError)
    require(
        dtype in TYPES,
        "algorithms.allocate dtype",
        dtype,
        expected=f"one of {', '.join(TYPES)}",
        error=KernelError,
    )
    from shoal.kernel.algorithms.elementwise import fill
    from shoal.kernel.algorithms.policy import static

    size = np.dtype(dtype).itemsize
    raw = np.empty(n * size + _LINE, dtype=np.uint8)
    skip = -raw.ctypes.data % _LINE
    made: np.ndarray = raw[skip : skip + n * size].view(dtype)
    where = policy if policy.executor == inline else policy.on(block).with_(static())
    fill(where, made, 0)
    return made

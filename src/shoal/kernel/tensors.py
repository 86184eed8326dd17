"""Checks of the tensors that go to a kernel, and of what an address may be taken of."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import KernelError, require
from shoal.kernel.calls import Dtype

_DTYPES: dict[Dtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def dtype_of(name: Dtype) -> torch.dtype:
    """The type of torch by its short name."""
    return _DTYPES[name]


def name_of(dtype: torch.dtype) -> Dtype:
    """The short name of a type of torch.

    Raises:
        KernelError: no kernel computes in it.
    """
    for name, known in _DTYPES.items():
        if known == dtype:
            return name
    raise KernelError(f"dtype {dtype}: expected one of {', '.join(map(str, _DTYPES.values()))}")


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix is multiplied with ``x``: its own, or that of autocast."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def local(tensor: Tensor) -> Tensor:
    """The local part of a distributed tensor, or the tensor itself."""
    result: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return result


def constant(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A constant of a kernel as it wants it: this shape and type, contiguous.

    Raises:
        KernelError: it has another shape or type.
    """
    require(
        tuple(tensor.shape) == shape and tensor.dtype == dtype,
        f"kernel {name}",
        f"{tensor.dtype} {list(tensor.shape)}",
        expected=f"{dtype} {list(shape)}",
        error=KernelError,
    )
    return tensor.detach().contiguous()


def finite(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if all of it is finite.

    Raises:
        KernelError: a number is NaN or infinite; names the first.
    """
    bad = ~torch.isfinite(tensor)
    if bool(bad.any()):
        place = tuple(int(index) for index in bad.nonzero()[0])
        raise KernelError(
            f"{name}{list(place)} = {tensor[place].item()}: expected finite numbers; "
            f"{int(bad.sum())} of {tensor.numel()} are not"
        )
    return tensor

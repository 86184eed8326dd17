"""What the kernels of ``linear_lowbit`` share: checks of formats, weights and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats import weight_format
from shoal.kernel.formats.integer import Int
from shoal.kernel.protocols import PackedMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat

_GROUPS = (32, 64, 128, 256)


class LowbitKernel(BaseKernel):
    """Base of the kernels ``linear_lowbit.*``."""

    op: ClassVar[str] = "linear_lowbit"

    def _refuses(self, call: LowbitLinearCall) -> str | None:
        try:
            stored = weight_format(call.format)
            return self._refuses_format(call, stored, stored.group_of(call.k))
        except KernelError as cause:
            return f"cannot read them: {cause}"

    def _refuses_format(self, call: LowbitLinearCall, stored: BaseFormat, group: int) -> str | None:
        return None


def refuses_groups(stored: BaseFormat, group: int) -> str | None:
    """Why weights are no 4-bit integers whose groups fill a tile, or None."""
    if not isinstance(stored, Int) or stored.width != 4 or stored.keeps_half:
        return "reads int4 with groups only"
    if group not in _GROUPS:
        return f"reads groups of {', '.join(map(str, _GROUPS))}, not {group}"
    return None


def checked(call: LowbitLinearCall, weight: PackedMatrix) -> BaseFormat:
    """The format of a stored matrix, which is what the call says of it.

    Raises:
        KernelError: another format or shape, tensors that do not fit, a scale that is not
            finite.
    """
    if weight.format != call.format or weight.shape != (call.n, call.k):
        raise KernelError(
            f"kernel.linear_lowbit: given {weight.format} {list(weight.shape)}: expected "
            f"{call.format} {[call.n, call.k]}"
        )
    stored = weight_format(call.format)
    stored.check(weight)
    return stored


def require_rows(call: LowbitLinearCall, x: Tensor, dtype: torch.dtype) -> None:
    """Refuse rows of another type or length, or on another device.

    Raises:
        KernelError: says what was expected.
    """
    if x.dtype != dtype or x.shape[-1] != call.k or x.device.type != call.device:
        raise KernelError(
            f"kernel.linear_lowbit: rows are {x.dtype} {list(x.shape)} on {x.device}: "
            f"expected {dtype} [..., {call.k}] on {call.device}"
        )

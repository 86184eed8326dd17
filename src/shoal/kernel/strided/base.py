"""What the kernels that pack have in common: what they refuse, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import KernelError, require
from shoal.ir import Estimate, Interval, Machine
from shoal.kernel.base import BaseKernel
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import BlockList, Layout
from shoal.kernel.strided.datatype import BYTES_OF

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StridedKernel(BaseKernel):
    """Base of the kernels of ``pack`` and ``unpack``.

    Attributes:
        block_s: of a block, however short.
    """

    dtypes: ClassVar[tuple[str, ...]] = tuple(BYTES_OF)
    block_s: ClassVar[float] = 1e-9

    def refuses(self, call: Any) -> str | None:
        """Why it cannot move those bytes here, or None if it can."""
        if call.op == "unpack" and call.layout.overlaps:
            return (
                "would write a byte twice, because the type contains it twice; receive into "
                "another type"
            )
        return super().refuses(call)

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """Memory's time for the lines that hold the bytes, or the blocks' own."""
        estimate = super().estimate(call, machine)
        blocks = self.call_s + self.block_s * call.layout.runs
        if blocks <= estimate.step_s.value:
            return estimate
        return estimate.model_copy(
            update={
                "step_s": Interval.around(blocks, 0.6),
                "terms_s": {"blocks": blocks},
                "bound": "compute",
            }
        )


class PackKernel(StridedKernel):
    """Base of the kernels of ``pack``: a part adds ``_mover``."""

    op: ClassVar[str] = "pack"

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        """What copies the bytes of a layout: (buffer, packed bytes), both checked."""
        raise TypeError(f"{type(self).__name__} cannot run")

    def _prepare(self, call: Pack) -> Ready:
        import torch

        size, span, move = call.layout.size, call.layout.span, self._mover(call.layout)

        def pack(buffer: Tensor, out: Tensor | None = None) -> Tensor:
            _check_room(span, buffer)
            if out is None:
                out = torch.empty(size, dtype=torch.uint8, device=buffer.device)
            else:
                _check_packed(size, out, buffer)
            if size:
                move(buffer, out)
            return out

        return pack


class UnpackKernel(StridedKernel):
    """Base of the kernels of ``unpack``: a part adds ``_mover``."""

    op: ClassVar[str] = "unpack"

    def _mover(self, layout: Layout) -> Callable[[Tensor, Tensor], object]:
        """What copies packed bytes to their places: (buffer, packed bytes), both checked."""
        raise TypeError(f"{type(self).__name__} cannot run")

    def _prepare(self, call: Unpack) -> Ready:
        size, span, move = call.layout.size, call.layout.span, self._mover(call.layout)

        def unpack(packed: Tensor, buffer: Tensor) -> Tensor:
            _check_room(span, buffer)
            _check_packed(size, packed, buffer)
            if size:
                move(buffer, packed)
            return buffer

        return unpack


def _check_room(span: tuple[int, int], buffer: Tensor) -> None:
    """Refuse a layout that leaves the memory of its buffer.

    Args:
        span: of the layout, which takes longer to find than a short block to copy.
        buffer: whose first element is its offset 0.

    Raises:
        KernelError: names the bytes there are, and those that are asked for.
    """
    low, high = span
    before = buffer.storage_offset() * buffer.element_size()
    behind = buffer.untyped_storage().nbytes() - before
    if low < -before or high > behind:
        raise KernelError(
            f"strided type over bytes {low} .. {high} of a buffer {list(buffer.shape)}: expected "
            f"bytes within {-before} .. {behind}, the memory of the buffer"
        )


def _check_packed(size: int, packed: Tensor, like: Tensor) -> None:
    """Refuse packed bytes of another number, with gaps, or on another device.

    Raises:
        KernelError: names both.
    """
    good = (
        packed.is_contiguous()
        and packed.numel() * packed.element_size() == size
        and packed.device == like.device
    )
    if not good:  # the words of it cost more than a short copy
        require(
            good,
            "strided packed bytes",
            f"{packed.dtype} {list(packed.shape)} on {packed.device}",
            expected=f"contiguous, {size} bytes, on {like.device}",
            error=KernelError,
        )


def byte_tensor(buffer: Tensor) -> Tensor:
    """All bytes of a tensor's memory, uint8."""
    import torch

    storage = buffer.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


def offsets_of(layout: Layout, device: torch.device) -> Tensor:
    """Offset of every byte, in packed order: int64 [size]."""
    import torch

    def steps(count: int, stride: int = 1) -> Tensor:
        return torch.arange(count, device=device, dtype=torch.int64) * stride

    if isinstance(layout, BlockList):
        parts = [at + steps(n) for at, n in zip(layout.offsets, layout.lengths, strict=True)]
        return torch.cat(parts)
    result = steps(1)
    for count, stride in zip(layout.counts, layout.strides, strict=True):
        result = (steps(count, stride)[:, None] + result[None, :]).reshape(-1)
    return layout.start + result

"""``pack`` and ``unpack`` of tensors: the type is reduced once, the kernel chosen once.

:func:`commit` does both before there is anything to pack, as MPI's commit does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import KernelError, require
from shoal.kernel.dispatch import dispatch
from shoal.kernel.protocols import Ready
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import Layout, canonical
from shoal.kernel.strided.datatype import Datatype, from_strides

if TYPE_CHECKING:
    from torch import Tensor


def pack(
    buffer: Tensor,
    datatype: Datatype | None = None,
    *,
    count: int = 1,
    out: Tensor | None = None,
    order_free: bool = False,
    backend: str | None = None,
) -> Tensor:
    """The bytes of a type behind each other, uint8.

    Args:
        buffer: the tensor from whose address the type counts; or, without a type, the tensor
            of any strides whose elements are wanted, the last dimension fastest.
        datatype: which bytes.
        count: how many such types, each its extent behind the one before.
        out: a contiguous tensor of as many bytes to pack into; a new one, if not given.
        order_free: any order; unpack with the same type and ``order_free`` too.
        backend: reference, torch, cpp or triton; the fastest here, if not given.

    Raises:
        KernelError: the type leaves the buffer's memory, or ``out`` has another size.
    """
    ready = _chosen("pack", buffer, datatype, count, order_free, backend)
    packed: Tensor = ready(buffer, out)
    return packed


def commit(
    like: Tensor,
    datatype: Datatype | None = None,
    *,
    count: int = 1,
    order_free: bool = False,
    backend: str | None = None,
) -> Ready:
    """The function behind :func:`pack` for all tensors of such strides.

    Args:
        like: a tensor of the same shape, strides, type and device as those that will come.
        datatype: as of :func:`pack`; then only the device of ``like`` matters.
        count: as of :func:`pack`.
        order_free: as of :func:`pack`.
        backend: as of :func:`pack`.

    Returns:
        ``(buffer, out=None) -> bytes``, uint8; a call looks at nothing but the bounds.

    Raises:
        KernelError: the type overlaps where it may not, or the kernel refuses it.
    """
    return _chosen("pack", like, datatype, count, order_free, backend)


def unpack(
    packed: Tensor,
    buffer: Tensor,
    datatype: Datatype | None = None,
    *,
    count: int = 1,
    order_free: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Put packed bytes into their places in ``buffer``; returns it. See :func:`pack`.

    Raises:
        KernelError: the type names a byte twice or leaves the buffer's memory, or there are
            more or fewer packed bytes.
    """
    ready = _chosen("unpack", buffer, datatype, count, order_free, backend)
    tensor: Tensor = ready(packed, buffer)
    return tensor


def layout_of(view: Tensor, *, order_free: bool = False) -> Layout:
    """The canonical form of a tensor's bytes, from its own address."""
    return _view_layout(tuple(view.shape), tuple(view.stride()), view.element_size(), order_free)


@functools.lru_cache(maxsize=4096)
def _view_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int, order_free: bool
) -> Layout:
    return canonical(
        from_strides(shape, [stride * item for stride in strides], item), order_free=order_free
    )


def _chosen(
    op: Literal["pack", "unpack"],
    buffer: Tensor,
    datatype: Datatype | None,
    count: int,
    order_free: bool,
    backend: str | None,
) -> Ready:
    device = buffer.device.type
    if datatype is None:
        require(
            count == 1,
            f"{op} count",
            count,
            expected="1 for a tensor without a type",
            error=KernelError,
        )
        return _view_ready(
            op,
            tuple(buffer.shape),
            tuple(buffer.stride()),
            buffer.element_size(),
            order_free,
            device,
            backend,
        )
    return _type_ready(op, datatype, count, order_free, device, backend)


@functools.lru_cache(maxsize=4096)
def _view_ready(
    op: str,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    item: int,
    order_free: bool,
    device: Any,
    backend: str | None,
) -> Ready:
    return _prepared(op, _view_layout(shape, strides, item, order_free), device, backend)


@functools.lru_cache(maxsize=4096)
def _type_ready(
    op: str, datatype: Datatype, count: int, order_free: bool, device: Any, backend: str | None
) -> Ready:
    return _prepared(op, canonical(datatype, count, order_free=order_free), device, backend)


def _prepared(op: str, layout: Layout, device: Any, backend: str | None) -> Ready:
    call = Pack(layout, device) if op == "pack" else Unpack(layout, device)
    return dispatch(call, wanted=backend).prepare(call)

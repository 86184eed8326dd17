"""Messages of tensors of any strides: the holes stay at home.

``send(comm, view, peer)`` sends the elements of a view, the last dimension fastest, and
``receive`` puts them into another one. Either end may be contiguous, have other strides than
the other, or be a plain ``comm.send`` or ``comm.receive`` of as many elements.

Where both ends have the same strides, a measured model may choose how they travel: see
:mod:`shoal.claims.lab.strided.method`.

Source: Pearson et al., TEMPI: An Interposed MPI Library with a Canonical Representation of
CUDA-aware Datatypes, 2021.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from shoal.claims.lab.strided.method import METHODS, Method, MethodModel
from shoal.core.errors import ConfigError, KernelError, nearest, require
from shoal.kernel.strided.canonical import Layout, StridedBlock

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm, Pending

TAG = "strided"


def send(
    comm: Comm,
    view: Tensor,
    target: int,
    *,
    tag: str = TAG,
    method: Method | Literal["auto"] = "auto",
    model: MethodModel | None = None,
) -> Pending:
    """Start sending the elements of a tensor of any strides.

    The tensor may be written again after ``wait``.

    Args:
        comm: the ranks.
        view: what to send.
        target: to whom.
        tag: as the receiver's.
        method: oneshot, device, staged or blocks; ``auto`` is what the model says, or, without
            one, to pack where the tensor lies and send that. ``blocks`` sends a message a
            block: the receiver must ask for it too, and have blocks of the same length.
        model: the same at both ends, whose tensors then have the same strides; see
            :func:`shoal.claims.lab.strided.tables.agreed`.

    Raises:
        ConfigError: there is no such method, or it cannot be used for this tensor.
        RankError: there is no such rank.
    """
    layout, how = _decided(comm, view, target, method, model)
    view = view.detach()
    if not layout.size:
        return _After([], _nothing)
    if how == "blocks":
        return _After([comm.send(x, target, tag=tag) for x in _blocks(view, layout)], _nothing)
    if how != "staged" and view.is_contiguous():
        return comm.send(view, target, tag=tag)
    from shoal.claims.lab.strided.api import pack

    packed = _BUFFERS.take(layout.size, view.device.type)
    pack(view, out=packed, order_free=model is not None)
    buffers = [packed]
    if how == "staged":
        buffers.append(_BUFFERS.take(layout.size, "cpu"))
        buffers[1].copy_(packed)
    sent = comm.send(buffers[-1].view(view.dtype), target, tag=tag)
    return _After([sent], lambda: _BUFFERS.give(buffers))


def receive(
    comm: Comm,
    view: Tensor,
    source: int,
    *,
    tag: str = TAG,
    method: Method | Literal["auto"] = "auto",
    model: MethodModel | None = None,
) -> Pending:
    """Start receiving into a tensor of any strides; its elements are there after ``wait``.

    See :func:`send`.

    Raises:
        ConfigError: there is no such method, or it cannot be used for this tensor.
        KernelError: an element would be written twice, as in an expanded tensor.
        RankError: there is no such rank.
    """
    layout, how = _decided(comm, view, source, method, model)
    view = view.detach()
    if not layout.size:
        return _After([], _nothing)
    if layout.overlaps:
        raise KernelError(
            f"parallel.strided.receive: a tensor {list(view.shape)} of strides "
            f"{list(view.stride())} has elements in one place; receive into one that has not"
        )
    if how == "blocks":
        return _After([comm.receive(x, source, tag=tag) for x in _blocks(view, layout)], _nothing)
    if how != "staged" and view.is_contiguous():
        return comm.receive(view, source, tag=tag)
    packed = _BUFFERS.take(layout.size, view.device.type)
    buffers = [packed] if how != "staged" else [packed, _BUFFERS.take(layout.size, "cpu")]

    def unpacked() -> None:
        from shoal.claims.lab.strided.api import unpack

        if how == "staged":
            packed.copy_(buffers[1])
        unpack(packed, view, order_free=model is not None)
        _BUFFERS.give(buffers)

    return _After([comm.receive(buffers[-1].view(view.dtype), source, tag=tag)], unpacked)


def locality(comm: Comm, peer: int) -> str:
    """``node`` for a peer on this rank's node, ``far`` for others."""
    size = comm.ranks_per_node
    if size is None or comm.ranks[comm.rank] // size == comm.ranks[peer] // size:
        return "node"
    return "far"


class _After:
    """Several things under way, and then something to be done, once."""

    def __init__(self, pending: list[Pending], then: Callable[[], None]) -> None:
        self._pending, self._then = pending[::-1], then

    def wait(self) -> None:
        """Return when all of it is there."""
        while self._pending:
            self._pending[-1].wait()
            self._pending.pop()
        then, self._then = self._then, _nothing
        then()


def _nothing() -> None:
    pass


class _Buffers:
    """Memory of packed bytes, used again: to map new memory takes longer than to fill it."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, str], list[Tensor]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int, device: str) -> Tensor:
        import torch

        with self._lock:
            kept = self._free[size, device]
            if kept:
                return kept.pop()
        return torch.empty(size, dtype=torch.uint8, device=device)

    def give(self, buffers: list[Tensor]) -> None:
        with self._lock:
            for buffer in buffers:
                kept = self._free[buffer.numel(), buffer.device.type]
                if len(kept) < 4:
                    kept.append(buffer)
            while len(self._free) > 64:
                del self._free[next(iter(self._free))]


_BUFFERS = _Buffers()


def _decided(
    comm: Comm, view: Tensor, peer: int, method: str, model: MethodModel | None
) -> tuple[Layout, Method]:
    from shoal.claims.lab.strided.api import layout_of

    layout = layout_of(view, order_free=model is not None)
    on_device = view.device.type != "cpu"
    require(
        method == "auto" or method in METHODS,
        "parallel.strided method",
        method,
        expected=f"auto, {', '.join(METHODS)}",
        hint=nearest(method, ("auto", *METHODS)),
    )
    if method == "auto" and model is not None and layout.size:
        return layout, model.choose(layout, locality(comm, peer))
    if method == "auto":
        here: Method = "oneshot"
        if on_device:
            here = "device" if comm.device != "cpu" else "staged"
        return layout, here
    if method == "device" and not (on_device and comm.device != "cpu"):
        raise ConfigError(
            "parallel.strided method = 'device': expected a tensor and a communicator of a "
            "device; use oneshot, staged or blocks on the host"
        )
    if method in ("oneshot", "staged") and comm.device != "cpu":
        raise ConfigError(
            f"parallel.strided method = {method!r}: this communicator sends from the device; "
            "use device or blocks"
        )
    if method == "oneshot" and on_device:
        raise ConfigError(
            "parallel.strided method = 'oneshot': expected a tensor of the host; use staged"
        )
    chosen: Method = next(name for name in METHODS if name == method)
    return layout, chosen


def _blocks(view: Tensor, layout: Layout) -> list[Tensor]:
    """Every block of a tensor's bytes, in packed order, where it lies."""
    from shoal.kernel.strided.base import byte_tensor

    assert isinstance(layout, StridedBlock)
    whole = byte_tensor(view)
    here = view.storage_offset() * view.element_size() + layout.start
    steps = [
        range(0, n * s, s) if s else [0] * n
        for n, s in zip(layout.counts[:0:-1], layout.strides[:0:-1], strict=True)
    ]
    places = (here + sum(offsets) for offsets in itertools.product(*steps))
    return [whole[at : at + layout.counts[0]] for at in places]

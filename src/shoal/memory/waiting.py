"""What autograd saves waits for the backward pass in the host's memory.

A storage is copied once, however many tensors on it are saved, while the forward pass goes on;
the backward pass gets its bytes back, those that come next ahead of their use where the device has
room. What is still on the device when it is wanted is taken from there.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 5.1.2 (activation checkpoints in CPU
memory).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.memory.mover import Ticket
    from shoal.memory.tier import Block
    from shoal.memory.tiers import Tiers

__all__ = ["Waiting"]

# Bytes of a storage from which it pays to send it away.
_LEAST = 4096
# What leaves the device at a time is no more than so many of the largest.
_LEAVING = 3


class _Away:
    """One storage that waits.

    Attributes:
        source: the storage, while it lives.
        leaving: of the copy to the host.
        fetched: its bytes, back on the device.
        coming: of the copy that brings them.
    """

    def __init__(self, block: Block, source: torch.UntypedStorage, number: int) -> None:
        self.block, self.number = block, number
        self.source = weakref.ref(source)
        self.leaving: Ticket | None = None
        self.fetched: Tensor | None = None
        self.coming: Ticket | None = None


class _Slip(NamedTuple):
    """What autograd keeps in the place of a tensor."""

    away: _Away
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Waiting:
    """Packs and unpacks what autograd saves.

    Args:
        tiers: places and ways.
        spare: bytes of the device that may be filled ahead of their use.
    """

    def __init__(self, tiers: Tiers, spare: Callable[[], int]) -> None:
        self._tiers, self._spare = tiers, spare
        self._known: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        self._order: list[weakref.ref[_Away]] = []
        self._leaving: deque[Ticket] = deque()
        self._largest = 0
        self._ended: deque[tuple[Block, Ticket]] = deque()
        self.waited_s = 0.0

    @property
    def early_bytes(self) -> int:
        """Bytes on the device that nobody has asked for yet."""
        return sum(
            away.block.nbytes
            for away in self._known.values()
            if away.coming is not None and not away.coming.done()
        )

    def begin(self) -> None:
        """A step begins; nothing waits from the one before."""
        self._settle()
        self._order.clear()
        self._known.clear()

    def pack(self, tensor: Tensor) -> _Slip | Tensor:
        """Send the storage of a tensor away, once.

        Raises:
            TierFullError: the host has no room for it.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() < _LEAST or tensor.device.type != self._tiers.device.device.type:
            return tensor
        away = self._known.get(storage._cdata)
        if away is None or away.source() is not storage:
            away = self._send(tensor, storage)
        return _Slip(
            away,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def _send(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Away:
        self._settle()
        tiers, nbytes = self._tiers, storage.nbytes()
        self._largest = max(self._largest, nbytes)
        while sum(t.nbytes for t in self._leaving) + nbytes > _LEAVING * self._largest:
            self._leaving.popleft().wait()
        what = f"saved {'x'.join(map(str, tensor.shape))} for the backward pass"
        block = tiers.host.alloc(nbytes, what)
        away = _Away(block, storage, len(self._order))
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(storage, 0, (nbytes,), (1,))
        away.leaving = tiers.down.copy(source, self._view(block))
        self._leaving.append(away.leaving)
        self._order.append(weakref.ref(away))
        self._known[storage._cdata] = away
        weakref.finalize(away, self._ended.append, (block, away.leaving)).atexit = False
        return away

    def _view(self, block: Block) -> Tensor:
        with self._tiers.scope.outside():
            return self._tiers.host.view(block, torch.uint8, (block.nbytes,))

    def unpack(self, slip: _Slip) -> Tensor:
        """The tensor again, on the device."""
        away = slip.away
        storage = away.source()
        if storage is None:
            if away.fetched is None:
                self._fetch(away)
            self._ahead(away.number)
            if away.coming is not None:
                self.waited_s += away.coming.wait()
                away.coming = None
            assert away.fetched is not None
            storage = away.fetched.untyped_storage()
        found = torch.empty(0, dtype=slip.dtype, device=self._tiers.device.device)
        return found.set_(storage, slip.offset, slip.shape, slip.stride)

    def _fetch(self, away: _Away) -> None:
        tiers, nbytes = self._tiers, away.block.nbytes
        fetched = torch.empty(nbytes, dtype=torch.uint8, device=tiers.device.device)
        leaving = away.leaving
        assert leaving is not None
        from_host = self._view(away.block)

        def work() -> None:
            leaving.wait()
            fetched.copy_(from_host)

        away.fetched = fetched
        away.coming = tiers.up.submit(work, nbytes)

    def _ahead(self, number: int) -> None:
        """Start to fetch what was saved before, which is wanted next."""
        spare = self._spare() - self.early_bytes
        for before in range(number - 1, max(-1, number - 5), -1):
            away = self._order[before]()
            if away is None or away.fetched is not None or away.source() is not None:
                continue
            spare -= away.block.nbytes
            if spare < 0:
                return
            self._fetch(away)

    def make_room(self) -> None:
        """Return when everything that leaves the device has left."""
        while self._leaving:
            self._leaving.popleft().wait()

    def _settle(self) -> None:
        """Give back the host's blocks of what nobody waits for any more."""
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()
        while self._ended:
            block, leaving = self._ended.popleft()
            leaving.wait()
            self._tiers.host.free(block)

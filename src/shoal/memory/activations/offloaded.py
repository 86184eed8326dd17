"""Storages that leave the device between the forward and the backward pass, once each.

A storage is sent away when the first tensor on it is saved, however many there are; what is kept in
the place of each is a slip. Who wants a tensor again gets the storage while it is still alive, and
else the bytes that were fetched, with what comes next on its way. Where the bytes wait, and what
comes next, is for sub-classes to say.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.places import Tiers
    from shoal.memory.tiers.tier import TierBlock

LEAST = 4096
"""Bytes of a storage from which it pays to send it away."""


class OffloadedStorage:
    """One storage that waits.

    Args:
        block: where its bytes are.

    Attributes:
        leaving: of the copy that frees the device.
        fetched: its bytes, back on the device.
        coming: of the copy that brings them.
    """

    def __init__(self, block: TierBlock, source: torch.UntypedStorage) -> None:
        self.block = block
        self.source = weakref.ref(source)
        self.leaving: Ticket | None = None
        self.fetched: Tensor | None = None
        self.coming: Ticket | None = None


_A = TypeVar("_A", bound=OffloadedStorage)


class TensorPlaceholder(NamedTuple):
    """Placeholder of an offloaded tensor."""

    away: OffloadedStorage
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class StorageOffload(ABC, Generic[_A]):
    """Sends storages away and brings them back.

    Args:
        spare: bytes of the device that may be filled ahead of their use.

    Attributes:
        waited_s: seconds for which the passes have waited.
    """

    most_leaving = 3
    """What leaves the device at a time is no more than so many of the largest."""

    def __init__(self, tiers: Tiers, spare: Callable[[], int]) -> None:
        self._tiers, self._spare = tiers, spare
        self._known: weakref.WeakValueDictionary[int, _A] = weakref.WeakValueDictionary()
        self._leaving: deque[Ticket] = deque()
        self._largest = 0
        self.waited_s = 0.0

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is left where it is: it is small, or not on the device."""
        if tensor.untyped_storage().nbytes() < LEAST:
            return True
        return tensor.device.type != self._tiers.device.device.type

    def pack(self, tensor: Tensor) -> TensorPlaceholder | Tensor:
        """Send the storage of a tensor away, once; the tensor itself if it stays.

        Raises:
            TierFullError: there is no room for it.
        """
        return tensor if self.stays(tensor) else self.sent_away(tensor)

    def sent_away(self, tensor: Tensor) -> TensorPlaceholder:
        """Offload the storage of a tensor, once; see :meth:`pack`."""
        storage = tensor.untyped_storage()
        away = self._known.get(storage._cdata)
        if away is None or away.source() is not storage:
            away = self._depart(tensor, storage)
            self._known[storage._cdata] = away
        return TensorPlaceholder(
            away, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def unpack(self, slip: TensorPlaceholder) -> Tensor:
        """The tensor again, on the device."""
        away: _A = slip.away  # type: ignore[assignment]
        storage = away.source()
        if storage is None:
            if away.fetched is None:
                self._fetch(away)
            self._ahead(away)
            if away.coming is not None:
                self.waited_s += away.coming.wait()
                away.coming = None
            assert away.fetched is not None
            storage = away.fetched.untyped_storage()
        array = torch.empty(0, dtype=slip.dtype, device=self._tiers.device.device)
        return array.set_(storage, slip.offset, slip.shape, slip.stride)

    def make_room(self) -> None:
        """Return when everything that leaves the device has left."""
        while self._leaving:
            self.waited_s += self._leaving.popleft().wait()

    def _depart(self, tensor: Tensor, storage: torch.UntypedStorage) -> _A:
        nbytes = storage.nbytes()
        self.settle()
        self._largest = max(self._largest, nbytes)
        most = self.most_leaving * self._largest
        while sum(ticket.nbytes for ticket in self._leaving) + nbytes > most:
            self.waited_s += self._leaving.popleft().wait()
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        source.set_(storage, 0, (nbytes,), (1,))
        away = self._send(source, storage, f"saved {'x'.join(map(str, tensor.shape))}")
        assert away.leaving is not None
        self._leaving.append(away.leaving)
        return away

    def settle(self) -> None:
        """Give back the blocks of what is no longer waited for."""
        while self._leaving and self._leaving[0].done():
            self._leaving.popleft().wait()

    def _view(self, block: TierBlock) -> Tensor:
        """A block on the host."""
        with self._tiers.scope.outside():
            return self._tiers.host.view(block, torch.uint8, (block.nbytes,))

    def _from_host(self, away: _A, stored: Ticket) -> None:
        """Have what waits on the host, once it is stored, come back."""
        from_host, fetched = self._view(away.block), self._made(away)

        def work() -> None:
            stored.wait()
            fetched.copy_(from_host)

        away.coming = self._tiers.up.submit(work, away.block.nbytes)

    def _made(self, away: _A) -> Tensor:
        """Memory of the device for what comes back."""
        where = self._tiers.device.device
        away.fetched = torch.empty(away.block.nbytes, dtype=torch.uint8, device=where)
        return away.fetched

    @abstractmethod
    def _send(self, source: Tensor, storage: torch.UntypedStorage, what: str) -> _A:
        """Begin to copy a storage, of which ``source`` are the bytes, to where it waits."""

    @abstractmethod
    def _fetch(self, away: _A) -> None:
        """Begin to bring it back."""

    @abstractmethod
    def _ahead(self, away: _A) -> None:
        """Begin to bring what is wanted after it, as far as the device has room."""

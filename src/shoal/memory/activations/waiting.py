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
from typing import TYPE_CHECKING

import torch

from shoal.memory.activations.offloaded import OffloadedStorage, StorageOffload

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.places import Tiers
    from shoal.memory.tiers.tier import TierBlock

# Storages before the one that is wanted that are fetched ahead.
_AHEAD = 4


class _Waits(OffloadedStorage):
    """One storage, with its number in the order of the forward pass."""

    def __init__(self, block: TierBlock, source: torch.UntypedStorage, number: int) -> None:
        super().__init__(block, source)
        self.number = number


class Waiting(StorageOffload[_Waits]):
    """Packs and unpacks what autograd saves.

    Args:
        spare: bytes of the device that may be filled ahead of their use.
    """

    def __init__(self, tiers: Tiers, spare: Callable[[], int]) -> None:
        super().__init__(tiers, spare)
        self._order: list[weakref.ref[_Waits]] = []
        self._ended: deque[tuple[TierBlock, Ticket]] = deque()

    @property
    def early_bytes(self) -> int:
        """Bytes on the device that were prefetched and not requested yet."""
        return sum(
            away.block.nbytes
            for away in self._known.values()
            if away.coming is not None and not away.coming.done()
        )

    def begin(self) -> None:
        """A step begins; nothing waits from the one before."""
        self.settle()
        self._order.clear()
        self._known.clear()

    def _send(self, source: Tensor, storage: torch.UntypedStorage, what: str) -> _Waits:
        tiers = self._tiers
        block = tiers.host.alloc(source.nbytes, f"{what} for the backward pass")
        away = _Waits(block, storage, len(self._order))
        leaving = away.leaving = tiers.down.copy(source, self._view(block))
        self._order.append(weakref.ref(away))
        weakref.finalize(away, self._ended.append, (block, leaving)).atexit = False
        return away

    def _fetch(self, away: _Waits) -> None:
        assert away.leaving is not None
        self._from_host(away, away.leaving)

    def _ahead(self, away: _Waits) -> None:
        """Start to fetch what was saved before, which is wanted next."""
        spare = self._spare() - self.early_bytes
        for before in range(away.number - 1, max(-1, away.number - 1 - _AHEAD), -1):
            other = self._order[before]()
            if other is None or other.fetched is not None or other.source() is not None:
                continue
            spare -= other.block.nbytes
            if spare < 0:
                return
            self._fetch(other)

    def settle(self) -> None:
        """Give back the host's blocks of what is no longer waited for."""
        super().settle()
        while self._ended:
            block, leaving = self._ended.popleft()
            leaving.wait()
            self._tiers.host.free(block)

"""What a computation keeps alive on its device, counted against a budget.

On a GPU the allocator counts. Elsewhere :class:`DeviceScope` does: every operator that runs inside
it is seen, the storages of its results are counted until the last tensor on them is gone, and the
operator that passes the budget is the one that fails. A storage is counted once, whatever views
there are of it; what lies in the tier's own blocks is counted there.

As on a GPU, an operator inside cannot use what lies outside: a policy that forgets to fetch
something is detected. A tensor of numbers that Python gives inside (``torch.tensor``) lies there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DeviceMemoryError
from shoal.core.sizes import human_bytes
from shoal.kernel.operators import OperatorMode, tensors_in
from shoal.memory.tiers.tier import BudgetedTier

_NAMED = 3
# Asked where a parameter gets other memory; it looks at no numbers.
_SWAP = torch.ops.aten._has_compatible_shallow_copy_type.default
# How numbers of Python's come in; its result is counted.
_LIFT = torch.ops.aten.lift_fresh.default


class DeviceScope(OperatorMode):
    """Counts what operators inside it allocate, against a tier's budget.

    Args:
        tier: the device; its blocks are part of it.
        strict: operators may only use what lies there. Single numbers may come from anywhere.

    Attributes:
        make_room: called with the missing bytes before an operator fails: frees memory that can be
            evicted or whose offloading is in progress.
    """

    def __init__(self, tier: BudgetedTier, *, strict: bool = True) -> None:
        super().__init__()
        self.tier = tier
        self._strict = strict
        self._paused = 0
        # Storage -> its bytes and the operator that made it, while it lives.
        self._live: dict[int, tuple[int, str]] = {}
        # Storages end on any thread; what they took is given back on the one that counts.
        self._ended: deque[int] = deque()
        self.make_room: Callable[[int], None] | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes outside of the tier's blocks."""
        self._settle()
        return sum(nbytes for nbytes, _ in self._live.values())

    @property
    def room(self) -> int:
        """Bytes that are free."""
        self._settle()
        return self.tier.room

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Operators in here are the host's: nothing is counted, anything may be used."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def adopt(self, tensor: Tensor, tag: str = "input") -> Tensor:
        """Count a tensor that was made outside, such as a batch, and let operators use it.

        Raises:
            DeviceMemoryError: there is no room for it.
        """
        self._count(tensor, tag)
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operator and count what it leaves behind."""
        kwargs = kwargs or {}
        if self._paused or self.tier.device.type != "cpu":
            return func(*args, **kwargs)
        self._settle()
        if self._strict and func not in (_SWAP, _LIFT):
            for value in (*tensors_in(args), *tensors_in(kwargs)):
                if value.numel() > 1 and not self._here(value):
                    raise DeviceMemoryError(
                        f"{func}: a tensor {list(value.shape)} of {value.dtype} lies outside of "
                        f"{self.tier.name}; fetch it first"
                    )
        result = func(*args, **kwargs)
        for value in tensors_in(result):
            self._count(value, str(func))
        return result

    def _here(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata in self._live or self.tier.owns(storage)

    def _count(self, tensor: Tensor, tag: str) -> None:
        self._settle()
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in self._live or self.tier.owns(storage):
            return
        if nbytes > self.tier.room and self.make_room is not None:
            self.make_room(nbytes)
            self._settle()
        if nbytes > self.tier.room:
            raise DeviceMemoryError(self._shortage(nbytes, tag))
        self.tier.reserve(nbytes, tag)
        self._live[key] = (nbytes, tag)
        # The object of a storage lives as long as the storage, for any holder.
        weakref.finalize(storage, self._ended.append, key).atexit = False

    def _settle(self) -> None:
        while self._ended:
            nbytes, _ = self._live.pop(self._ended.popleft())
            self.tier.release(nbytes)

    def _shortage(self, need: int, tag: str) -> str:
        largest = sorted(self._live.values(), reverse=True)[:_NAMED]
        held = ", ".join(f"{human_bytes(size)} of {name}" for size, name in largest) or "nothing"
        tier = self.tier
        blocks = tier.stats.used - self.live_bytes
        return (
            f"{tier.name}: {tag} needs {human_bytes(need)} and {human_bytes(tier.room)} of "
            f"{human_bytes(tier.capacity)} are free; the largest results alive: {held}; "
            f"{human_bytes(blocks)} are parameters and buffers"
        )

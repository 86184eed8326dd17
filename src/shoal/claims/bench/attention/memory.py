"""Counting the bytes that a computation keeps and holds.

On a CPU no allocator counts them, so results of operations are counted while they live: every
storage that an operation returns, until it is freed. What an operation holds inside itself is
not seen; inputs and what was there before do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.kernel.operators import tensors_in


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Live bytes of results while the mode is on.

    Attributes:
        now: bytes that live.
        peak: most of them at any time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation and count what it returns."""
        for x in tensors_in((args, kwargs)):
            # Unknown although no operator returned it: it was there before.
            self._known.setdefault(x.untyped_storage()._cdata, 0)
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out):
            storage = x.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known[key] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, key)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


class SavedBytes:
    """Bytes that are kept for the backward pass, besides some inputs; a context manager.

    Args:
        inputs: tensors that do not count.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._known = {x.untyped_storage()._cdata for x in inputs}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self.bytes += storage.nbytes()
        return x

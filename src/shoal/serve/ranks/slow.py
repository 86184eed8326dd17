"""Sums over ranks on an emulated slower link, or none, to see what hiding them is worth.

The sum itself is made as ever; it counts as there a fixed time after it began. One link carries
all sums, so one that begins while another is under way comes after it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm

# Who sleeps wakes up this much late; the rest is spent looking at the clock.
_LATE_S = 1e-3


class _Due:
    def __init__(self, inner: Any, due: float) -> None:
        self._inner, self._due = inner, due

    def wait(self) -> None:
        self._inner.wait()
        while (left := self._due - time.perf_counter()) > 0:
            if left > 2 * _LATE_S:
                time.sleep(left - _LATE_S)


class SlowSums:
    """A communicator whose sums are there ``latency_s`` after they could begin; the rest is as is.

    Args:
        comm: does the work.
        latency_s: s of one sum.
    """

    def __init__(self, comm: Comm, latency_s: float) -> None:
        self._comm, self._latency_s, self._free = comm, latency_s, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Tensor, **options: Any) -> _Due:
        """See :class:`~shoal.parallel.protocols.Comm`."""
        begun = time.perf_counter()
        pending = self._comm.all_reduce(x, **options)
        self._free = max(begun, self._free) + self._latency_s
        return _Due(pending, self._free)


class NoSums:
    """A communicator that leaves sums out: what it computes is wrong, and takes no longer for them.

    Args:
        comm: does the rest.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, x: Tensor, **_: object) -> NoSums:
        """See :class:`~shoal.parallel.protocols.Comm`."""
        return self

    def wait(self) -> None:
        """Nothing is under way."""

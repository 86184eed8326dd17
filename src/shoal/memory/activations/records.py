"""What a tensor cache knows: entries, the scopes and micro-batches they are of, what pays.

Source: SSDTrain, 2024, sections 3.2 and 3.4.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.memory.tiers.mover import Ticket
from shoal.memory.tiers.tier import TierBlock


@dataclass(slots=True)
class CacheStats:
    """What a cache has done.

    Args:
        saves: tensors that autograd saved.
        offloaded: of these, tensors whose memory goes to the disk.
        repeated: of these, tensors whose memory was saved before.
        kept: of all, tensors that stay.
        written_bytes: to the disk.
        read_bytes: from it.
        forwarded: entries that were needed before they were written.
        called_off: of these, whose write had not begun.
        stall_s: s for which the backward pass waited.
    """

    saves: int = 0
    offloaded: int = 0
    repeated: int = 0
    kept: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    forwarded: int = 0
    called_off: int = 0
    stall_s: float = 0.0


class ScopeTimes(NamedTuple):
    """What one block did in a measured step.

    Args:
        nbytes: it saved, apart from what stays.
        made_s: when its forward pass was over, from the step's beginning.
        needed_s: when the backward pass came to it.
    """

    nbytes: int
    made_s: float
    needed_s: float


class OffloadExtent(NamedTuple):
    """How much is offloaded.

    Args:
        scopes: from the first, whose tensors go to the disk.
        nbytes: of these.
        of_bytes: of all.
    """

    scopes: int
    nbytes: int
    of_bytes: int


def choose_cut(
    scopes: list[ScopeTimes], write_bytes_per_s: float, read_bytes_per_s: float
) -> OffloadExtent:
    """The most scopes, from the first, that are written before they have to be read again.

    Source: SSDTrain, section 3.4.
    """
    written = 0.0
    total = 0
    best = OffloadExtent(0, 0, sum(scope.nbytes for scope in scopes))
    for number, scope in enumerate(scopes):
        if not scope.nbytes:
            continue
        written = max(written, scope.made_s) + scope.nbytes / write_bytes_per_s
        if written > scope.needed_s - scope.nbytes / read_bytes_per_s:
            break
        total += scope.nbytes
        best = best._replace(scopes=number + 1, nbytes=total)
    return best


class CacheEntry:
    """The memory behind saved tensors."""

    __slots__ = (
        "alias", "began", "block", "called_off", "device", "first", "handles", "key", "left",
        "live", "loaded", "nbytes", "scopes", "stored", "ticket", "version", "weak",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, scope: Scope, block: TierBlock, key: tuple[int, int]
    ) -> None:
        storage = tensor.untyped_storage()
        self.nbytes, self.device = storage.nbytes(), tensor.device
        self.block, self.key = block, key
        self.scopes = [scope]  # that have saved it, in their order
        self.version = tensor._version
        # Knows of writes to the tensor, and holds none of its memory.
        self.alias = tensor.detach()
        with torch.no_grad():
            self.alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.live: torch.UntypedStorage | None = storage
        self.loaded: Tensor | None = None  # uint8, whole sectors
        # The memory, as long as it is referenced, and where the entry begins in it.
        self.weak, self.first = weakref.ref(storage), 0
        self.began = self.stored = self.called_off = False
        self.ticket: Ticket | None = None
        self.handles = 0
        self.left = 0  # handles that the backward pass under way has not asked for


class _Cache(Protocol):
    def released(self, entry: CacheEntry, *, asked: bool) -> None:
        """A handle of an entry is gone."""


class SavedTensorHandle:
    """What autograd holds in place of a tensor.

    Args:
        cache: notified when it is gone.
        entry: the memory behind it.
        at: the scope that saved it; of several that saved one tensor, each has a handle.
        tensor: the tensor.
    """

    __slots__ = ("asked", "at", "cache", "dtype", "entry", "offset", "shape", "stride")

    def __init__(self, cache: _Cache, entry: CacheEntry, at: Scope, tensor: Tensor) -> None:
        self.cache, self.entry, self.at = cache, entry, at
        self.dtype, self.offset = tensor.dtype, int(tensor.storage_offset())
        self.shape, self.stride = tuple(tensor.shape), tensor.stride()
        self.asked = -1  # by which backward pass
        entry.handles += 1
        entry.left += 1

    def __del__(self) -> None:
        self.cache.released(self.entry, asked=self.asked >= 0)


@dataclass(slots=True, eq=False)
class Scope:
    """What one block of one micro-batch saved; ``nbytes`` of it were not saved before."""

    name: str
    index: int
    record: MicroBatchRecord
    entries: list[CacheEntry] = field(default_factory=list)
    nbytes: int = 0
    made_s: float = 0.0
    needed_s: float = 0.0


@dataclass(slots=True, eq=False)
class MicroBatchRecord:
    """The scopes of one micro-batch in the order of its forward pass."""

    number: int
    scopes: list[Scope] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    entries: dict[tuple[int, int], CacheEntry] = field(default_factory=dict)
    reached: int | None = None  # scope of the backward pass
    task: int = -1  # the backward pass

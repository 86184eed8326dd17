"""The tensor cache of SSDTrain, where autograd saves and asks again.

An :class:`~shoal.memory.activations.records.CacheEntry` is the memory behind saved tensors. It is
live, which is referred to, on its way to the disk, there, or loaded again; handles that autograd
holds keep it, and the last one that goes gives its place on the disk back. Everything but the
transfers happens in the thread that trains, so nothing here has a lock; one thread writes in the
order of the queue, so a write that is called off too late is over before its place is written for
another.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from shoal.core.errors import MachineError, ModelError, ShoalError
from shoal.ir.hooks import StepHook
from shoal.memory.activations.protocol import (
    Phase,
    ResidentTensor,
    check_version,
    in_backward,
    weight_of_cast,
)
from shoal.memory.activations.records import (
    CacheEntry,
    CacheStats,
    MicroBatchRecord,
    OffloadExtent,
    SavedTensorHandle,
    Scope,
    ScopeTimes,
    choose_cut,
)
from shoal.memory.tiers.disk import SECTOR, DiskTier, staging
from shoal.memory.tiers.mover import EmulatedLink, Mover, end_of_work
from shoal.memory.tiers.tier import TierBlock

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_CHUNK = 4 * 2**20
_DEPTH = 4096
_STAMP = "_shoal_stamp"
_WEIGHT = -1
_stamps = itertools.count()


class _Stays(ResidentTensor):
    """A tensor that stays, and where it was saved: a request for it shows the run is there."""

    __slots__ = ("at",)

    def __init__(self, tensor: Tensor, at: Scope | None) -> None:
        super().__init__(tensor, "" if at is None else at.name)
        self.at = at


class TensorCache(StepHook):
    """See :mod:`shoal.memory.activations.ssdtrain`; a context manager around the passes of a step.

    Args:
        model: its blocks are the scopes.
        disk: where tensors go; closed with the cache.
        adaptive: measure the first step, then write no more than pays.
        min_bytes: smaller tensors stay on the device.
        last: scopes at the end whose tensors stay.
        depth: scopes read ahead.
        links: to and from the disk, for emulation.
    """

    kind = "activation"

    def __init__(
        self,
        model: nn.Module,
        disk: DiskTier,
        *,
        adaptive: bool = True,
        min_bytes: int = 4096,
        last: int = 1,
        depth: int = 1,
        links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None),
    ) -> None:
        self.model, self.disk = model, disk
        self.stats = CacheStats()
        self.cut: OffloadExtent | None = None
        self.measured: list[ScopeTimes] = []
        self._adaptive, self._min, self._last, self._ahead = adaptive, min_bytes, last, depth
        self._names = _scopes_of(model)
        device = str(next((p.device for p in model.parameters()), "cpu"))
        self._stores = Mover("device-disk", link=links[0], depth=_DEPTH, device=device)
        self._loads = Mover("disk-device", link=links[1], depth=_DEPTH, device=device)
        self._staging = staging(_CHUNK)
        self._going: deque[CacheEntry] = deque()
        self._record: MicroBatchRecord | None = None
        self._stack: list[Scope] = []
        self._hooks: list[RemovableHandle] = []
        self._saving: contextlib.AbstractContextManager[Any] | None = None
        self._numbers = itertools.count()
        self._thread = threading.get_ident()
        self._let_go: deque[tuple[CacheEntry, bool]] = deque()
        self._steps = 0
        self._records: dict[int, MicroBatchRecord] = {}  # of this step
        self._began = 0.0

    # -- around a step

    def __enter__(self) -> Self:
        """Begin a step.

        Raises:
            MachineError: one has begun already, or the cache is closed.
        """
        if self._saving is not None:
            raise MachineError("ssdtrain: this step has begun already; one step at a time")
        self._reap()
        for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
            setattr(tensor.untyped_storage(), _STAMP, _WEIGHT)
        for name, module in self._names.items():
            self._hooks += [
                module.register_forward_pre_hook(self._hook(name, "enter"), prepend=True),
                module.register_forward_hook(self._hook(name, "leave"), always_call=True),
            ]
        self._thread, self._began = threading.get_ident(), time.perf_counter()
        self._saving = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self.microbatch(-1 - next(self._numbers))
        self._saving.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        """End it: nothing more is saved here; what a graph still holds can be had."""
        assert self._saving is not None
        self._saving.__exit__(kind, error, at)
        self._saving = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.clear()
        self._record = None
        records, self._records = self._records, {}
        if kind is not None:
            for entry in self._going:
                entry.called_off = True
            return
        for entry in self._going:
            if not entry.handles and not entry.called_off:
                assert entry.ticket is not None
                with contextlib.suppress(ShoalError):  # reported below
                    entry.ticket.wait()
        self._steps += 1
        # The first step is slower than all others.
        if self._adaptive and self.cut is None and self._steps > 1:
            self._choose(list(records.values())[-1])
        self._reap()

    def passes(self, what: str, *inputs: Tensor | None) -> contextlib.AbstractContextManager[Any]:
        """The cache itself, around the passes with gradients."""
        return self if what == "train" else contextlib.nullcontext()

    def written(self) -> None:
        """Wait until what was saved so far is on the disk, and let go of it."""
        for entry in self._going:
            assert entry.ticket is not None
            with contextlib.suppress(ShoalError):  # reported below
                entry.ticket.wait()
        self._reap()

    def microbatch(self, number: int) -> None:
        """What is saved from now on is of this micro-batch, which has a record of its own.

        Raises:
            MachineError: no step has begun.
        """
        if self._saving is None:
            raise MachineError("ssdtrain: no step has begun; use the cache around a training step")
        if number not in self._records:
            self._records[number] = MicroBatchRecord(number)
        self._record = self._records[number]
        self._stack = [self._scope("")]

    def on_module(self, name: str, phase: Phase) -> None:
        """The forward pass enters or leaves a scope."""
        record = self._record
        if record is None or in_backward():
            return
        if phase == "enter":
            if name in record.seen:  # the next micro-batch, unannounced
                self.microbatch(-1 - next(self._numbers))
            assert self._record is not None
            self._record.seen.add(name)
            self._stack[-1].made_s = time.perf_counter() - self._began
            self._stack.append(self._scope(name))
        elif len(self._stack) > 1:
            self._stack.pop().made_s = time.perf_counter() - self._began
            # What comes between this block and the next one is saved after it.
            if len(self._stack) == 1:
                self._stack = [self._scope(f"after {name}")]

    # -- what autograd calls

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor that is saved; a handle, or the tensor if it stays."""
        self._reap()
        self.stats.saves += 1
        record = self._record
        scope = self._stack[-1] if self._stack else None
        if record is None or scope is None or in_backward() or not self._goes(tensor, scope):
            self.stats.kept += 1
            return _Stays(tensor, scope)
        stamp = _stamped(tensor.untyped_storage())
        key = (stamp, tensor._version)
        entry = record.entries.get(key)
        self.stats.offloaded += 1
        if entry is not None:
            self.stats.repeated += 1
            if entry.scopes[-1] is not scope:
                entry.scopes.append(scope)
                scope.entries.append(entry)
        else:
            entry = self._store(tensor, scope, key)
        return SavedTensorHandle(self, entry, scope, tensor)

    def unpack(self, handle: Any) -> Tensor:
        """The tensor again.

        Raises:
            ModelError: it was modified in place after it was saved.
            TierFullError: the disk was full when it was to be written.
        """
        self._reap()
        task = torch._C._current_graph_task_id()
        if isinstance(handle, _Stays):
            if handle.at is not None:
                self._arrive(handle.at, task)
            return handle.get()
        entry: CacheEntry = handle.entry
        scope: Scope = handle.at
        check_version(entry.alias, entry.version, handle.shape, scope.name)
        self._arrive(scope, task)
        storage = self._storage(entry)
        if handle.asked != task:
            handle.asked = task
            entry.left -= 1
        array = torch.empty(0, dtype=handle.dtype, device=entry.device)
        offset = entry.first // handle.dtype.itemsize + handle.offset
        with torch.no_grad():
            array.set_(storage, offset, handle.shape, handle.stride)
        if entry.left <= 0:
            entry.loaded = None  # autograd holds what it still needs
        return array

    def close(self) -> None:
        """End the transfers and give the file back; the handles that are left are worth nothing."""
        self._stores.close()
        self._loads.close()
        self.disk.close()

    # -- inside

    def _hook(self, name: str, phase: Phase) -> Any:
        def run(*_: Any) -> None:
            self.on_module(name, phase)

        return run

    def _scope(self, name: str) -> Scope:
        assert self._record is not None
        scope = Scope(name, len(self._record.scopes), self._record)
        self._record.scopes.append(scope)
        return scope

    def _goes(self, tensor: Tensor, scope: Scope) -> bool:
        """Whether a tensor is one of those that go to the disk."""
        if tensor.layout != torch.strided or tensor.nbytes < self._min:
            return False
        if getattr(tensor.untyped_storage(), _STAMP, 0) == _WEIGHT:
            return False
        if weight_of_cast(tensor) is not None:
            return False
        if self.cut is not None and scope.index >= self.cut.scopes:
            return False
        # The last blocks are needed at once, and so is what comes after them.
        record = scope.record
        return len(record.seen) <= len(self._names) - self._last

    def _store(self, tensor: Tensor, scope: Scope, key: tuple[int, int]) -> CacheEntry:
        tag = f"{scope.name or 'the beginning'}: a tensor {list(tensor.shape)} of {tensor.dtype}"
        block = self.disk.alloc(tensor.untyped_storage().nbytes(), tag)
        entry = CacheEntry(tensor, scope, block, key)
        scope.record.entries[key] = entry
        scope.entries.append(entry)
        scope.nbytes += entry.nbytes

        made = end_of_work(tensor.device)

        def work() -> None:
            storage = entry.live
            if storage is None or entry.called_off:
                return
            entry.began = True
            if made is not None:
                made.synchronize()
            self._write(storage, block)

        entry.ticket = self._stores.submit(work, entry.nbytes)
        self._going.append(entry)
        return entry

    def _write(self, storage: torch.UntypedStorage, block: TierBlock) -> None:
        """In the thread of the stores: write memory piece by piece."""
        raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for start in range(0, block.nbytes, _CHUNK):
            piece = raw[start : start + _CHUNK]
            size = len(piece)
            whole = -(-size // SECTOR) * SECTOR
            self._staging[:size].copy_(piece)
            self.disk.write(TierBlock(block.start + start, size, block.tag), self._staging[:whole])

    def _reap(self) -> None:
        """Let go of what is written, and of what others let go."""
        while self._let_go:
            self._forget(*self._let_go.popleft())
        while self._going:
            entry = self._going[0]
            assert entry.ticket is not None
            if not entry.ticket.done():
                return
            self._going.popleft()
            # An error leads to the graph, and the graph to the entry: it must not have the error.
            ticket, entry.ticket = entry.ticket, None
            try:
                if not entry.called_off:
                    entry.called_off = True  # until it is known to be there
                    ticket.wait()
                    entry.called_off, entry.stored = False, True
                    entry.live = None
                    self.stats.written_bytes += entry.nbytes
                    self.disk.stats.bytes_in += entry.nbytes
            finally:
                # What was let go of while it was being written, whatever came of the write.
                if not entry.handles:
                    self._free(entry)

    def _arrive(self, scope: Scope, task: int) -> None:
        """The backward pass is at a scope: read ahead what it needs after it."""
        record = scope.record
        if record.task != task:
            record.task, record.reached = task, None
        if record.reached is not None and record.reached <= scope.index:
            return
        for passed in record.scopes[scope.index : record.reached]:
            passed.needed_s = time.perf_counter() - self._began
        record.reached = scope.index
        ahead = self._ahead
        for other in reversed(record.scopes[: scope.index + 1]):
            for entry in reversed(other.entries):
                self._load(entry)
            if other.entries and other is not scope:
                ahead -= 1
                if not ahead:
                    return

    def _load(self, entry: CacheEntry) -> None:
        """Start reading, unless it is here, or comes, or was never written."""
        if entry.loaded is not None or not entry.stored or entry.weak() is not None:
            return
        if entry.device.type != "cpu":
            into = torch.empty(entry.nbytes, dtype=torch.uint8, device=entry.device)
        else:
            into = staging(entry.nbytes)
        entry.loaded, entry.left = into, entry.handles
        entry.weak, entry.first = weakref.ref(into.untyped_storage()), int(into.storage_offset())
        block, free = entry.block, end_of_work(entry.device)
        # The thread must not be the last to have it: the device is counted by this one.
        given = [into]

        def work() -> None:
            target = given.pop()
            if free is None:
                self.disk.read(block, target)
                return
            read = staging(block.nbytes)
            self.disk.read(block, read)
            free.synchronize()
            target.copy_(read[: block.nbytes])

        entry.ticket = self._loads.submit(work, entry.nbytes)
        self.stats.read_bytes += entry.nbytes
        self.disk.stats.bytes_out += entry.nbytes

    def _storage(self, entry: CacheEntry) -> torch.UntypedStorage:
        """The memory of an entry, waited for."""
        if entry.live is not None:
            self.stats.forwarded += 1
            if not entry.began and not entry.called_off:
                entry.called_off = True
                self.stats.called_off += 1
            return entry.live
        self._load(entry)
        storage = entry.weak()
        if entry.loaded is not None:
            assert entry.ticket is not None
            self.stats.stall_s += entry.ticket.wait()
        assert storage is not None
        return storage

    def released(self, entry: CacheEntry, *, asked: bool) -> None:
        """Autograd has released a handle, in any thread."""
        if threading.get_ident() == self._thread:
            self._forget(entry, asked)
        else:
            self._let_go.append((entry, asked))

    def _forget(self, entry: CacheEntry, asked: bool) -> None:
        entry.handles -= 1
        entry.left -= not asked
        if entry.handles:
            return
        if entry.loaded is not None and entry.ticket is not None:
            with contextlib.suppress(ShoalError):  # it is no longer wanted
                entry.ticket.wait()
            entry.loaded = None
        if not entry.began:
            entry.called_off = True
        if entry.stored or entry.called_off:
            self._free(entry)

    def _free(self, entry: CacheEntry) -> None:
        scopes, entry.scopes = entry.scopes, []
        if not scopes:  # it was freed when its write was called off
            return
        entry.live = None
        self.disk.free(entry.block)
        for scope in scopes:
            scope.entries.remove(entry)
        scopes[0].record.entries.pop(entry.key, None)

    def _choose(self, record: MicroBatchRecord) -> None:
        """Measure is taken: how much pays."""
        times = []
        for scope in record.scopes:
            times.append(ScopeTimes(scope.nbytes, scope.made_s, scope.needed_s))
        write = self._stores.bytes / max(1e-9, self._stores.busy_s)
        read = self._loads.bytes / max(1e-9, self._loads.busy_s) if self._loads.bytes else write
        self.cut = choose_cut(times, write, read)
        self.measured = times


def _stamped(storage: torch.UntypedStorage) -> int:
    """The number of a storage, given to it when it is first seen; no other ever has it."""
    stamp: int | None = getattr(storage, _STAMP, None)
    if stamp is None:
        stamp = next(_stamps)
        setattr(storage, _STAMP, stamp)
    return stamp


def _scopes_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model; its parts, where it has no chain of blocks."""
    from shoal.memory.streaming.chain import find_blocks

    try:
        return dict(find_blocks(model)[1])
    except ModelError:
        return {n: m for n, m in model.named_children() if any(True for _ in m.parameters())}

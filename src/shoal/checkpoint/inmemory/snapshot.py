"""The trainer's side: its share of the state into the memory of its snapshot process.

Weights and optimizer state do not change while forward and backward compute. A snapshot begins
when an update is done; a thread copies it in buckets, with pauses, and before the next gradients
are summed over the ranks :meth:`Snapshots.settle` waits until it is coded. So when any rank
updates, all ranks hold a coded version of the step before: a failure loses at most that one.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, section 3 (asynchronous snapshots, bucketed).
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.checkpoint.checksum import copy_crc32c_at
from shoal.checkpoint.finite import FiniteCheck, finite_part, refusal
from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory.layout import (
    BoxEntry,
    BoxSegment,
    coding_groups,
    group_of,
    piece_bytes,
    shares,
)
from shoal.checkpoint.inmemory.wire import ENVIRONMENT, SECRET, Members, SnapshotClient
from shoal.checkpoint.tensor_snapshot import TensorSnapshot
from shoal.core.errors import CheckpointError, MachineError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from shoal.checkpoint.inmemory.protocols import MemoryCode
    from shoal.checkpoint.pieces import Piece
    from shoal.core.parts import Choice

# Share of the time until the next settling in which copying has to be through: coding follows.
_SPREAD = 0.4
# Smaller pauses than this are not worth waking up for.
_SHORTEST_PAUSE_S = 2e-4

Exchange = Callable[[bytes], list[bytes]]
"""Gives bytes to all replicas of this rank's part of the model; returns those of all, in order."""


class SnapshotCost(NamedTuple):
    """What one snapshot has cost.

    Args:
        bytes: copied by this rank.
        busy_s: time in which this rank copied.
        copy_s: from its beginning until all was copied, pauses included.
        code_s: from then until it was coded.
        waited_s: time for which the computation waited for it.
    """

    step: int
    bytes: int
    busy_s: float
    copy_s: float
    code_s: float
    waited_s: float


class _Run(NamedTuple):
    """Bytes that are copied at once.

    Args:
        key: name and offset of a box.
        first: byte of the box.
        at: byte of the piece.
        block: of the piece.
    """

    key: tuple[str, tuple[int, ...]]
    first: int
    at: int
    size: int
    block: int

    @property
    def end(self) -> int:
        """Byte of the piece behind it."""
        return self.at + self.size


class _Copied(NamedTuple):
    step: int
    bytes: int
    busy_s: float
    copy_s: float
    code_s: float


def members() -> tuple[Members, bytes] | None:
    """The snapshot processes that the environment names, and the secret; None if it names none."""
    place = os.environ.get(ENVIRONMENT)
    if place is None:
        return None
    result = Members.model_validate_json(Path(place).read_bytes())
    return result, bytes.fromhex(os.environ[SECRET])


class Snapshots:
    """Snapshots of one rank.

    Args:
        found: the snapshot processes.
        replicas: ranks that hold the same part of the model, this one among them.
        choice: the code.
        exchange: among the replicas.

    Raises:
        ConfigError: the replicas cannot be grouped for the code.
        RankError: the snapshot process does not answer.
    """

    def __init__(
        self,
        found: Members,
        secret: bytes,
        *,
        rank: int,
        replicas: Sequence[int],
        choice: Choice,
        exchange: Exchange,
    ) -> None:
        self.code: MemoryCode = MEMORY_CODES.build(choice, where="checkpoint.memory")
        self.group = group_of(
            rank,
            coding_groups(replicas, group=self.code.group, ranks_per_node=self.code.ranks_per_node),
        )
        self.code.check(len(self.group))
        self._choice = choice
        self._found = found
        self._rank = rank
        self._replicas = list(replicas)
        self._exchange = exchange
        self._client = SnapshotClient(found.places[rank], found.run, secret, rank=rank)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._pending: Future[_Copied] | None = None
        self._hurry = threading.Event()
        self._entries: list[BoxEntry] | None = None
        self._runs: list[_Run] = []
        self._block = 1
        self._slots: list[np.ndarray] = []
        self._began = self._interval = 0.0

    def due(self, step: int) -> bool:
        """Whether a snapshot is taken after ``step`` steps."""
        return step % self.code.every == 0

    def begin(self, step: int, held: Mapping[str, Sequence[Piece]], meta: dict[str, Any]) -> None:
        """Begin to copy the state of ``step``; it must not change before :meth:`settle`.

        All ranks call it, at the same steps.

        Args:
            step: steps done.
            held: everything this rank holds, by name, replicas included.
            meta: plain data to keep beside.

        Raises:
            CheckpointError: there is too little memory for the versions.
            RankError: the snapshot process is gone.
        """
        assert self._pending is None, "settle first"
        pieces = [(name, piece) for name, several in held.items() for piece in several]
        entries = [_entry(name, piece) for name, piece in pieces]
        if entries != self._entries:
            self._open(entries)
        boxes = {(e.name, e.offset): p.tensor for e, (_, p) in zip(entries, pieces, strict=True)}
        ready = _event(boxes)
        self._hurry.clear()
        self._began = time.perf_counter()
        kept = list(dict.fromkeys(run.key for run in self._runs))
        # A sample of what lies on a device would wait for the update that is still under way.
        watched = TensorSnapshot(
            [boxes[key] for key in kept], "sample" if ready is None else "version"
        )
        self._pending = self._worker.submit(self._copy, step, boxes, ready, meta, kept, watched)

    def settle(self) -> SnapshotCost | None:
        """Wait until the snapshot that was begun is coded; None if there is none.

        Raises:
            CheckpointError: it could not be; the version before it stays.
            RankError: a snapshot process is gone.
        """
        if self._pending is None:
            return None
        began = time.perf_counter()
        self._interval = began - self._began
        self._hurry.set()
        pending, self._pending = self._pending, None
        copied = pending.result()
        return SnapshotCost(*copied, waited_s=time.perf_counter() - began)

    def close(self) -> None:
        """End the thread; what was committed stays where it is."""
        self._hurry.set()
        self._client.close()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _open(self, entries: list[BoxEntry]) -> None:
        """Agree with the other replicas on what each keeps, and map the memory for it."""
        import numpy as np

        text = zlib.compress(json.dumps(entries).encode())
        lists = {
            rank: [
                BoxEntry(name, dtype, tuple(whole), tuple(offset), tuple(shape), nbytes)
                for name, dtype, whole, offset, shape, nbytes in json.loads(zlib.decompress(raw))
            ]
            for rank, raw in zip(self._replicas, self._exchange(text), strict=True)
        }
        kept = shares(lists)
        opened = self._client.call(
            "open",
            spec={
                "code": self._choice.model_dump(mode="json"),
                "group": self.group,
                "piece": max(piece_bytes(kept[rank]) for rank in self.group),
                "manifests": {
                    str(rank): [s.model_dump(mode="json") for s in kept[rank]]
                    for rank in self.group
                },
                "world": len(self._found.places),
            },
            generation=self._found.generation,
            places=[place.model_dump() for place in self._found.places],
        )
        path = f"/proc/{opened['pid']}/fd/{opened['file']}"
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as cause:
            raise MachineError(
                f"{path}: the memory of the snapshot process cannot be mapped ({cause.strerror}); "
                "trainer and process need to be of one user and to see each other's numbers"
            ) from cause
        mapped = mmap.mmap(file, 0)
        os.close(file)
        view = np.frombuffer(mapped, np.uint8)
        stride = opened["stride"]
        self._slots = [view[i * stride :][: opened["kept"]] for i in range(len(view) // stride)]
        self._runs = list(_runs(kept[self._rank], opened["block"], self.code.bucket))
        self._block = opened["block"]
        self._entries = entries

    def _copy(
        self,
        step: int,
        boxes: Mapping[Any, torch.Tensor],
        ready: Any,
        meta: dict[str, Any],
        kept: Sequence[tuple[str, tuple[int, ...]]],
        watched: TensorSnapshot,
    ) -> _Copied:
        """Fill the slot and commit it; on the thread of the snapshots."""
        began = time.perf_counter()
        slot = int(self._client.call("begin")["slot"])
        out = self._slots[slot]
        if ready is not None:
            ready.synchronize()
        total = self._runs[-1].end if self._runs else 0
        crcs = [0] * -(-total // self._block)
        busy, waiting = 0.0, 0
        bad: dict[str, None] = {}
        for run, seconds, finite in _copies(self._runs, boxes, out, crcs):
            busy += seconds
            waiting += run.size
            if not finite:
                bad[run.key[0]] = None
            if waiting >= self.code.bucket and not self._hurry.is_set():
                waiting = 0
                self._pause(busy, run.end, total, began)
        # What is not committed is never gone back to; the version before it stays.
        if bad:
            check = FiniteCheck(tuple(bad), len({name for name, _ in kept}))
            raise refusal(f"step {step}: weights or optimizer state are", check, self._rank)
        for number, (name, _) in enumerate(kept):
            if watched.changed(number, 0):
                raise CheckpointError(
                    f"step {step}: tensor {name!r} was changed while it was copied into memory; "
                    "it may change only after settle()"
                )
        done = time.perf_counter()
        result = self._client.call("commit", step=step, slot=slot, meta=meta, crcs=crcs, end=total)
        if "code_s" not in result:
            raise CheckpointError(f"step {step}: the snapshot was not coded")
        return _Copied(step, total, busy, done - began, time.perf_counter() - done)

    def _pause(self, busy: float, copied: int, total: int, began: float) -> None:
        """Leave the cores to the computation, so that copying takes its share and no more."""
        gentle = busy / self.code.max_overhead
        latest = _SPREAD * self._interval * copied / max(1, total)
        pause = min(gentle, latest) - (time.perf_counter() - began)
        if pause > _SHORTEST_PAUSE_S:
            self._hurry.wait(pause)


def _entry(name: str, piece: Piece) -> BoxEntry:
    tensor = piece.tensor
    return BoxEntry(
        name,
        str(tensor.dtype).removeprefix("torch."),
        tuple(piece.global_shape),
        tuple(piece.offset),
        tuple(tensor.shape),
        tensor.numel() * tensor.element_size(),
    )


def _event(boxes: Mapping[Any, torch.Tensor]) -> Any:
    """On a GPU, what records that the update has been done."""
    import torch

    if any(tensor.is_cuda for tensor in boxes.values()):
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event
    return None


def _runs(segments: Sequence[BoxSegment], block: int, bucket: int) -> Iterator[_Run]:
    """What is copied at once: no more than a bucket of one box, for one block of the piece."""
    for segment in segments:
        first, at = segment.first, segment.at
        while first < segment.last:
            size = min(bucket, segment.last - first, block - at % block)
            yield _Run((segment.name, segment.offset), first, at, size, at // block)
            first += size
            at += size


def _copies(
    runs: Sequence[_Run],
    boxes: Mapping[Any, torch.Tensor],
    out: np.ndarray,
    crcs: list[int],
) -> Iterator[tuple[_Run, float, bool]]:
    """Copy run by run and sum what passes; yields each with its seconds and if it is finite.

    Args:
        runs: in the order of the piece.
        boxes: (name, offset) -> tensor.
        out: the slot.
        crcs: of the blocks so far; go on from there.
    """
    base = out.ctypes.data
    flat: torch.Tensor | None = None
    key: Any = None
    for run in runs:
        began = time.perf_counter()
        if run.key != key:
            # On its way from a device, and where it has gaps, a tensor takes memory of its own.
            flat, key = boxes[run.key].detach().cpu().contiguous(), run.key
        assert flat is not None
        source = flat.data_ptr() + run.first
        crcs[run.block] = copy_crc32c_at(base + run.at, source, run.size, crcs[run.block])
        finite = finite_part(flat, run.first, run.first + run.size)
        yield run, time.perf_counter() - began, finite

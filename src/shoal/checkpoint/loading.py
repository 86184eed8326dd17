"""Loading: what all ranks want of a checkpoint, read once and passed on to whoever wants it.

The ranks tell each other their boxes and come to one plan (:mod:`~shoal.checkpoint.reads`). Then
they go round by round: each has one read, keeps what it wants of it and sends the others theirs,
while the next reads are under way already. Pieces are compared with their checksums on the way;
one that several ranks have read in part is compared when they have told each other what they saw.

Source: Wan et al., ByteCheckpoint, 2024, sections 3.3 and 4.1.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.checksum import combined, copy_crc32c, crc32c
from shoal.checkpoint.peers import Alone, CommPeers
from shoal.checkpoint.pieces import TORCH_NAMES, Piece
from shoal.checkpoint.reader import Range, bytes_in_turn
from shoal.checkpoint.reads import READ_BYTES, Cut, Read, ReadPlan, Segment, Wish, plan_reads
from shoal.core.errors import CheckpointError, nearest
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from shoal.checkpoint.saved import Saved
    from shoal.ir.comm import Comm

__all__ = ["LoadReport", "Wanted", "load_pieces"]

Wanted = Mapping[str, Sequence[Piece]]
"""Name of a tensor -> the boxes of it that a rank wants, and the tensors that take them."""

_TAG = "checkpoint"


@dataclass
class LoadReport:
    """What a load has cost this rank.

    Args:
        step: which step was loaded.
        wanted_bytes: bytes of the boxes that this rank wanted.
        read_bytes: bytes that this rank read.
        reads: in so many reads.
        sent_bytes: bytes that it passed on to others.
        plan_s: seconds to agree who reads what.
        read_s: seconds for which reading was waited for.
        exchange_s: seconds for which other ranks were waited for.
        place_s: seconds of copying what others have read into place.
        copy_s: seconds of checking and copying what this rank has read, in the threads that read.
        seconds: of the whole load.
    """

    step: int
    wanted_bytes: int = 0
    read_bytes: int = 0
    reads: int = 0
    sent_bytes: int = 0
    plan_s: float = 0.0
    read_s: float = 0.0
    exchange_s: float = 0.0
    place_s: float = 0.0
    copy_s: float = 0.0
    seconds: float = 0.0


@dataclass
class _Seen:
    """What the reading threads saw."""

    parts: list[tuple[str, str, str, int, int, int]] = field(default_factory=list)
    """Tensor, key and file of a piece read in part; first element, last, and their checksum."""
    damaged: list[tuple[str, str, str]] = field(default_factory=list)
    """Tensor, key and file of a piece."""
    refused: list[str] = field(default_factory=list)
    """What the file system said."""


def load_pieces(
    saved: Saved,
    wanted: Wanted,
    comm: Comm | None = None,
    *,
    verify: bool = True,
    cast: bool = False,
) -> LoadReport:
    """Fill tensors with boxes of a checkpoint; with ``comm`` called by all of its ranks.

    Args:
        saved: the checkpoint, which every rank has opened.
        wanted: this rank's boxes; every tensor is written, whatever lay in it. After an error
            nobody knows what lies in them.
        comm: the ranks that load together; what several want is then read by one of them.
        verify: compare pieces with their checksums, which needs them whole. Without it only
            wanted rows are read, and damage goes unseen.
        cast: tensors may have another dtype than the stored one.

    Raises:
        CheckpointError: a tensor is not there, or has another shape or dtype; on every rank.
        CorruptError: a piece is not what was written; on every rank.
    """
    begin = time.perf_counter()
    report = LoadReport(saved.step)
    peers = Alone() if comm is None else CommPeers(comm)
    targets = [(name, piece) for name, pieces in wanted.items() for piece in pieces]
    flaw = next((one for one in (_flaw(saved, *t, cast) for t in targets) if one), "")
    told = peers.gather(
        json.dumps(
            [flaw, [[n, list(p.box.offset), list(p.box.shape)] for n, p in targets]]
        ).encode()
    )
    wishes = _agreed(saved, flaw, [json.loads(one) for one in told])
    plan = plan_reads(saved.index, saved.place, wishes, whole=verify, read_bytes=READ_BYTES)
    report.wanted_bytes = sum(
        p.box.volume * ITEM_BYTES[saved.index.tensors[n].dtype] for n, p in targets
    )
    report.read_bytes, report.reads = plan.bytes_of(peers.rank), len(plan.rounds[peers.rank])
    report.plan_s = time.perf_counter() - begin
    loading = _Loading(saved, plan, [piece.tensor for _, piece in targets], comm, report)
    loading.run(verify=verify)
    told = peers.gather(json.dumps(vars(loading.seen)).encode())
    _judge(saved, [json.loads(one) for one in told])
    report.seconds = time.perf_counter() - begin
    return report


def _flaw(saved: Saved, name: str, piece: Piece, cast: bool) -> str:
    """Why a box cannot be loaded, or an empty text."""
    entry = saved.index.tensors.get(name)
    if entry is None:
        hint = nearest(name, saved.index.tensors)
        return f"{saved.path}: holds no tensor {name!r}; " + (hint or "see shoal model ls")
    where = f"{saved.path}: tensor {name!r}"
    if tuple(piece.global_shape) != entry.shape:
        return f"{where} has shape {list(entry.shape)}, and {list(piece.global_shape)} is wanted"
    if not piece.box.inside(entry.shape):
        return f"{where}: {piece.box} is wanted, which is no box of shape {list(entry.shape)}"
    if piece.tensor.dtype != _stored_dtype(saved, name) and not cast:
        return (
            f"{where} is {TORCH_NAMES[entry.dtype]}, and the one to fill is "
            f"{str(piece.tensor.dtype).removeprefix('torch.')}; give cast=True to convert it"
        )
    return ""


def _agreed(saved: Saved, own: str, told: Sequence[Any]) -> list[list[Wish]]:
    """The wishes of all ranks.

    Raises:
        CheckpointError: one of them cannot be fulfilled.
    """
    if own:
        raise CheckpointError(own)
    for rank, (flaw, _) in enumerate(told):
        if flaw:
            raise CheckpointError(f"rank {rank}: {flaw}")
    return [
        [Wish(name, tuple(offset), tuple(shape)) for name, offset, shape in wishes]
        for _, wishes in told
    ]


class _Loading:
    """One load at work.

    Args:
        saved: the checkpoint.
        plan: what all ranks read.
        targets: what this rank's wishes fill, in their order.
        comm: the ranks; None if there is one.
        report: counts what happens.
    """

    def __init__(
        self,
        saved: Saved,
        plan: ReadPlan,
        targets: Sequence[torch.Tensor],
        comm: Comm | None,
        report: LoadReport,
    ) -> None:
        self.saved = saved
        self.plan = plan
        self.targets = targets
        self.comm = comm
        self.rank = 0 if comm is None else comm.rank
        self.report = report
        self.seen = _Seen()
        self._lock = threading.Lock()

    def run(self, *, verify: bool) -> None:
        """Read, keep, send and receive, round by round."""
        import torch

        own = self.plan.rounds[self.rank]
        ranges = [Range(read.file, read.start, read.stop) for read in own]
        pinned = any(target.device.type == "cuda" for target in self.targets)

        def arrived(number: int, data: torch.Tensor) -> None:
            begin = time.perf_counter()
            for segment in own[number].segments:
                self._arrived(segment, own[number], data, verify=verify)
            with self._lock:
                self.report.copy_s += time.perf_counter() - begin

        with (
            torch.no_grad(),
            bytes_in_turn(self.saved.folder, ranges, arrived, pinned=pinned) as arriving,
        ):
            for number in range(self.plan.count):
                read = self.plan.read(self.rank, number)
                if read is None:
                    self._round(number, None, torch.empty(0, dtype=torch.uint8))
                    continue
                with _timed(self.report, "read_s"):
                    data = next(arriving)
                if isinstance(data, OSError):
                    # The others wait for this read; they are told in the end.
                    where = data.filename or self.saved.folder.where(read.file)
                    self.seen.refused.append(f"{where}: cannot be read ({data.strerror or data})")
                    data = torch.zeros(read.stop - read.start, dtype=torch.uint8)
                self._round(number, read, data)

    def _arrived(self, segment: Segment, read: Read, data: torch.Tensor, *, verify: bool) -> None:
        """Take what this rank wants, and compare with the checksum, in the thread that read it."""
        name, piece = segment.name, segment.piece
        cuts = self.plan.cuts_of(segment, self.rank)
        found = self._copied(segment, cuts, read, data) if verify else None
        if found is None:
            for cut in cuts:
                self._put(cut, self._part(read, data, cut))
        if not verify:
            return
        if piece.crc32c is None:  # of an old version: only a whole piece has a checksum
            good = self.saved.intact(name, piece)
        else:
            if found is None:
                low, high = segment.start - read.start, segment.stop - read.start
                found = crc32c(data[low:high].numpy())
            if not segment.whole:
                key = piece.key or name, piece.file
                self.seen.parts.append((name, *key, segment.first, segment.last, found))
                return
            good = found == piece.crc32c
        if good:
            self.saved.trust(name, piece)
        else:
            self.seen.damaged.append((name, piece.key or name, piece.file))

    def _copied(
        self, segment: Segment, cuts: Sequence[Cut], read: Read, data: torch.Tensor
    ) -> int | None:
        """Copy all of a segment to where it lies in one target, and return its checksum.

        Nothing is done where some of it is not wanted, or lies elsewhere in other order.
        """
        ends = itertools.accumulate((self._bytes(cut) for cut in cuts), initial=segment.start)
        if [*(cut.at for cut in cuts), segment.stop] != list(ends):
            return None
        places = [self._place(cut) for cut in cuts]
        if not all(
            place.device.type == "cpu"
            and place.dtype == self._dtype(segment.name)
            and place.is_contiguous()
            for place in places
        ):
            return None
        checksum = 0
        for cut, place in zip(cuts, places, strict=True):
            low = cut.at - read.start
            checksum = copy_crc32c(
                _raw(place).numpy(), data[low : low + place.nbytes].numpy(), checksum
            )
        return checksum

    def _round(self, number: int, read: Read | None, data: torch.Tensor) -> None:
        """Pass on what this rank has read, and take what it wants of what others have."""
        if self.comm is None or not self._exchanged(number):
            return
        with _timed(self.report, "exchange_s"):
            outs = [self._inbox(number, peer) for peer in range(self.comm.world)]
            messages = self._messages(read, data)
            self.report.sent_bytes += sum(message.numel() for message in messages)
            self.comm.all_to_all(outs, messages, tag=_TAG).wait()
        with _timed(self.report, "place_s"):
            for peer, inbox in enumerate(outs):
                at = 0
                for cut in self._cuts_from(number, peer):
                    size = self._bytes(cut)
                    values = _as(inbox[at : at + size], self._dtype(cut.name))
                    self._put(cut, values.view(cut.common.shape))
                    at += size

    def _exchanged(self, number: int) -> bool:
        """Whether anybody passes anything on in this round; all ranks see the same."""
        return any(
            (read := self.plan.read(peer, number)) is not None and set(read.ranks) - {peer}
            for peer in range(len(self.plan.rounds))
        )

    def _cuts_from(self, number: int, peer: int) -> list[Cut]:
        """What this rank gets of another one's read."""
        read = self.plan.read(peer, number)
        return [] if read is None or peer == self.rank else self.plan.cuts(read, self.rank)

    def _inbox(self, number: int, peer: int) -> torch.Tensor:
        import torch

        assert self.comm is not None
        size = sum(self._bytes(cut) for cut in self._cuts_from(number, peer))
        return torch.empty(size, dtype=torch.uint8, device=self.comm.device)

    def _messages(self, read: Read | None, data: torch.Tensor) -> list[torch.Tensor]:
        """For every rank what it gets of this one's read; those that want the same share it."""
        import torch

        assert self.comm is not None
        known: dict[tuple[Cut, ...], torch.Tensor] = {}
        found = []
        for peer in range(self.comm.world):
            cuts = [] if read is None or peer == self.rank else self.plan.cuts(read, peer)
            # Each rank numbers its wishes for itself.
            key = tuple(cut._replace(wish=0) for cut in cuts)
            if key not in known:
                parts = [
                    _raw(self._part(read, data, cut).contiguous())
                    for cut in cuts
                    if read is not None
                ]
                packed = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
                known[key] = packed.to(self.comm.device)
            found.append(known[key])
        return found

    def _part(self, read: Read, data: torch.Tensor, cut: Cut) -> torch.Tensor:
        """The elements of a cut, out of the bytes of its read."""
        dtype = self._dtype(cut.name)
        low = cut.at - read.start
        raw = data[low : low + cut.box.volume * dtype.itemsize]
        return _as(raw, dtype).view(cut.box.shape)[cut.common.slices(cut.box)]

    def _put(self, cut: Cut, values: torch.Tensor) -> None:
        import torch

        with torch.no_grad():  # a thread of its own has a mode of its own
            self._place(cut).copy_(values)

    def _place(self, cut: Cut) -> torch.Tensor:
        """Where a cut goes."""
        wish, target = self.plan.wish(self.rank, cut.wish), self.targets[cut.wish]
        return target.detach()[cut.common.slices(wish.box)]

    def _bytes(self, cut: Cut) -> int:
        return cut.common.volume * self._dtype(cut.name).itemsize

    def _dtype(self, name: str) -> torch.dtype:
        return _stored_dtype(self.saved, name)


def _stored_dtype(saved: Saved, name: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, TORCH_NAMES[saved.index.tensors[name].dtype])
    return found


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor without gaps.

    One element is without gaps, whatever its strides say, and a view as bytes wants them to be 1.
    """
    import torch

    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements; copied where they do not begin at a place for one."""
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


@contextlib.contextmanager
def _timed(report: LoadReport, what: str) -> Iterator[None]:
    begin = time.perf_counter()
    try:
        yield
    finally:
        setattr(report, what, getattr(report, what) + time.perf_counter() - begin)


def _judge(saved: Saved, told: Sequence[Mapping[str, Any]]) -> None:
    """Say what any rank has seen, on every rank alike.

    Raises:
        CheckpointError: a file could not be read.
        CorruptError: a piece is not what was written.
    """
    refused = [what for seen in told for what in seen["refused"]]
    if refused:
        raise CheckpointError(refused[0])
    pieces = {
        (name, piece.key or name, piece.file): piece
        for seen in told
        for name, *_ in [*seen["damaged"], *seen["parts"]]
        for piece in saved.index.tensors[name].pieces
    }
    for seen in told:
        for key in seen["damaged"]:
            raise saved.damage(key[0], pieces[tuple(key)])
    halves: dict[tuple[str, str, str], list[tuple[int, int, int]]] = {}
    for seen in told:
        for name, key, file, first, last, found in seen["parts"]:
            halves.setdefault((name, key, file), []).append((first, last, found))
    for (name, key, file), parts in halves.items():
        piece = pieces[name, key, file]
        item = ITEM_BYTES[saved.index.tensors[name].dtype]
        whole = 0
        for first, last, found in sorted(parts):
            whole = combined(whole, found, (last - first) * item)
        if whole != piece.crc32c:
            raise saved.damage(name, piece)
        saved.trust(name, piece)

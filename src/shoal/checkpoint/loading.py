"""Loading: what all ranks want of a checkpoint, read once and passed on to the ranks that want it.

The ranks exchange their boxes and come to one plan (:mod:`~shoal.checkpoint.agreement`,
:mod:`~shoal.checkpoint.reads`). Then they go round by round: each has one read, keeps what it
wants of it and sends the others theirs, while the next reads are under way already. Pieces are
compared with their checksums on the way; one that several ranks have read in part is compared by
one of them, to which all report what they saw.

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
from typing import TYPE_CHECKING

from shoal.checkpoint.agreement import KeptPlans, ReadTurns, agreed
from shoal.checkpoint.checksum import combined, copy_crc32c, crc32c
from shoal.checkpoint.common import no_tensor
from shoal.checkpoint.peers import CommPeers, SinglePeer
from shoal.checkpoint.pieces import TORCH_NAMES, Piece
from shoal.checkpoint.reader import ByteRange, bytes_in_turn
from shoal.checkpoint.reads import READ_BYTES, BoxRequest, FileRead, ReadSegment, ReadSlice
from shoal.checkpoint.shards import rank_of
from shoal.core.errors import CheckpointError
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    import torch

    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
    from shoal.ir.comm import Comm

Wanted = Mapping[str, Sequence[Piece]]
"""Name of a tensor -> the boxes of it that a rank wants, and the tensors that take them."""

_TAG = "checkpoint"
_PLANS = KeptPlans()


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
        fresh_plan: the layout, or what ranks wanted of it, was new.
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
    fresh_plan: bool = True
    read_s: float = 0.0
    exchange_s: float = 0.0
    place_s: float = 0.0
    copy_s: float = 0.0
    seconds: float = 0.0


@dataclass
class _Seen:
    """What the reading threads saw."""

    parts: list[tuple[str, int, int, int, int]] = field(default_factory=list)
    """File and number of a piece read in part; first element, last, and their checksum."""
    damaged: list[str] = field(default_factory=list)
    """What is wrong with pieces that are not what was written."""
    refused: list[str] = field(default_factory=list)
    """What the file system said."""


def load_pieces(
    saved: SavedCheckpoint,
    wanted: Wanted,
    comm: Comm | None = None,
    *,
    verify: bool = True,
    cast: bool = False,
) -> LoadReport:
    """Fill tensors with boxes of a checkpoint; with ``comm`` called by all of its ranks.

    Args:
        saved: the checkpoint, which every rank has opened.
        wanted: this rank's boxes; every tensor is overwritten. After an error their contents are
            undefined.
        comm: the ranks that load together; what several want is then read by one of them.
        verify: compare pieces with their checksums, which needs them whole. Without it only
            wanted rows are read, and damage goes unseen.
        cast: tensors may have another dtype than the stored one.

    Raises:
        CheckpointError: a tensor is not there, or has another shape or dtype; on every rank.
        CorruptError: a piece has changed since it was written; on every rank.
    """
    begin = time.perf_counter()
    report = LoadReport(saved.step)
    peers = SinglePeer() if comm is None else CommPeers(comm)
    targets = [(name, piece) for name, pieces in wanted.items() for piece in pieces]
    flaw = next((one for one in (_flaw(saved, *t, cast) for t in targets) if one), "")
    turns = agreed(
        saved,
        [BoxRequest(name, tuple(p.box.offset), tuple(p.box.shape)) for name, p in targets],
        peers,
        _PLANS,
        flaw=flaw,
        whole=verify,
        read_bytes=READ_BYTES,
    )
    report.wanted_bytes = sum(
        p.box.volume * ITEM_BYTES[saved.index.tensors[n].dtype] for n, p in targets
    )
    report.read_bytes, report.reads = turns.plan.bytes, len(turns.plan.reads)
    report.plan_s, report.fresh_plan = time.perf_counter() - begin, turns.fresh
    loading = _Loading(saved, turns, [piece.tensor for _, piece in targets], comm, report)
    loading.run(verify=verify)
    _judge(saved, peers, loading.seen)
    report.seconds = time.perf_counter() - begin
    return report


def _flaw(saved: SavedCheckpoint, name: str, piece: Piece, cast: bool) -> str:
    """Why a box cannot be loaded, or an empty text."""
    entry = saved.index.tensors.get(name)
    if entry is None:
        return no_tensor(saved.path, name, saved.index.tensors)
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


class _Loading:
    """One load at work."""

    def __init__(
        self,
        saved: SavedCheckpoint,
        turns: ReadTurns,
        targets: Sequence[torch.Tensor],
        comm: Comm | None,
        report: LoadReport,
    ) -> None:
        self.saved = saved
        self.turns, self.plan = turns, turns.plan
        self.targets = targets
        self.comm = comm
        self.rank = 0 if comm is None else comm.rank
        self.report = report
        self.seen = _Seen()
        self._lock = threading.Lock()

    def run(self, *, verify: bool) -> None:
        """Read, keep, send and receive, round by round."""
        import torch

        own = self.plan.reads
        ranges = [ByteRange(read.file, read.start, read.stop) for read in own]
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
            for number in range(self.turns.count):
                if number >= len(own):
                    self._round(number, None, torch.empty(0, dtype=torch.uint8))
                    continue
                read = own[number]
                with _timed(self.report, "read_s"):
                    data = next(arriving)
                if isinstance(data, OSError):
                    # The others wait for this read; they get the error in the end.
                    where = data.filename or self.saved.folder.where(read.file)
                    self.seen.refused.append(f"{where}: cannot be read ({data.strerror or data})")
                    data = torch.zeros(read.stop - read.start, dtype=torch.uint8)
                self._round(number, read, data)

    def _arrived(
        self, segment: ReadSegment, read: FileRead, data: torch.Tensor, *, verify: bool
    ) -> None:
        """Take what this rank wants, and compare with the checksum, in the thread that read it."""
        name, (_, piece, start) = (
            segment.name,
            self.saved.index.shard(read.file).piece(segment.number),
        )
        cuts = self.plan.cuts_of(segment)
        result = self._copied(segment, cuts, read, data) if verify else None
        if result is None:
            for cut in cuts:
                self._put(cut, self._part(read, data, cut))
        if not verify:
            return
        if piece.crc32c is None:  # of an old version: only a whole piece has a checksum
            good = self.saved.intact(name, piece, start)
        else:
            if result is None:
                low, high = segment.start - read.start, segment.stop - read.start
                result = crc32c(data[low:high].numpy())
            if not segment.whole:
                part = (read.file, segment.number, segment.first, segment.last, result)
                self.seen.parts.append(part)
                return
            good = result == piece.crc32c
        if good:
            self.saved.trust(name, piece)
        else:
            self.seen.damaged.append(self.saved.described(name, piece))

    def _copied(
        self, segment: ReadSegment, cuts: Sequence[ReadSlice], read: FileRead, data: torch.Tensor
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

    def _round(self, number: int, read: FileRead | None, data: torch.Tensor) -> None:
        """Pass on what this rank has read, and take what it wants of what others have."""
        import torch

        if self.comm is None or number not in self.turns.exchanged:
            return
        inbox = self.turns.inbox.get(number, ())
        with _timed(self.report, "exchange_s"):
            coming = {peer: self.plan.cuts(one) for peer, one in inbox}
            outs = self._empty()
            for peer, cuts in coming.items():
                size = sum(self._bytes(cut) for cut in cuts)
                outs[peer] = torch.empty(size, dtype=torch.uint8, device=self.comm.device)
            messages = self._messages(read, data)
            self.report.sent_bytes += sum(message.numel() for message in messages)
            self.comm.all_to_all(outs, messages, tag=_TAG).wait()
        with _timed(self.report, "place_s"):
            for peer, cuts in coming.items():
                at = 0
                for cut in cuts:
                    size = self._bytes(cut)
                    values = _as(outs[peer][at : at + size], self._dtype(cut.name))
                    self._put(cut, values.view(cut.common.shape))
                    at += size

    def _empty(self) -> list[torch.Tensor]:
        """A message without bytes for each rank."""
        import torch

        assert self.comm is not None
        device = self.comm.device
        return [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(self.comm.world)]

    def _messages(self, read: FileRead | None, data: torch.Tensor) -> list[torch.Tensor]:
        """For every rank what it gets of this one's read; those that want the same share it."""
        import torch

        assert self.comm is not None
        known: dict[tuple[ReadSlice, ...], torch.Tensor] = {}
        messages = self._empty()
        if read is None:
            return messages
        for peer, cuts in self.plan.cuts_of_others(read).items():
            key = tuple(cuts)
            if key not in known:
                parts = [_raw(self._part(read, data, cut).contiguous()) for cut in cuts]
                known[key] = torch.cat(parts).to(self.comm.device)
            messages[peer] = known[key]
        return messages

    def _part(self, read: FileRead, data: torch.Tensor, cut: ReadSlice) -> torch.Tensor:
        """The elements of a cut, out of the bytes of its read."""
        dtype = self._dtype(cut.name)
        low = cut.at - read.start
        raw = data[low : low + cut.box.volume * dtype.itemsize]
        return _as(raw, dtype).view(cut.box.shape)[cut.common.slices(cut.box)]

    def _put(self, cut: ReadSlice, values: torch.Tensor) -> None:
        import torch

        with torch.no_grad():  # a thread of its own has a mode of its own
            self._place(cut).copy_(values)

    def _place(self, cut: ReadSlice) -> torch.Tensor:
        """Where a cut goes."""
        wish, target = self.plan.wishes[cut.wish], self.targets[cut.wish]
        return target.detach()[cut.common.slices(wish.box)]

    def _bytes(self, cut: ReadSlice) -> int:
        return cut.common.volume * self._dtype(cut.name).itemsize

    def _dtype(self, name: str) -> torch.dtype:
        return _stored_dtype(self.saved, name)


def _stored_dtype(saved: SavedCheckpoint, name: str) -> torch.dtype:
    import torch

    value: torch.dtype = getattr(torch, TORCH_NAMES[saved.index.tensors[name].dtype])
    return value


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


def _judge(saved: SavedCheckpoint, peers: Peers, seen: _Seen) -> None:
    """Say what any rank has seen, on every rank alike.

    Raises:
        CheckpointError: a file could not be read.
        CorruptError: a piece has changed since it was written.
    """
    # What several ranks have read of a piece goes to the one that stands for its file.
    judges: list[list[tuple[str, int, int, int, int]]] = [[] for _ in range(peers.world)]
    for part in seen.parts:
        judges[rank_of(part[0]) % peers.world].append(part)
    heard = peers.exchange([json.dumps(one).encode() if one else b"" for one in judges])
    halves: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for one in heard:
        for file, number, first, last, result in json.loads(one or b"[]"):
            halves.setdefault((file, number), []).append((first, last, result))
    damaged = list(seen.damaged)
    if not seen.refused:
        for (file, number), parts in halves.items():
            words = _unlike(saved, file, number, parts)
            damaged += [words] if words else []
    outcome = peers.gather(json.dumps([seen.refused[:1], damaged[:1]]).encode())
    for refused, _ in map(json.loads, outcome):
        if refused:
            raise CheckpointError(refused[0])
    for _, words in map(json.loads, outcome):
        if words:
            raise saved.damaged(words[0])


def _unlike(
    saved: SavedCheckpoint, file: str, number: int, parts: Sequence[tuple[int, int, int]]
) -> str:
    """What is wrong with a piece that was read in parts, or an empty text."""
    try:
        name, piece, _ = saved.index.shard(file).piece(number)
    except CheckpointError as cause:
        return str(cause)
    item = ITEM_BYTES[saved.index.tensors[name].dtype]
    whole = 0
    for first, last, result in sorted(parts):
        whole = combined(whole, result, (last - first) * item)
    if whole != piece.crc32c:
        return saved.described(name, piece)
    saved.trust(name, piece)
    return ""

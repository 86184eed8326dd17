"""The index of a checkpoint: which ranks hold which boxes of which tensor, and what vouches for it.

``index.json`` begins with the SHA-256 of all that follows in it, so the index that
vouches for every other byte is itself vouched for::

    {"sha256": "<64 hex digits>",
     "format": "shoal-checkpoint", "version": 4, ...}

It has the layout of every tensor as runs (:mod:`~shoal.checkpoint.runs`) and of every file its size
and checksums; so its size follows the number of files and not that of pieces. Places and checksums
of pieces are in one shard for each file (:mod:`~shoal.checkpoint.shards`), read when it is needed.
Versions 1 to 3 have everything in ``index.json`` (:mod:`~shoal.checkpoint.legacy`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from shoal.checkpoint.runs import BoxRuns
from shoal.checkpoint.shards import (
    FILE,
    DeclaredTensor,
    FileIndex,
    RankIndex,
    StoredFile,
    StoredPiece,
    file_name,
    layout_of,
    rank_of,
    shard_name,
)
from shoal.core.boxes import Box
from shoal.core.config import Value
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from shoal.checkpoint.storage import Folder

# Version 2 added the key of a piece; version 3 has CRC32C for SHA-256 of pieces; version 4 has
# pieces in shards.
FORMAT_VERSION = 4
INDEX_NAME = "index.json"
MAX_INDEX_BYTES = 2**30

_LEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_LEAD_BYTES = len('{"sha256": "') + 64 + len('",\n')

Digest = str


def digest(value: Any) -> Digest:
    """SHA-256 of plain data, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """One whole tensor and its holders.

    Args:
        dtype: the format's name, such as ``BF16``.
        shape: its global shape.
        runs: the boxes that cover it, by rank; some may hold the same elements.
    """

    dtype: str
    shape: tuple[int, ...]
    runs: BoxRuns

    @property
    def bytes(self) -> int:
        """Its size."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def files(self) -> list[str]:
        """Names of the files that hold some of it, in order."""
        return [file_name(owner) for owner in self.runs.owners()]

    @property
    def disjoint(self) -> bool:
        """Whether no element is stored twice."""
        return self.runs.volume() == math.prod(self.shape)


class _PlainTensor(Value):
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    runs: tuple[tuple[int, ...], ...]


class _Plain(Value):
    """What ``index.json`` holds."""

    format: Literal["shoal-checkpoint"] = "shoal-checkpoint"
    version: Literal[4] = 4
    step: NonNegativeInt
    world: PositiveInt
    meta: dict[str, Any]
    meta_sha256: Digest
    layout_sha256: Digest
    files: dict[Annotated[str, Field(pattern=FILE)], StoredFile]
    tensors: dict[str, _PlainTensor]


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckpointIndex:
    """What a whole checkpoint holds.

    Args:
        step: the step after which it was saved.
        world: ranks that wrote it.
        meta: what the caller wanted kept beside the tensors.
        files: name -> size and checksums.
        tensors: name -> tensor.
        layout: equal for checkpoints whose tensors lie alike in files alike; None for versions
            that do not say it.
        raw: the bytes of ``index.json``.
        folder: where shards are read; None of one that is only written.
        shards: those that are known already.
    """

    step: int
    world: int
    meta: dict[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, IndexedTensor]
    raw: bytes
    layout: Digest | None = None
    version: int = FORMAT_VERSION
    folder: Folder | None = None
    shards: dict[str, FileIndex] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)

    def encode(self) -> bytes:
        """The bytes of ``index.json``."""
        return self.raw

    def shard(self, file: str) -> FileIndex:
        """What lies in a file.

        Raises:
            CheckpointError: its shard cannot be read.
            CorruptError: its shard has changed since it was written.
        """
        known = self.shards.get(file)
        if known is None:
            known = self.shards[file] = self._read_shard(file)
        return known

    def shard_bytes(self, file: str) -> bytes:
        """The small file that says what lies in a file, as it was written.

        Raises:
            CheckpointError: it cannot be read.
            CorruptError: it has changed since it was written.
        """
        assert self.folder is not None
        name = shard_name(rank_of(file))
        raw = _whole(self.folder, name)
        if hashlib.sha256(raw).hexdigest() != self.files[file].shard_sha256:
            raise CorruptError(
                f"{self.folder.where(name)}: its contents have changed since it was written "
                "(SHA-256 differs)"
            )
        return raw

    def _read_shard(self, file: str) -> FileIndex:
        assert self.folder is not None
        rank = rank_of(file)
        path = self.folder.where(shard_name(rank))
        try:
            shard = FileIndex.decode(self.shard_bytes(file))
        except (ValueError, KeyError, TypeError, RecursionError) as cause:
            raise CorruptError(f"{path}: not a possible shard ({cause})") from cause
        if shard.head.rank != rank:
            raise CorruptError(f"{path}: is that of rank {shard.head.rank}")
        for name, dtype, shape in shard.tensors:
            there = self.tensors.get(name)
            if there is None or (there.dtype, there.shape) != (dtype, shape):
                raise CorruptError(f"{path}: tensor {name!r} is not there as the index says")
        sizes = np.array([ITEM_BYTES[one.dtype] for one in shard.tensors], dtype=np.int64)
        rows, dims = shard.rows, shard.dims
        ends = rows[:, 1] + sizes[rows[:, 0]] * rows[:, 2 + dims :].prod(axis=1)
        if (ends > self.files[file].bytes).any():
            raise CorruptError(f"{path}: a piece lies behind the end of {file}")
        if len(shard) != self.count(file):
            raise CorruptError(
                f"{path}: {len(shard)} pieces where the index says {self.count(file)}"
            )
        return shard

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Pieces of each rank."""
        world = 1 + max(map(rank_of, self.files), default=0)
        array = np.zeros(world, dtype=np.int64)
        for tensor in self.tensors.values():
            array += np.bincount(tensor.runs.expanded()[0], minlength=world)
        counts: list[int] = array.tolist()
        return counts

    def count(self, file: str) -> int:
        """How many pieces a file has."""
        return self._counts[rank_of(file)]

    def check_file(self, file: str) -> FileIndex:
        """The shard of a file that is there, of its size, and has the header that was written.

        Raises:
            CheckpointError: it cannot be read.
            CorruptError: it is not so; names the file.
        """
        shard = self.shard(file)
        if file not in self.checked and self.folder is not None:
            stored, path = self.files[file], self.folder.where(file)
            require_size(self.folder, file, stored.bytes)
            first = int(shard.rows[:, 1].min()) if len(shard) else stored.bytes
            try:
                header = self.folder.read(file, 0, first).data
            except OSError as cause:
                raise _unreadable(path, cause) from cause
            if hashlib.sha256(header).hexdigest() != stored.header_sha256:
                raise CorruptError(
                    f"{path}: its header has changed since it was written (SHA-256 differs)"
                )
            self.checked.add(file)
        return shard

    def stored(self, name: str, file: str, box: Box) -> tuple[StoredPiece, int, int]:
        """Entry, number in its file and first byte of a piece that the index lists.

        Raises:
            CorruptError: its file has none such.
        """
        shard = self.check_file(file)
        number = shard.number(name, box)
        if number is None:
            assert self.folder is not None
            raise CorruptError(
                f"{self.folder.where(file)}: tensor {name!r} is not there as the index says"
            )
        _, piece, start = shard.piece(number)
        return piece, number, start

    def overlapping(self, name: str, box: Box) -> list[StoredPiece]:
        """Pieces that hold some of a box, by rank; copies are among them."""
        return [
            self.stored(name, file_name(owner), one)[0]
            for owner, one in self.tensors[name].runs.overlapping(box)
        ]

    def pieces(self, name: str) -> tuple[StoredPiece, ...]:
        """All pieces of a tensor, by rank."""
        owned = sorted(self.tensors[name].runs.owned(), key=lambda one: one.owner)
        return tuple(self.stored(name, file_name(owner), box)[0] for owner, box in owned)


def flaw_of(tensors: Mapping[str, IndexedTensor], world: int) -> str:
    """What makes tensors impossible, or an empty text.

    The pieces of a tensor must be boxes of it and cover it, which bounds every
    later allocation by the size of the files.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            return f"tensor {name!r} has the unknown dtype {tensor.dtype!r}"
        if math.prod(tensor.shape) >= 2**62 or any(n >= 2**62 for n in tensor.shape):
            return f"tensor {name!r} has the impossible shape {list(tensor.shape)}"
        flaw = tensor.runs.flaw(tensor.shape, world)
        if flaw:
            return f"tensor {name!r}: {flaw}"
        missing = tensor.runs.missing(tensor.shape)
        if missing is not None:
            return f"tensor {name!r}: no rank has the elements {missing}"
    return ""


class Merger:
    """Makes one index out of what the ranks wrote; a layout is looked at once.

    Attributes:
        fresh: layouts that were put together so far.
    """

    def __init__(self) -> None:
        self._known: dict[Digest, dict[str, IndexedTensor]] = {}
        self.fresh = 0

    def merge(
        self, step: int, meta: dict[str, Any], votes: Sequence[bytes]
    ) -> tuple[CheckpointIndex, list[RankIndex]]:
        """The index of a step, and what the ranks say of themselves.

        Args:
            step: which one.
            meta: what is kept beside the tensors.
            votes: of each rank the bytes of its shard.

        Raises:
            CheckpointError: two ranks disagree about a tensor, no rank wrote a part of it, or a
                shard is none.
        """
        heads: list[RankIndex] = []
        files: dict[str, StoredFile] = {}
        for rank, vote in enumerate(votes):
            try:
                head, layout = layout_of(vote)
            except (ValueError, RecursionError) as cause:
                raise CheckpointError(
                    f"step {step}: {shard_name(rank)} is not what rank {rank} wrote ({cause}); "
                    "save again"
                ) from cause
            if head.rank != rank or head.layout_sha256 != layout:
                raise CheckpointError(
                    f"step {step}: {shard_name(rank)} is not what rank {rank} wrote; save again"
                )
            heads.append(head)
            files[file_name(rank)] = head.file.model_copy(
                update={"shard_sha256": hashlib.sha256(vote).hexdigest()}
            )
        key = digest([head.layout_sha256 for head in heads])
        tensors = self._known.get(key)
        if tensors is None:
            self.fresh += 1
            tensors = _together(votes)
            flaw = flaw_of(tensors, len(votes))
            if flaw:
                raise CheckpointError(
                    f"step {step}: {flaw}; save every element of every tensor once"
                )
            self._known = {key: tensors}
        plain = {
            "format": "shoal-checkpoint",
            "version": FORMAT_VERSION,
            "step": step,
            "world": len(votes),
            "meta": meta,
            "meta_sha256": digest(meta),
            "layout_sha256": key,
            "files": {name: file.model_dump() for name, file in files.items()},
            "tensors": {
                name: {"dtype": one.dtype, "shape": one.shape, "runs": one.runs.plain()}
                for name, one in tensors.items()
            },
        }
        index = CheckpointIndex(
            step=step,
            world=len(votes),
            meta=meta,
            files=files,
            tensors=tensors,
            raw=sealed(plain),
            layout=key,
        )
        return index, heads


def sealed(plain: Mapping[str, Any]) -> bytes:
    """The bytes of ``index.json``, which begin with their checksum."""
    body = json.dumps(plain, ensure_ascii=True, allow_nan=False).encode()[1:]
    return b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body


def _together(votes: Sequence[bytes]) -> dict[str, IndexedTensor]:
    """Name -> tensor with all its pieces.

    Raises:
        CheckpointError: two ranks disagree about a tensor.
    """
    first: dict[str, tuple[int, int, DeclaredTensor]] = {}
    numbered: dict[tuple[DeclaredTensor, ...], np.ndarray] = {}
    which: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    offsets: list[np.ndarray] = []
    shapes: list[np.ndarray] = []
    decoded = [FileIndex.decode(vote) for vote in votes]
    most = max((shard.dims for shard in decoded), default=0)
    for rank, shard in enumerate(decoded):
        numbers = numbered.get(shard.tensors)
        if numbers is None:
            for one in shard.tensors:
                known = first.setdefault(one.name, (len(first), rank, one))[2]
                if known != one:
                    raise CheckpointError(
                        f"tensor {one.name!r}: rank {rank} gives {one.dtype} {list(one.shape)}, an "
                        f"earlier rank {known.dtype} {list(known.shape)}; all ranks must name the "
                        "same whole tensor"
                    )
            numbers = np.array([first[one.name][0] for one in shard.tensors], dtype=np.int64)
            numbered[shard.tensors] = numbers
        rows, dims = shard.rows, shard.dims
        which.append(numbers[rows[:, 0]])
        owners.append(np.full(len(rows), rank, dtype=np.int64))
        for result, part, empty in (
            (offsets, slice(2, 2 + dims), 0),
            (shapes, slice(-dims, None), 1),
        ):
            own = rows[:, part] if dims else rows[:, :0]
            padding = np.full((len(rows), most - dims), empty, dtype=np.int64)
            result.append(np.concatenate([own, padding], axis=1))
    numbers = np.concatenate(which)
    order = np.argsort(numbers, kind="stable")
    by, at, size = (np.concatenate(one)[order] for one in (owners, offsets, shapes))
    edges = np.searchsorted(numbers[order], np.arange(len(first) + 1)).tolist()
    return {
        name: IndexedTensor(
            one.dtype,
            one.shape,
            BoxRuns.of(
                by[edges[number] : edges[number + 1]],
                at[edges[number] : edges[number + 1], : len(one.shape)],
                size[edges[number] : edges[number + 1], : len(one.shape)],
            ),
        )
        for name, (number, _, one) in first.items()
    }


def _unreadable(path: str, cause: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read ({cause.strerror or cause})")


def _whole(folder: Folder, name: str) -> bytes:
    """A small file.

    Raises:
        CheckpointError: it cannot be read.
        CorruptError: it is missing, or large.
    """
    path = folder.where(name)
    try:
        size = folder.size(name)
        if size > MAX_INDEX_BYTES:
            raise CorruptError(
                f"{path}: larger than {MAX_INDEX_BYTES} bytes, too large for an index"
            )
        return folder.read(name, 0, size).tobytes()
    except FileNotFoundError as cause:
        raise CorruptError(f"{path}: missing; this is no complete checkpoint") from cause
    except OSError as cause:
        raise _unreadable(path, cause) from cause


def require_size(folder: Folder, file: str, size: int) -> None:
    """Refuse a file that is not there or not of its size.

    Raises:
        CheckpointError: it cannot be read.
        CorruptError: it is so.
    """
    path = folder.where(file)
    try:
        there = folder.size(file)
    except FileNotFoundError as cause:
        raise CorruptError(f"{path}: missing") from cause
    except OSError as cause:
        raise _unreadable(path, cause) from cause
    if there != size:
        raise CorruptError(f"{path}: {there} bytes where {size} were written")


def read_index(folder: Folder) -> CheckpointIndex:
    """Read and check ``index.json``; of versions 1 to 3 also the headers of all files.

    Raises:
        CheckpointError: it is missing, or of a newer version of the format.
        CorruptError: its contents have changed since it was written.
    """
    from shoal.checkpoint import legacy

    path = folder.where(INDEX_NAME)
    raw = _whole(folder, INDEX_NAME)
    lead = _LEAD.match(raw)
    if lead is None:
        raise CorruptError(f"{path}: does not begin with its checksum; it is damaged or foreign")
    body = memoryview(raw)[_LEAD_BYTES:]
    if hashlib.sha256(body).hexdigest().encode() != lead.group(1):
        raise CorruptError(
            f"{path}: its contents have changed since it was written (SHA-256 differs)"
        )
    try:
        table = json.loads(b"{" + bytes(body))
    except (ValueError, RecursionError) as cause:
        raise CorruptError(f"{path}: not JSON ({type(cause).__name__})") from cause
    if not isinstance(table, dict) or table.get("format") != "shoal-checkpoint":
        raise CorruptError(f"{path}: not the index of a Shoal checkpoint")
    version = table.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: written in version {version} of the format; this Shoal reads up to "
            f"{FORMAT_VERSION}; install a newer one"
        )
    try:
        if version != FORMAT_VERSION:
            return legacy.opened(legacy.LegacyIndex.model_validate(table), folder, raw)
        plain = _Plain.model_validate(table)
        tensors = {
            name: IndexedTensor(one.dtype, one.shape, BoxRuns.from_plain(one.runs, len(one.shape)))
            for name, one in plain.tensors.items()
        }
    except (ValueError, RecursionError) as cause:
        where = f" ({cause})"
        if isinstance(cause, ValidationError):
            first = cause.errors(include_url=False)[0]
            where = f" ({'.'.join(map(str, first['loc']))}: {first['msg']})"
        raise CorruptError(f"{path}: not a possible index{where}") from cause
    flaw = (
        "meta has changed since it was written" if plain.meta_sha256 != digest(plain.meta) else ""
    )
    if list(plain.files) != [file_name(rank) for rank in range(plain.world)]:
        flaw = flaw or f"its files are not those of {plain.world} ranks"
    flaw = flaw or flaw_of(tensors, plain.world)
    if flaw:
        raise CorruptError(f"{path}: {flaw}")
    return CheckpointIndex(
        step=plain.step,
        world=plain.world,
        meta=plain.meta,
        files=plain.files,
        tensors=tensors,
        raw=raw,
        layout=plain.layout_sha256,
        folder=folder,
    )

"""Finding and opening the user's files, local or in an object store, through fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import posixpath
import zlib
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from typing import IO, Annotated, Any, NamedTuple

from annotated_types import Ge

from shoal.core import hub
from shoal.core.errors import DataError, MissingExtraError, require
from shoal.core.parts import Choice, part
from shoal.corpora.protocols import HELDOUT_EVERY, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

# Up to here a corpus is fingerprinted by its bytes; beyond, by size and version mark.
HASHED_BYTES = 256 * 2**20
BLOCK = 2**20

_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}


class File(NamedTuple):
    """One file of a corpus.

    Args:
        name: path relative to the corpus; the base name if that is one file.
        path: path inside the file system.
        num_bytes: size as stored.
        mark: version mark of the store: etag or time of change.
    """

    name: str
    path: str
    num_bytes: int
    mark: str


class Listing:
    """The files of a corpus, in the order of their names.

    Args:
        where: the path as the user gave it, for errors.
        store: the fsspec file system.
        files: what was found.
        single: whether the path names one file.
    """

    def __init__(self, where: str, store: Any, files: list[File], single: bool) -> None:
        self.where = where
        self.files = files
        self.single = single
        self._store = store

    def only(self, files: list[File]) -> Listing:
        """The same with some of its files."""
        return Listing(self.where, self._store, files, self.single)

    @property
    def num_bytes(self) -> int:
        """Bytes as stored."""
        return sum(file.num_bytes for file in self.files)

    def url(self, file: File) -> str:
        """What to call the file in a message."""
        return str(self._store.unstrip_protocol(file.path)).removeprefix("file://")

    @contextlib.contextmanager
    def open(self, file: File, *, decompress: bool = True) -> Iterator[IO[bytes]]:
        """Open for reading; ``.gz``, ``.bz2``, ``.xz`` are decompressed on the way.

        Raises:
            DataError: the file cannot be opened or read, or is damaged.
        """
        try:
            with self._store.open(
                file.path, "rb", compression="infer" if decompress else None
            ) as stream:
                yield stream
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as cause:
            raise DataError(
                f"{self.url(file)}: cannot be read ({_reason(cause)}); repair or remove the file"
            ) from cause

    def fingerprint(self) -> str:
        """Digest of names and contents, or of names, sizes and version marks when large.

        Raises:
            DataError: a file cannot be read.
        """
        digest = hashlib.sha256()
        by_content = self.num_bytes <= HASHED_BYTES
        for file in self.files:
            digest.update(f"{file.name}\0{file.num_bytes}\0".encode())
            if not by_content:
                digest.update(f"{file.mark}\0".encode())
                continue
            with self.open(file, decompress=False) as stream:
                while block := stream.read(BLOCK):
                    digest.update(block)
        return digest.hexdigest()


def find_files(path: str, pattern: str, *, option: str) -> Listing:
    """List what a corpus reads.

    Args:
        path: a file or directory; any url that fsspec knows (``memory://``, ``s3://``), or
            ``hf://datasets/org/name`` of the hub.
        pattern: what file names in a directory must match, relative to it; ``*`` also
            spans ``/``. Names that start with a dot are left out.
        option: name of the option that gave the path, for errors.

    Raises:
        DataError: nothing is there, nothing matches, or all files are empty.
        MissingExtraError: fsspec is not installed.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError("fsspec", "run", "reading data files") from None
    if hub.is_data(path):
        path, pattern = _meant(path, pattern)
    try:
        store, root = url_to_fs(path)
        if not store.exists(root):
            raise DataError(
                f"{option} = {path!r}: no such file or directory; give a path that exists"
            )
        if store.isfile(root):
            files = [_file(posixpath.basename(root), root, store.info(root))]
            single = True
        else:
            base = root.rstrip("/")
            result = {
                str(name).removeprefix(base).lstrip("/"): info
                for name, info in store.find(root, detail=True).items()
            }
            files = [
                _file(name, info["name"], info)
                for name, info in sorted(result.items())
                if fnmatch(name, pattern)
                and not any(piece.startswith(".") for piece in name.split("/"))
            ]
            single = False
            if not files:
                raise DataError(
                    f"{option} = {path!r}: no file matches {pattern!r} among {len(result)}; "
                    "give another pattern or directory"
                )
    except DataError:
        raise
    except Exception as cause:  # every object store has its own errors
        raise DataError(f"{option} = {path!r}: cannot be opened ({_reason(cause)})") from cause
    listing = Listing(path, store, files, single)
    if listing.num_bytes == 0:
        what = "the file is empty" if single else f"all {len(files)} files are empty"
        raise DataError(f"{option} = {path!r}: {what}; give a file with text in it")
    return listing


def format_of(name: str) -> str:
    """What a file holds, by its suffix: jsonl, parquet or text."""
    for ending in (".gz", ".bz2", ".xz", ".zst"):
        name = name.removesuffix(ending)
    return _SUFFIXES.get(posixpath.splitext(name)[1].lower(), "text")


def from_path(path: str) -> Choice:
    """The corpus that reads ``path``, by the suffix of the file or of a directory's first file.

    Rows that have messages, or a prompt with its completion, are chats. What is named by an
    address of the Hugging Face hub is fetched now.

    Raises:
        DataError: nothing is there.
    """
    pattern = "*"
    if hub.is_data(path):
        path, pattern = hub.local_data(path)
    listing = find_files(path, pattern, option="data")
    corpus = format_of(listing.files[0].name)
    if holds_chats(_columns(listing, corpus)):
        corpus = "chat"
    given = {} if pattern == "*" else {"pattern": pattern}
    return Choice(name=corpus, options={"path": path, **given})


def holds_chats(columns: Collection[str]) -> bool:
    """Whether rows with these columns are conversations, or prompts with completions."""
    return "messages" in columns or {"prompt", "completion"} <= set(columns)


def _columns(listing: Listing, form: str) -> Collection[str]:
    """The columns of the first row of the first file; none of what cannot be read."""
    try:
        if form == "jsonl":
            from shoal.corpora.jsonl import json_rows

            row, _, _ = next(json_rows(listing), ({}, "", ""))
            return row
        if form == "parquet":
            from shoal.corpora.parquet import opened

            with opened(listing, listing.files[0]) as table:
                names: list[str] = table.schema_arrow.names
                return names
    except DataError:  # said by the corpus that reads it, with all that it expects
        return ()
    return ()


def corpus_at(path: str) -> dict[str, Any]:
    """The same as a config spells it."""
    return from_path(path).model_dump()


def _meant(address: str, pattern: str) -> tuple[str, str]:
    """The directory of a data set of the hub, and the pattern of the files in it."""
    path, named = hub.local_data(address)
    return path, pattern if named == "*" else named


def _file(name: str, path: str, info: dict[str, Any]) -> File:
    mark = next(
        (info[key] for key in ("etag", "ETag", "mtime", "LastModified", "created") if key in info),
        "",
    )
    return File(name, str(path), int(info.get("size") or 0), str(mark))


def _reason(cause: BaseException) -> str:
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__


@part
class FileCorpus:
    """Base of the corpora whose documents lie in files: their digest, their bytes, their cost.

    Args:
        path: file or directory; any URL that fsspec supports.
        pattern: pattern of the file names in a directory; ``*`` also matches ``/``.
        heldout_every: one in ``heldout_every`` documents is held out.
    """

    path: str
    pattern: str = "*"
    heldout_every: Annotated[int, Ge(2)] = HELDOUT_EVERY

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "data.path", self.path, expected="a file or directory")

    def fingerprint(self) -> str:
        """Digest of the files; see :meth:`Listing.fingerprint`."""
        return self._listing().fingerprint()

    def num_bytes(self) -> int:
        """Bytes of all files, as stored."""
        return self._listing().num_bytes

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Tokens come from memory-mapped shards, 2 to 4 bytes each once they are cached."""
        return data_time(work, machine, bytes_per_token=4)

    def _listing(self) -> Listing:
        return find_files(self.path, self.pattern, option="data.path")

"""Tokens on disk: written once per corpus and tokenizer, mapped into memory by every rank.

::

    <cache>/<fingerprint>/
    ├── index.json               sizes and sha256 of everything below
    ├── tokenizer.json
    ├── train-00000.bin ...      token ids, little-endian uint16 or uint32
    ├── train.offsets.bin        int64 [documents + 1]: where each document starts
    ├── train.bytes.bin          int64 [documents]: UTF-8 bytes of each document
    ├── train.learned.bin        int64 [spans, 2]: what is learned, where that is not all
    ├── heldout-00000.bin, heldout.offsets.bin, heldout.bytes.bin
    └── heldout.text.bin         the held-out text itself, for baselines

Every document is its tokens and one end of text. All shards but the last have the
same number of tokens. The directory appears whole or not at all.

Of a chat some tokens are learned: those that begin in an answer, and the end of text unless the
answer ends itself. Bytes and texts are then those of the answers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, DataError
from shoal.core.files import locked, shoal_home, write_atomic, write_dir_atomic, write_json
from shoal.core.parts import Choice
from shoal.corpora import CORPORA
from shoal.corpora import tokenizer as bpe
from shoal.corpora.chat.marks import LearnedTokens, last_sign, mark
from shoal.corpora.protocols import ChatSource, Corpus, Document

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Progress = Callable[[int, int, str], None]

# Raised when the files change, so that caches of older versions are not read.
FORMAT = 1
SHARD_BYTES = 256 * 2**20
BATCH_BYTES = 4 * 2**20
# Up to here every open verifies all checksums; beyond, only sizes.
VERIFIED_BYTES = 256 * 2**20
INDEX = "index.json"
MAX_INDEX_BYTES = 64 * 2**20

_FINGERPRINT = re.compile(r"^[0-9a-f]{32}$")
_FileName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9.-]{0,63}$")]


class TokenFile(Value):
    """One file of a token set."""

    file: _FileName
    num_bytes: NonNegativeInt
    sha256: str


class SplitIndex(Value):
    """The files of one split."""

    tokens: NonNegativeInt
    documents: NonNegativeInt
    text_bytes: NonNegativeInt
    shards: tuple[TokenFile, ...]
    offsets: TokenFile
    sizes: TokenFile
    learned: TokenFile | None = None


class TokenIndex(Value):
    """What ``index.json`` holds."""

    format: Literal[1]
    corpus: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: PositiveInt
    end_of_text: NonNegativeInt
    end_of_turn: NonNegativeInt | None = None
    shard_tokens: PositiveInt
    tokenizer: TokenFile
    train: SplitIndex
    heldout: SplitIndex
    heldout_text: TokenFile

    def files(self) -> Iterator[TokenFile]:
        """Every file but the index."""
        yield self.tokenizer
        yield self.heldout_text
        for split in (self.train, self.heldout):
            yield from (*split.shards, split.offsets, split.sizes)
            if split.learned is not None:
                yield split.learned


class TokenSplit:
    """The tokens of one split, mapped into memory.

    Args:
        name: train or heldout.
    """

    def __init__(
        self, name: Literal["train", "heldout"], directory: Path, index: TokenIndex
    ) -> None:
        entry: SplitIndex = getattr(index, name)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        self.name = name
        self.end_of_text = index.end_of_text
        self.text_bytes = entry.text_bytes
        self.offsets = _mapped(directory / entry.offsets.file, np.dtype("<i8"))
        self.bytes_per_document = _mapped(directory / entry.sizes.file, np.dtype("<i8"))
        self._shards = [_mapped(directory / shard.file, dtype) for shard in entry.shards]
        self._shard_tokens = index.shard_tokens
        self._size = entry.tokens
        self.learned: LearnedTokens | None = None
        if entry.learned is not None:
            spans = _mapped(directory / entry.learned.file, np.dtype("<i8"))
            self.learned = LearnedTokens(self, spans)

    def __len__(self) -> int:
        """Tokens, an end of text for each document included."""
        return self._size

    @property
    def num_learned(self) -> int:
        """Tokens on which there is a loss."""
        return self._size if self.learned is None else self.learned.total

    @property
    def num_documents(self) -> int:
        """Documents, empty ones included."""
        return len(self.bytes_per_document)

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill ``out_N`` with the tokens from ``start`` on; after the last comes the first."""
        done = 0
        while done < len(out_N):
            shard, inside = divmod((start + done) % self._size, self._shard_tokens)
            piece = self._shards[shard][inside : inside + len(out_N) - done]
            out_N[done : done + len(piece)] = piece
            done += len(piece)

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, int64, with the end of text."""
        start = int(self.offsets[number])
        tokens = np.empty(int(self.offsets[number + 1]) - start, dtype=np.int64)
        self.read(start, tokens)
        return tokens


class TokenSet:
    """A corpus as one model reads it."""

    def __init__(self, path: Path, index: TokenIndex) -> None:
        self.path = path
        self.fingerprint = path.name
        self.corpus = index.corpus
        self.vocab_size = index.vocab_size
        self.end_of_text = index.end_of_text
        self.end_of_turn = index.end_of_turn
        self.tokenizer_path = path / index.tokenizer.file
        self.train = TokenSplit("train", path, index)
        self.heldout = TokenSplit("heldout", path, index)
        self._heldout_text = path / index.heldout_text.file

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded now."""
        return bpe.load(self.tokenizer_path)

    def heldout_texts(self) -> Iterator[bytes]:
        """The held-out documents in UTF-8, in their order; of chats the answers."""
        with self._heldout_text.open("rb") as file:
            for size in self.heldout.bytes_per_document.tolist():
                yield file.read(size)


def prepare(
    data: Choice | str | Mapping[str, Any],
    tokenizer: str = "bpe",
    vocab_size: int = 4096,
    cache: Path | None = None,
    progress: Progress | None = None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> TokenSet:
    """The tokens of a corpus: from the cache, or made now.

    Several processes may call this at once; one does the work and the others wait.

    Args:
        data: the corpus.
        tokenizer: ``bpe`` to learn one, or the path of a ``tokenizer.json`` or of a
            directory with one; a chat template that lies there renders chats.
        vocab_size: rows of the model's embedding, and the size of a learned vocabulary.
        cache: directory of token sets; ``$SHOAL_HOME/corpora`` if not given.
        progress: called with bytes done, bytes in all and what is being done.
        shard_bytes: largest size of a shard.

    Raises:
        DataError: the corpus cannot be read or has no text, or the cache cannot be
            written; nothing half-written stays.
        ConfigError: the tokenizer cannot be used or has ids that the model lacks.
    """
    corpus: Corpus = CORPORA.build(data, where="data")
    say = progress or _silent
    root = cache if cache is not None else shoal_home() / "corpora"
    given = None if tokenizer == "bpe" else Path(tokenizer)
    if isinstance(corpus, ChatSource):
        corpus = corpus.with_model(None if given is None else bpe.locate(given).parent)
    if given is None:
        marks = [f"bpe {vocab_size}"]
    else:
        loaded = bpe.load(given)
        bpe.check_vocab(loaded, vocab_size, tokenizer)
        marks = [loaded.to_str(), str(bpe.end_of_text(loaded, given))]
    marks += [corpus.fingerprint(), repr(corpus), str(FORMAT), str(shard_bytes)]
    key = hashlib.sha256("\0".join(marks).encode()).hexdigest()[:32]
    return _ensured(
        root / key, say, lambda path: _build(path, corpus, given, vocab_size, shard_bytes, say)
    )


def files_of(path: Path) -> list[TokenFile]:
    """The files of a token set and their digests, its index included, for :func:`receive`.

    Raises:
        DataError: it is damaged.
    """
    try:
        source = path / INDEX
        index = parse(TokenIndex, json.loads(source.read_bytes()), where=str(source))
        return [_stored(source), *index.files()]
    except (OSError, ValueError, ConfigError) as cause:
        raise DataError(f"{path}: cannot be used ({cause}); delete it and run again") from cause


def receive(
    name: str,
    files: Sequence[TokenFile],
    fetch: Callable[[str], Iterable[bytes]],
    cache: Path | None = None,
) -> TokenSet:
    """The token set of this name: from the cache, or taken from elsewhere now.

    Several processes may call this at once; one does the work and the others wait.

    Args:
        name: its fingerprint, the name of its directory.
        files: from :func:`files_of`, there.
        fetch: name of a file -> its bytes, in pieces.
        cache: directory of token sets; ``$SHOAL_HOME/corpora`` if not given.

    Raises:
        DataError: what arrived is not what was sent, or the cache cannot be written; nothing
            half-written stays.
    """
    if not _FINGERPRINT.match(name):
        raise DataError(f"token set {name!r}: expected 32 hexadecimal digits")

    def taken(path: Path) -> None:
        with write_dir_atomic(path, error=DataError) as directory:
            for file in files:
                with _HashedFile(directory / file.file) as out:
                    for piece in fetch(file.file):
                        out.write(piece)
                    arrived = out.close()
                if arrived != file:
                    raise DataError(
                        f"{path / file.file}: {arrived.num_bytes} bytes with sha256 "
                        f"{arrived.sha256[:12]} arrived instead of {file.num_bytes} with "
                        f"{file.sha256[:12]}; run again"
                    )

    root = cache if cache is not None else shoal_home() / "corpora"
    return _ensured(root / name, _silent, taken)


def _ensured(path: Path, say: Progress, make: Callable[[Path], None]) -> TokenSet:
    """The token set at ``path``; made there by one process if it is missing or damaged."""
    if path.exists():
        with contextlib.suppress(_DamagedError):  # reported and repaired under the lock below
            return _checked(path)

    def waiting() -> None:
        say(0, 0, "waiting for another process to prepare the data")

    with locked(path.parent / f"{path.name}.lock", waiting, error=DataError):
        if path.exists():
            try:
                return _checked(path)
            except _DamagedError as cause:
                say(0, 0, f"{cause}; building it again")
                _remove(path)
        for leftover in path.parent.glob(f".{path.name}.*"):  # of a process that was killed
            _remove(leftover)
        make(path)
        return open_tokens(path)


def open_tokens(path: Path, vocab_size: int | None = None) -> TokenSet:
    """Map an existing token set.

    Args:
        path: its directory.
        vocab_size: of the model that will read it; None to not check.

    Raises:
        DataError: a file is missing or has changed since it was written; names the directory.
        ConfigError: the tokens have ids that the model lacks.
    """
    try:
        tokens = _checked(path)
    except _DamagedError as cause:
        raise DataError(f"{cause}; delete {path} and run again") from cause
    if vocab_size is not None and tokens.vocab_size > vocab_size:
        raise ConfigError(
            f"{path}: its tokenizer has {tokens.vocab_size} ids, the model's vocab_size is "
            f"{vocab_size}; choose a model with a larger vocabulary or another tokenizer"
        )
    return tokens


class _DamagedError(Exception):
    """A token set that has changed since it was written."""


def _silent(_done: int, _total: int, _what: str) -> None:
    return None


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    if path.stat().st_size == 0:  # nothing cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _checked(path: Path) -> TokenSet:
    try:
        source = path / INDEX
        if source.stat().st_size > MAX_INDEX_BYTES:
            raise _DamagedError(f"{source}: too large for an index")
        index = parse(TokenIndex, json.loads(source.read_bytes()), where=str(source))
        files = list(index.files())
        verify = sum(file.num_bytes for file in files) <= VERIFIED_BYTES
        for file in files:
            stored = path / file.file
            size = stored.stat().st_size
            if size != file.num_bytes:
                raise _DamagedError(f"{stored}: {size} bytes, not the {file.num_bytes} written")
            if verify and _sha256(stored) != file.sha256:
                raise _DamagedError(f"{stored}: its contents have changed since it was written")
        _check_sizes(path, index)
        return TokenSet(path, index)
    except (OSError, ValueError, RecursionError, ConfigError) as cause:
        raise _DamagedError(f"{path}: cannot be used ({cause})") from cause


def _check_sizes(path: Path, index: TokenIndex) -> None:
    item = np.dtype(index.dtype).itemsize
    full = index.shard_tokens * item
    for split in (index.train, index.heldout):
        sizes = [shard.num_bytes for shard in split.shards]
        whole = all(size == full for size in sizes[:-1]) and all(0 < s <= full for s in sizes[-1:])
        if not (
            whole
            and sum(sizes) == split.tokens * item
            and split.offsets.num_bytes == 8 * (split.documents + 1)
            and split.sizes.num_bytes == 8 * split.documents
            and (split.learned is None or split.learned.num_bytes % 16 == 0)
        ):
            raise _DamagedError(f"{path / INDEX}: its sizes are inconsistent")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as cause:
        raise DataError(
            f"{path}: damaged, and cannot be removed ({cause.strerror}); delete it and run again"
        ) from cause


def _build(
    path: Path,
    corpus: Corpus,
    given: Path | None,
    vocab_size: int,
    shard_bytes: int,
    say: Progress,
) -> None:
    total = corpus.num_bytes()
    chats = corpus if isinstance(corpus, ChatSource) else None
    say(0, total, "reading the corpus")
    if given is None:
        texts = (document.text for document in corpus.documents("train"))
        say(0, total, "training the tokenizer")
        special = () if chats is None else chats.special_tokens()
        tokenizer = bpe.train(bpe.sample(texts, total), vocab_size, special)
        end = bpe.end_of_text(tokenizer)
    else:
        tokenizer = bpe.load(given)
        end = bpe.end_of_text(tokenizer, given)
    # What a chat template spells are tokens, as they are where it is served.
    tokenizer.encode_special_tokens = chats is None
    signs = {i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special}
    end_of_turn: int | None = None
    size = bpe.check_vocab(tokenizer, vocab_size, str(given or "bpe"))
    dtype = np.dtype("<u2" if size <= 2**16 else "<u4")
    shard_tokens = max(1, shard_bytes // dtype.itemsize)
    with write_dir_atomic(path, error=DataError) as directory, contextlib.ExitStack() as stack:
        # Not tokenizer.save: it hides why a disk refused.
        text_json = tokenizer.to_str(pretty=True)
        write_atomic(directory / "tokenizer.json", text_json, error=DataError)
        splits = {
            name: _SplitWriter(directory, name, dtype, shard_tokens, stack, marks=chats is not None)
            for name in ("train", "heldout")
        }
        text = stack.enter_context(_HashedFile(directory / "heldout.text.bin"))
        done = 0
        for documents in _batches(corpus.documents()):
            texts_of = [document.text for document in documents]
            encode = tokenizer.encode_batch_fast if chats is None else tokenizer.encode_batch
            for document, encoding in zip(
                documents, encode(texts_of, add_special_tokens=False), strict=True
            ):
                raw, ids, flags = document.text.encode(), encoding.ids, None
                done += len(raw)
                if document.learned is not None:
                    raw, ids, flags = mark(document, document.learned, tokenizer, encoding, end)
                    if end_of_turn is None:
                        end_of_turn = last_sign(tokenizer, ids, signs)
                splits[document.split].add(np.array([*ids, end], dtype=dtype), len(raw), flags)
                if document.split == "heldout":
                    text.write(raw)
            say(done, max(done, total), "tokenising")
        train, heldout = (splits[name].close() for name in ("train", "heldout"))
        if train.text_bytes == 0:
            raise DataError(
                f"data = {corpus}: no text to train on in {train.documents + heldout.documents} "
                "documents; give more text"
            )
        index = TokenIndex(
            format=FORMAT,
            corpus=repr(corpus),
            dtype="uint16" if dtype.itemsize == 2 else "uint32",
            vocab_size=size,
            end_of_text=end,
            end_of_turn=end_of_turn,
            shard_tokens=shard_tokens,
            tokenizer=_stored(directory / "tokenizer.json"),
            train=train,
            heldout=heldout,
            heldout_text=text.close(),
        )
        write_json(directory / INDEX, index.model_dump(mode="json"), error=DataError)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    held: list[Document] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _stored(path: Path) -> TokenFile:
    return TokenFile(file=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path))


class _HashedFile:
    """A file that is written front to back, and its checksum."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = hashlib.sha256()
        self._size = 0
        self._file: IO[bytes] = path.open("wb")

    def __enter__(self) -> _HashedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def close(self) -> TokenFile:
        self._file.close()
        return TokenFile(
            file=self._path.name, num_bytes=self._size, sha256=self._digest.hexdigest()
        )


class _SplitWriter:
    """Appends documents to the files of one split; ``stack`` closes them in any case."""

    def __init__(
        self,
        directory: Path,
        name: str,
        dtype: np.dtype[Any],
        shard_tokens: int,
        stack: contextlib.ExitStack,
        *,
        marks: bool,
    ) -> None:
        self._directory = directory
        self._name = name
        self._shard_tokens = shard_tokens
        self._stack = stack
        self._shards: list[TokenFile] = []
        self._shard: _HashedFile | None = None
        self._room = 0
        self._tokens = 0
        self._documents = 0
        self._text_bytes = 0
        self._offsets = stack.enter_context(_HashedFile(directory / f"{name}.offsets.bin"))
        self._sizes = stack.enter_context(_HashedFile(directory / f"{name}.bytes.bin"))
        self._marks = (
            stack.enter_context(_HashedFile(directory / f"{name}.learned.bin")) if marks else None
        )
        self._offsets.write(_int64(0))

    def add(self, tokens: np.ndarray, text_bytes: int, learned: np.ndarray | None) -> None:
        """Append one document of so many UTF-8 bytes, with which of its tokens are learned."""
        if self._marks is not None and learned is not None:
            steps = np.diff(learned.astype(np.int8), prepend=0, append=0)
            self._marks.write((self._tokens + np.flatnonzero(steps)).astype("<i8").tobytes())
        self._tokens += len(tokens)
        self._documents += 1
        self._text_bytes += text_bytes
        self._offsets.write(_int64(self._tokens))
        self._sizes.write(_int64(text_bytes))
        while len(tokens):
            if self._shard is None:
                name = f"{self._name}-{len(self._shards):05d}.bin"
                self._shard = self._stack.enter_context(_HashedFile(self._directory / name))
                self._room = self._shard_tokens
            self._shard.write(tokens[: self._room].tobytes())
            taken = min(self._room, len(tokens))
            tokens = tokens[taken:]
            self._room -= taken
            if self._room == 0:
                self._shards.append(self._shard.close())
                self._shard = None

    def close(self) -> SplitIndex:
        """What was written."""
        if self._shard is not None:
            self._shards.append(self._shard.close())
            self._shard = None
        return SplitIndex(
            tokens=self._tokens,
            documents=self._documents,
            text_bytes=self._text_bytes,
            shards=tuple(self._shards),
            offsets=self._offsets.close(),
            sizes=self._sizes.close(),
            learned=None if self._marks is None else self._marks.close(),
        )


def _int64(number: int) -> bytes:
    return number.to_bytes(8, "little")

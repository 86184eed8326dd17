"""Passages of text files: where each lies, its text read from the file, and which are sampled.

A passage is a run of at most so many words of one file, a word being what spaces separate. The map
has file, byte offset and length of each, and no text.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.corpora.files import find_files
from shoal.corpora.stdlib import Stdlib
from shoal.fields.retrieve.datastore.protocols import DatastoreError

FILE, OFFSET, LENGTH, WORDS, TOKENS = range(5)
"""Columns of the map."""

_WORD = re.compile(rb"\S+")
_LETTERS = re.compile(r"\w")
# What ends a sentence, or a paragraph.
_ENDS = (b".", b"!", b"?", b".'", b'."', b".)")


class TextFile(NamedTuple):
    """A file of text on this machine.

    Args:
        name: unique in the datastore; with the offset it says whether a passage is sampled.
        path: where it is.
    """

    name: str
    path: Path


def text_files(where: str, pattern: str = "*") -> list[TextFile]:
    """The files of a directory, or the standard library's.

    Args:
        where: a file or directory, or ``stdlib``.
        pattern: of the names of files in a directory; ``*`` also matches ``/``.

    Raises:
        DataError: nothing is there, or it is not on a disk of this machine.
    """
    if where == "stdlib":
        return [TextFile(name, path) for name, path in Stdlib().files()]
    files = [
        TextFile(one.name, Path(one.path))
        for one in find_files(where, pattern, option="data").files
    ]
    if not files[0].path.is_file():
        raise DataError(
            f"data = {where!r}: passages are read where they lie, so the files must be on a disk "
            "of this machine; copy them first"
        )
    return files


def passage_spans(
    data: bytes, words: int, *, sentences: bool = False
) -> Iterator[tuple[int, int, int]]:
    """(offset, bytes, words) of the passages of a text; the last may be short.

    A run without a letter or digit is no passage.

    Args:
        data: the text.
        words: of a passage, at most.
        sentences: end a passage at the last end of a sentence in its second half, if there is one.
    """
    places = [match.span() for match in _WORD.finditer(data)]
    first = 0
    while first < len(places):
        last = min(first + words, len(places))
        if sentences and last < len(places):
            ends = (at for at in range(last, first + words // 2, -1) if _ends(data, places, at))
            last = next(ends, last)
        begin, end = places[first][0], places[last - 1][1]
        if _LETTERS.search(data[begin:end].decode("utf-8", "replace")):
            yield begin, end - begin, last - first
        first = last


def _ends(data: bytes, places: Sequence[tuple[int, int]], at: int) -> bool:
    begin, end = places[at - 1]
    return data[begin:end].endswith(_ENDS) or data[end : places[at][0]].count(b"\n") > 1


def map_passages(
    files: Sequence[TextFile],
    words: int,
    *,
    sentences: bool = False,
    tokens: Callable[[Sequence[str]], Sequence[int]] | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """The map of the passages of some files, int64 [N, 5].

    Args:
        files: in their order.
        words: of a passage, at most.
        sentences: as of :func:`passage_spans`.
        tokens: counts the tokens of some texts; None leaves them 0.
        tick: called with the files that are done.

    Raises:
        DataError: a file cannot be read, or is no text.
    """
    pieces = [np.empty((0, 5), np.int64)]
    for number, file in enumerate(files):
        try:
            data = file.path.read_bytes()
        except OSError as cause:
            raise DataError(f"{file.path}: cannot be read ({cause.strerror})") from cause
        if b"\0" in data:
            raise DataError(f"{file.path}: is a binary file; leave it out with pattern")
        spans = list(passage_spans(data, words, sentences=sentences))
        rows = np.zeros((len(spans), 5), np.int64)
        rows[:, FILE] = number
        if spans:
            rows[:, OFFSET : WORDS + 1] = spans
        if tokens is not None and spans:
            rows[:, TOKENS] = tokens(
                [data[at : at + size].decode("utf-8", "replace") for at, size, _ in spans]
            )
        pieces.append(rows)
        tick(number + 1)
    return np.concatenate(pieces)


@dataclass(frozen=True)
class PassageMap:
    """Where passages lie.

    Args:
        files: of the datastore.
        sizes: bytes of each file when it was mapped.
        rows: int64 [N, 5]: file, offset, length, words, tokens.
    """

    files: Sequence[TextFile]
    sizes: Sequence[int]
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def texts(self, ids: Any) -> list[str]:
        """Texts of some passages, each read from its file.

        Raises:
            DatastoreError: a file is gone, or has changed since it was mapped.
        """
        texts = [""] * len(ids)
        rows = np.asarray(self.rows[ids])
        order = np.lexsort((rows[:, OFFSET], rows[:, FILE]))
        descriptor, opened = -1, -1
        try:
            for at in order.tolist():
                number, offset, length = rows[at, : LENGTH + 1].tolist()
                if number != opened:
                    if descriptor >= 0:
                        os.close(descriptor)
                    descriptor, opened = -1, number
                    descriptor = self._open(number)
                texts[at] = os.pread(descriptor, length, offset).decode("utf-8", "replace")
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return texts

    def _open(self, number: int) -> int:
        path = self.files[number].path
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as cause:
            raise DatastoreError(
                f"{path}: cannot be read ({cause.strerror}); a datastore reads its passages from "
                "the files of which it was built: put them back, or build it again"
            ) from cause
        size = os.fstat(descriptor).st_size
        if size != self.sizes[number]:
            os.close(descriptor)
            raise DatastoreError(
                f"{path}: has {size} bytes, and had {self.sizes[number]} when the datastore was "
                "built; build it again"
            )
        return descriptor

    @cached_property
    def keys(self) -> np.ndarray:
        """Uint64 [N]: of each passage, by name of its file and offset."""
        names = [hashlib.blake2b(one.name.encode(), digest_size=8).digest() for one in self.files]
        files = np.frombuffer(b"".join(names), np.uint64)
        return mixed(files[self.rows[:, FILE]] ^ mixed(self.rows[:, OFFSET].astype(np.uint64)))

    def sampled(self, share: float, seed: int) -> np.ndarray:
        """Bool [N]: passages of a sample; a larger share has all of a smaller one of its seed."""
        if share >= 1:
            return np.ones(len(self), bool)
        salt = mixed(np.array([seed], np.uint64))
        return mixed(self.keys ^ salt) < np.uint64(min(int(share * 2.0**64), 2**64 - 1))

    def tokens(self, share: float = 1.0, seed: int = 0) -> int:
        """Tokens of a sample; its words, where no tokenizer was given."""
        column = TOKENS if self.rows[:, TOKENS].any() else WORDS
        return int(self.rows[self.sampled(share, seed), column].sum())


def mixed(values: np.ndarray) -> np.ndarray:
    """Of each number another, one to one, that looks random.

    Source: Steele, Lea and Flood, Fast Splittable Pseudorandom Number Generators, 2014.
    """
    with np.errstate(over="ignore"):
        mixed = values + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))


@lru_cache(maxsize=1 << 18)
def word_hash(word: str) -> int:
    """64 bits of a word."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")

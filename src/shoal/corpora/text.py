"""Plain text in UTF-8: one file, or a directory of them."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Iterator
from typing import IO

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.corpora.files import BLOCK, FileCorpus
from shoal.corpora.protocols import Document, Split, split_of

# No document is longer, so that none needs more memory than a batch of others.
MAX_CHARACTERS = 32 * 2**20
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n\s*")


@part
class TextCorpus(FileCorpus):
    r"""Text files; every file of a directory is a document.

    A single file is split into documents: at the first blank line after 1/256 of the file (at least
    512, at most 16,384 characters), or, without a blank line in four times that length, at the last
    line end. The concatenated documents are the file. Held out: ``sha256(name) % heldout_every ==
    0``, where the name is the path relative to the directory, or ``file#number`` for a piece of a
    single file.
    """

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, in the order of the names.

        Raises:
            DataError: a file is missing, unreadable or binary; the message names it.
        """
        listing = self._listing()
        for file in listing.files:
            target = MAX_CHARACTERS // 4
            if listing.single:
                target = min(16_384, max(512, file.num_bytes // 256))
            place = split_of(file.name, self.heldout_every)
            if split not in (None, place) and not listing.single:
                continue
            with listing.open(file) as stream:
                for number, text in enumerate(pieces(stream, listing.url(file), target)):
                    name = f"{file.name}#{number}" if listing.single or number else file.name
                    if listing.single:
                        place = split_of(name, self.heldout_every)
                    if split in (None, place):
                        yield Document(name, text, place)


def pieces(stream: IO[bytes], where: str, target: int) -> Iterator[str]:
    """Cut a stream into texts of about ``target`` characters; joined they are the stream.

    Raises:
        DataError: the bytes are not text in UTF-8; the message names the place.
    """
    held = ""
    for block in _decoded(stream, where):
        held += block
        while len(held) > 4 * target:
            cut = _cut(held, target)
            yield held[:cut]
            held = held[cut:]
    while blank := _BLANK_LINE.search(held, target):
        yield held[: blank.end()]
        held = held[blank.end() :]
    if held:
        yield held


def _cut(text: str, target: int) -> int:
    blank = _BLANK_LINE.search(text, target, 4 * target)
    if blank:
        return blank.end()
    line = text.rfind("\n", target, 4 * target)
    return line + 1 if line >= 0 else min(len(text), 4 * target)


def _decoded(stream: IO[bytes], where: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    for block in iter(functools.partial(stream.read, BLOCK), b""):
        yield _checked(decoder, block, where, done, final=False)
        done += len(block)
    yield _checked(decoder, b"", where, done, final=True)


def _checked(
    decoder: codecs.IncrementalDecoder, block: bytes, where: str, done: int, *, final: bool
) -> str:
    zero = block.find(0)
    if zero >= 0:
        raise DataError(
            f"{where}: byte {done + zero} is NUL, so this is a binary file; give text in UTF-8, "
            "or leave the file out with pattern"
        )
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{where}: byte {done - pending + cause.start} is not UTF-8 ({cause.reason}); "
            "convert the file to UTF-8, or leave it out with pattern"
        ) from cause

"""JSON Lines: one JSON object a line, its text in one field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shoal.core.errors import DataError, require
from shoal.core.parts import part
from shoal.corpora.files import FileCorpus, Listing
from shoal.corpora.protocols import Document, Split, split_of

MAX_LINE = 64 * 2**20


@part
class JsonlCorpus(FileCorpus):
    """One document per line; blank lines are skipped.

    Held out: ``sha256(name) % heldout_every == 0``, where the name is the value of
    ``id_field``, or without one ``file#line`` with lines counted from 0.

    Args:
        field: the key that holds the text.
        id_field: a key whose value names the row, or empty.
    """

    field: str = "text"
    id_field: str = ""
    pattern: str = "*.jsonl*"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.field), "data.jsonl.field", self.field, expected="the name of a key")

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, in the order of files and lines.

        Raises:
            DataError: a line is not a JSON object with text; names file and line.
        """
        for row, name, where in json_rows(self._listing()):
            text = self._text(row, self.field, where)
            if self.id_field:
                name = self._name(row, where)
            place = split_of(name, self.heldout_every)
            if split in (None, place):
                yield Document(name, text, place)

    def _text(self, row: dict[str, Any], key: str, where: str) -> str:
        if key not in row:
            raise DataError(
                f"{where}: no key {key!r}; it has {', '.join(map(repr, list(row)[:8])) or 'none'}; "
                "set data.field to the right one, or give chats, with messages or with prompt and "
                "completion"
            )
        value = row[key]
        if not isinstance(value, str):
            raise DataError(
                f"{where}: {key!r} is {type(value).__name__}, not text; set data.field to another "
                f"key"
            )
        return whole_unicode(value)

    def _name(self, row: dict[str, Any], where: str) -> str:
        value = row.get(self.id_field)
        if not isinstance(value, str | int):
            raise DataError(
                f"{where}: {self.id_field!r} is {type(value).__name__}, not text or a whole "
                "number; name another data.id_field, or leave it out"
            )
        return whole_unicode(str(value))


def json_rows(listing: Listing) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The objects of JSON Lines: each with its name and its place for errors.

    Raises:
        DataError: a line is not a JSON object; names file and line.
    """
    for file in listing.files:
        with listing.open(file) as stream:
            number = 0
            while line := stream.readline(MAX_LINE + 1):
                if line.strip():
                    where = f"{listing.url(file)}, line {number + 1}"
                    yield _object(line, where), f"{file.name}#{number}", where
                number += 1


def whole_unicode(text: str) -> str:
    r"""``text`` with each half of a surrogate pair, which JSON can spell, made U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MAX_LINE:
        raise DataError(f"{where}: longer than {MAX_LINE // 2**20} MiB; is this JSON Lines?")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise DataError(
            f"{where}: byte {cause.start} of the line is not UTF-8; this file is binary or in "
            "another encoding; give JSON Lines in UTF-8"
        ) from cause
    except (ValueError, RecursionError) as cause:
        raise DataError(f"{where}: not JSON ({cause}); give one JSON object a line") from cause
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: {type(row).__name__}, not an object; give one JSON object a line"
        )
    return row

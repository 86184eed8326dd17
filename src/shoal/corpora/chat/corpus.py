"""Conversations in JSON Lines or Parquet, of which a model learns the assistant's part.

A row has ``messages``, a list of objects with ``role`` and ``content``, or ``prompt`` and
``completion``, two texts or two lists of messages. Messages become text by the model's chat
template, a prompt and its completion as they are.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from shoal.core.errors import DataError
from shoal.core.folder import read_text
from shoal.core.parts import part
from shoal.corpora.chat.rows import COLUMNS, read_row
from shoal.corpora.chat.template import (
    CHATML,
    CHATML_TOKENS,
    MAX_SOURCE_BYTES,
    ChatTemplate,
    load_template,
)
from shoal.corpora.chat.turns import MarkedText, marked
from shoal.corpora.files import File, FileCorpus, Listing, format_of
from shoal.corpora.jsonl import json_rows
from shoal.corpora.parquet import opened, table_rows
from shoal.corpora.protocols import Document, Split, split_of


@part
class ChatCorpus(FileCorpus):
    """One conversation per row; the loss is on the assistant's turns or on the completion.

    Held out: ``sha256(file#row) % heldout_every == 0`` with rows counted from 0; all texts of one
    conversation are in one split.

    Args:
        template: a model directory with a chat template, or the file of one; empty uses that of the
            trained model, or ChatML if it has none.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"learns_answers"})
    template: str = ""

    def with_model(self, directory: Path | None) -> ChatCorpus:
        """The corpus that renders with a model's template, unless it names one.

        Args:
            directory: of the model; None for one whose tokenizer is learned from the corpus.
        """
        if self.template or directory is None:
            return self
        return dataclasses.replace(self, template=str(directory))

    def chat_template(self) -> ChatTemplate:
        """How messages become text.

        Raises:
            ModelError: the template's file is not what it should be.
        """
        if not self.template:
            return ChatTemplate(CHATML, where="the default chat template")
        path = Path(self.template).expanduser()
        if path.is_file():
            return ChatTemplate(read_text(path, limit=MAX_SOURCE_BYTES), where=str(path))
        if not path.is_dir():
            raise DataError(
                f"data.template = {self.template!r}: no such file or directory; give a model "
                "directory or a file with a chat template, or leave it out"
            )
        return load_template(path, default=CHATML)

    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that a tokenizer learned from this corpus has besides the usual one."""
        return CHATML_TOKENS if self.chat_template().source == CHATML else ()

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The texts of one split, or of both, in the order of files and rows.

        Raises:
            DataError: a row is no conversation, or has nothing to learn; names file and row.
            ModelError: the chat template is not what it should be.
        """
        template = self.chat_template()
        listing = self._listing()
        for file in listing.files:
            for row, name, where in _rows(listing, file):
                place = split_of(name, self.heldout_every)
                if split not in (None, place):
                    continue
                chat = read_row(row, where)
                if chat.messages:
                    texts = list(marked(template, chat.messages, where, first=chat.first))
                else:
                    text, begin = chat.prompt + chat.completion, len(chat.prompt)
                    texts = [MarkedText(text, ((begin, len(text)),))]
                for number, (text, learned) in enumerate(texts):
                    name_of = name if len(texts) == 1 else f"{name}/{number}"
                    yield Document(name_of, text, place, learned)

    def fingerprint(self) -> str:
        """Digest of the files and of the template."""
        template = self.chat_template()
        marks = (super().fingerprint(), template.source, str(sorted(template.tokens.items())))
        return hashlib.sha256("\0".join(marks).encode()).hexdigest()

    def _listing(self) -> Listing:
        """The files of a directory that can hold rows."""
        whole = super()._listing()
        files = [file for file in whole.files if format_of(file.name) in _READERS]
        if not files:
            raise DataError(
                f"data.path = {self.path!r}: no file of JSON Lines (.jsonl) or Parquet (.parquet); "
                "give one"
            )
        return whole.only(files)


def _lines(listing: Listing, file: File) -> Iterator[tuple[dict[str, Any], str, str]]:
    return json_rows(listing.only([file]))


def _table(listing: Listing, file: File) -> Iterator[tuple[dict[str, Any], str, str]]:
    where = listing.url(file)
    with opened(listing, file) as table:
        columns = [one for one in (*COLUMNS, "tools") if one in table.schema_arrow.names]
        if not columns:
            raise DataError(
                f"{where}: no column {', '.join(COLUMNS)}; it has "
                f"{', '.join(table.schema_arrow.names[:12])}"
            )
        for number, row in table_rows(table, columns, where):
            yield row, f"{file.name}#{number}", f"{where}, row {number}"


_READERS = {"jsonl": _lines, "parquet": _table}


def _rows(listing: Listing, file: File) -> Iterator[tuple[dict[str, Any], str, str]]:
    """The rows of a file, each with its name and its place for errors."""
    return _READERS[format_of(file.name)](listing, file)

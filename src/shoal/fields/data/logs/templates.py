"""From masked lines to templates and parameters, whatever the parser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.fields.data.logs.formats import check_masks
from shoal.fields.data.logs.native import contents, parameters
from shoal.fields.data.logs.protocols import Ints, LogParser, Longs, MinedTemplates
from shoal.fields.data.logs.reading import as_text, binary_column, masked
from shoal.fields.data.readers import arrow


def unified(templates: Sequence[bytes]) -> MinedTemplates:
    """Number templates; those with the same text are one.

    Args:
        templates: text of each group.
    """
    known: dict[bytes, int] = {}
    ids = np.array([known.setdefault(text, len(known)) for text in templates], np.int32)
    return MinedTemplates(ids, list(known))


class DistinctLines:
    """Masked lines without those that were there before, for parsers that look at each once.

    Args:
        found: called at the end with (distinct lines as tokens, how often each occurs); returns the
            template of each.
    """

    def __init__(self, found: Callable[[list[list[bytes]], Longs], list[bytes]]) -> None:
        self._found = found
        self._known: dict[bytes, int] = {}
        self._counts: list[int] = []

    def add(self, masked: Any) -> Ints:
        """The number of each line among the distinct ones."""
        encoded = masked.dictionary_encode()
        places = []
        for line in encoded.dictionary.to_pylist():
            key = b" ".join(line.split())
            place = self._known.setdefault(key, len(self._known))
            if place == len(self._counts):
                self._counts.append(0)
            places.append(place)
        ids: Ints = np.array(places, np.int32)[encoded.indices.to_numpy()]
        for place, count in enumerate(np.bincount(ids).tolist()):
            self._counts[place] += count
        return ids

    def finish(self) -> MinedTemplates:
        """What the parser makes of them."""
        lines = [line.split() for line in self._known]
        return unified(self._found(lines, np.array(self._counts, np.int64)))


def lists_of(counts: Longs, values: Any) -> Any:
    """Arrow array of lists of text.

    Args:
        counts: int64 [n], length of each list.
        values: Arrow array of large_binary, the items of all.
    """
    pa = arrow()
    offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, as_text(values))


def parsed_table(parser: LogParser, lines: Sequence[bytes | str], masks: Sequence[str]) -> Any:
    """Lines without headers as a table: ``template_id``, ``template``, ``parameters``.

    Raises:
        ConfigError: a mask cannot be read.
        DataError: a line is neither text nor bytes.
    """
    pa = arrow()
    check_masks(masks)
    column = binary_column(lines)
    miner = parser.open()
    groups = miner.add(masked(column, masks))
    mined = miner.finish()
    ids = mined.ids[groups] if len(groups) else groups
    texts = as_text(pa.array(mined.templates, pa.large_binary()))
    found = parameters(column, ids, mined.templates, flexible=True)
    return pa.table(
        {
            "template_id": ids,
            "template": texts.take(pa.array(ids)),
            "parameters": lists_of(found.counts, found.values),
        }
    )


def substituted(template: bytes, values: Sequence[bytes]) -> bytes:
    """A template with its parameters in their places.

    Args:
        template: with ``<*>`` for each parameter.
        values: as many.
    """
    pieces = template.split(b"<*>")
    return b"".join(text for pair in zip(pieces, (*values, b""), strict=True) for text in pair)


def bytes_in(column: Any) -> int:
    """Bytes of an Arrow array of large_binary."""
    _, offsets = contents(column)
    return int(offsets[-1] - offsets[0])

"""What documents are judged by: counts of words, lines and repetitions, in one native pass.

``reference.py`` has a function of the same name in Python for each: the oracle of the tests, and
what is used, with one warning, where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import unicodedata
import warnings
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.filters import reference
from shoal.fields.data.readers import arrow

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Hashes: TypeAlias = npt.NDArray[np.uint64]

SIZES = ("chars", "words")
"""Columns of :func:`sizes`. Words are what spaces separate."""

QUALITY = (
    "words",
    "solid_words",
    "solid_chars",
    "alpha_words",
    "hashes",
    "ellipses",
    "stop_words",
    "lines",
    "bullet_lines",
    "ellipsis_lines",
)
"""Columns of :func:`quality`. Solid words have more than signs."""

LINES = ("chars", "words", "feeds", "full_lines", "terminal_lines", "brief_lines", "bytes")
"""Columns of :func:`lines`. Full lines are what line feeds separate and is not blank."""

REPEATS = (
    "chars",
    "paragraphs",
    "repeated_paragraphs",
    "repeated_paragraph_chars",
    "lines",
    "repeated_lines",
    "repeated_line_chars",
    *(f"top_{n}_gram" for n in range(2, 5)),
    *(f"repeated_{n}_grams" for n in range(5, 11)),
)
"""Columns of :func:`repeats`, the last nine in characters."""

# Of the library, in this order.
_SOURCES = ("text", "counts", "repeats", "c4", "grams", "spans")
# Code points that are looked up; beyond them are private ones.
_CHARACTERS, _LETTERS, _MARKS = 0xE1000, 0x34000, 0xE0000
_ALPHA, _SPACE, _BREAK, _SOLID, _TERMINAL, _ALNUM = 1, 2, 4, 8, 16, 32


class Columns(NamedTuple):
    """UTF-8 documents as Arrow has them.

    Args:
        data: uint8, all bytes.
        offsets: int64 [n + 1], where each begins.
        alive: uint8 [n], which of them are looked at; the others have zeros.
    """

    data: Bytes
    offsets: Ints
    alive: Bytes

    @property
    def num(self) -> int:
        """How many documents."""
        return len(self.alive)

    def addresses(self) -> tuple[int, int, int]:
        """Of data and offsets, with the number of documents between and ``alive`` behind."""
        return self.data.ctypes.data, self.offsets.ctypes.data, self.num

    def text(self, at: int) -> str:
        """One document."""
        return self.data[self.offsets[at] : self.offsets[at + 1]].tobytes().decode()


def columns_of(texts: Any, alive: npt.NDArray[np.bool_] | None = None) -> Columns:
    """The memory of an array of Arrow; nothing is copied but what is not in one piece.

    Args:
        texts: ``large_string``, without nulls.
        alive: bool [n]; None for all.
    """
    _, offsets, data = texts.buffers()
    first = texts.offset
    places = np.frombuffer(offsets, np.int64, len(texts) + 1, 8 * first)
    raw = np.zeros(1, np.uint8) if data is None or not data.size else np.frombuffer(data, np.uint8)
    kept = np.ones(len(texts), np.uint8) if alive is None else alive.astype(np.uint8)
    return Columns(raw, places, kept)


@functools.cache
def native(*flags: str) -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once.

    Args:
        flags: further compiler flags, by which the tests build it for other processors.
    """
    here = Path(__file__)
    source = "".join(here.with_name(f"{name}.cpp").read_text("utf-8") for name in _SOURCES)
    try:
        library = build(source, name="textfilters", flags=flags)
    except BuildError as cause:
        warnings.warn(f"filters of text are some hundred times slower: {cause}", stacklevel=3)
        return None
    begin: list[Any] = [c_void_p, c_void_p, c_int64]
    signatures: dict[str, list[Any]] = {
        "sizes": [c_void_p] * 3,
        "quality": [c_void_p, c_void_p, c_int64, c_void_p],
        "lines": [c_void_p, c_void_p, c_int64, c_void_p],
        "repeated_lines": [c_void_p] * 4,
        "repeats": [c_void_p] * 4,
        "c4": [c_void_p] * 7,
        "gram_hashes": [c_void_p, c_int64, c_int64, c_void_p],
        "spans": [c_void_p, c_int64, c_void_p],
        "contains": [c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p],
    }
    for name, rest in signatures.items():
        function = getattr(library, name)
        function.argtypes = begin + rest
        function.restype = c_int64 if name in ("gram_hashes", "spans") else None
    return library


@functools.cache
def _classes() -> Bytes:
    """Uint8 [_CHARACTERS], the properties of every character."""
    table = np.zeros(_CHARACTERS, np.uint8)
    for code in (*range(_LETTERS), *range(_MARKS, _CHARACTERS)):
        one = chr(code)
        category = unicodedata.category(one)
        if category == "Cn":
            continue
        table[code] = (
            _ALPHA * one.isalpha()
            + _SPACE * one.isspace()
            + _BREAK * (len(f"{one}a".splitlines()) > 1)
            + _SOLID * (category[0] not in "PSC")
            + _TERMINAL * (one in reference.TERMINAL)
            + _ALNUM * one.isalnum()
        )
    return table


def _each(
    function: str, oracle: Callable[[str], Any], texts: Columns, width: int, *given: Any
) -> Ints:
    """Int64 [n, width] of a native function, or of what stands in for it; 0 for rows that are out.

    Args:
        function: its name.
        oracle: text -> numbers.
        texts: n documents.
        width: numbers of a row.
        given: further arguments of the native function.
    """
    library, out = native(), np.zeros((texts.num, width), np.int64)
    if library is None:
        for at in np.flatnonzero(texts.alive).tolist():
            out[at] = oracle(texts.text(at))
        return out
    where = (*texts.addresses(), texts.alive.ctypes.data, _classes().ctypes.data)
    more = (one.ctypes.data if isinstance(one, np.ndarray) else one for one in given)
    getattr(library, function)(*where, *more, out.ctypes.data)
    return out


def sizes(texts: Columns) -> Ints:
    """Characters and words of n documents, int64 [n, :data:`SIZES`]."""
    return _each("sizes", reference.sizes, texts, len(SIZES))


def quality(texts: Columns, enough: int = 8) -> Ints:
    """Words, marks and lines.

    Args:
        texts: n documents.
        enough: stop words from which on there may be more.

    Returns:
        int64 [n, :data:`QUALITY`].
    """
    return _each("quality", reference.quality, texts, len(QUALITY), enough)


def lines(texts: Columns, brief: int) -> Ints:
    """Lines of n documents.

    Args:
        texts: n documents.
        brief: most characters of a brief line.

    Returns:
        int64 [n, :data:`LINES`].
    """
    return _each("lines", lambda text: reference.lines(text, brief), texts, len(LINES), brief)


def repeated_lines(texts: Columns, enough: Ints) -> Ints:
    """Characters of the lines that came before and are not blank.

    Args:
        texts: n documents.
        enough: int64 [n], beyond which counting may stop.

    Returns:
        int64 [n].
    """
    return _each("repeated_lines", reference.repeated_lines, texts, 1, enough)[:, 0]


def repeats(texts: Columns, limits: Sequence[float] | None = None) -> Ints:
    """What is repeated in each document.

    Args:
        texts: n documents.
        limits: most shares: of the paragraphs, of the characters in paragraphs, of the lines, of
            the characters in lines, and of the characters for each n-gram. With them, which is
            quicker, what is repeated may be 0 where it is surely within its limit or where
            something before it is not, and may be too low where it still is not.

    Returns:
        int64 [n, :data:`REPEATS`].
    """
    bounds = None if limits is None else np.array(limits, np.float64)
    return _each("repeats", reference.repeats, texts, len(REPEATS), bounds)


def c4(texts: Columns, rules: Sequence[int]) -> tuple[npt.NDArray[np.int8], Any, Ints]:
    """Documents as the rules of C4 leave them.

    Args:
        texts: n documents.
        rules: as :func:`shoal.fields.data.filters.reference.c4` has them.

    Returns:
        int8 [n], -1 or the rule that drops a document; its text (``large_string``), empty where it
        is dropped; int64 [5], lines that each rule dropped.
    """
    verdicts, dropped = np.full(texts.num, -1, np.int8), np.zeros(5, np.int64)
    library = native()
    if library is None:
        out = [""] * texts.num
        for at in np.flatnonzero(texts.alive).tolist():
            verdicts[at], text, lines = reference.c4(texts.text(at), rules)
            out[at] = text if verdicts[at] < 0 else ""
            dropped += lines
        return verdicts, arrow().array(out, arrow().large_string()), dropped
    given = np.array(rules, np.int64)
    size = int(texts.offsets[-1] - texts.offsets[0])
    data, offsets = np.empty(size + 1, np.uint8), np.empty(texts.num + 1, np.int64)
    library.c4(
        *texts.addresses(),
        *(
            array.ctypes.data
            for array in (texts.alive, _classes(), given, data, offsets, verdicts, dropped)
        ),
    )
    buffers = [None, arrow().py_buffer(offsets), arrow().py_buffer(data[: offsets[-1]])]
    return (
        verdicts,
        arrow().Array.from_buffers(arrow().large_string(), texts.num, buffers),
        dropped,
    )


def spans(texts: Columns) -> Ints:
    """Parts that may have personal data; without a compiler each document is one.

    Args:
        texts: documents.

    Returns:
        int64 [parts, 4]: document; its byte where the part begins; that behind the part; what it
            may be, a sum: 1 an e-mail address, 2 a card number, 4 and 8 an IP address of version 4
            and 6, 16 a telephone number. A part has at least the byte before what it may be and
            two behind it.
    """
    library = native()
    if library is None:
        rows = np.flatnonzero(texts.alive)
        zeros = np.zeros(len(rows), np.int64)
        return np.stack([rows, zeros, np.diff(texts.offsets)[rows], zeros + 31], axis=1)
    out = np.empty((1024 + texts.num * 16, 4), np.int64)
    while True:
        where = (*texts.addresses(), texts.alive.ctypes.data)
        found = library.spans(*where, len(out), out.ctypes.data)
        if found <= len(out):
            return out[:found]
        out = np.empty((found, 4), np.int64)


def gram_hashes(texts: Columns, n: int) -> Hashes:
    """Hashes of all n words in a row, of all documents; none is 0. Empty without a compiler."""
    library = native()
    if library is None:
        return np.zeros(0, np.uint64)
    out = np.empty(int(texts.offsets[-1] - texts.offsets[0]) // 2 + 1, np.uint64)
    found = library.gram_hashes(
        *texts.addresses(), _classes().ctypes.data, n, len(out), out.ctypes.data
    )
    return out[:found]


def hash_table(hashes: Hashes) -> Hashes:
    """The table that :func:`contains` looks in: each hash at its place, or at the next free one."""
    unique = np.unique(hashes)
    places = 1 << max(10, int(2 * len(unique)).bit_length())
    table = np.zeros(places, np.uint64)
    for hashed in unique.tolist():
        at = (hashed >> 20) & (places - 1)
        while table[at]:
            at = (at + 1) & (places - 1)
        table[at] = hashed
    return table


def contains(texts: Columns, n: int, table: Hashes) -> npt.NDArray[np.bool_]:
    """Which documents may have n words in a row whose hash is in a table; all without a compiler.

    Args:
        texts: documents.
        n: words.
        table: of :func:`hash_table`.

    Returns:
        bool [documents].
    """
    library = native()
    if library is None:
        return texts.alive.astype(bool)
    found = np.zeros(texts.num, np.uint8)
    where = (*texts.addresses(), texts.alive.ctypes.data, _classes().ctypes.data)
    library.contains(*where, n, table.ctypes.data, len(table), found.ctypes.data)
    return found.astype(bool)

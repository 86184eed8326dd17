"""The native functions for logs, over arrays.

``reference.py`` has the same in Python: the oracle of the tests, and what is used, with one
warning, where there is no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.logs import reference
from shoal.fields.data.logs.protocols import Ints, Longs
from shoal.fields.data.readers import arrow

Bools = npt.NDArray[np.bool_]


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library; None where it cannot be built, which is said once."""
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    try:
        library = build(source, name="logs")
    except BuildError as cause:
        warnings.warn(f"parsing of logs is some ten times slower: {cause}", stacklevel=3)
        return None
    pointers, count = [c_void_p], [c_int64]
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "split_lines": (c_int64, [*pointers, *count, *pointers * 3]),
        "headers": (
            None,
            [*pointers * 3, *count, *pointers, *count, *pointers, *count * 2, *pointers * 2],
        ),
        "gather": (None, [*pointers * 2, *count * 2, *pointers * 2]),
        "tree_new": (c_void_p, [*count, c_double, *count * 3]),
        "tree_free": (None, pointers),
        "tree_add": (None, [*pointers * 3, *count, *pointers]),
        "tree_size": (c_int64, pointers),
        "tree_templates": (c_int64, pointers * 2),
        "parameters": (
            None,
            [*pointers * 2, *count, *pointers * 3, *count * 2, *pointers * 2],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


class SplitLines(NamedTuple):
    r"""Lines of a block of text.

    Args:
        begin: int64 [n], first byte of each.
        end: int64 [n], what comes after its last, without the line's end.
        ending: uint8 [n]: 0 ``\n``, 1 ``\r\n``, 2 none.
    """

    begin: Longs
    end: Longs
    ending: npt.NDArray[np.uint8]


def split_lines(text: bytes) -> SplitLines:
    """Cut a block into lines."""
    library = native()
    if library is None:
        lines = reference.split_lines(text)
        sizes = np.array([len(line) for line, _ in lines], np.int64)
        ending = np.array([end for _, end in lines], np.uint8)
        whole = sizes + np.array([1, 2, 0])[ending]
        begin = np.cumsum(whole) - whole
        return SplitLines(begin, begin + sizes, ending)
    most = text.count(b"\n") + 1
    begin, end = np.empty(most, np.int64), np.empty(most, np.int64)
    ending = np.empty(most, np.uint8)
    n = library.split_lines(text, len(text), _at(begin), _at(end), _at(ending))
    return SplitLines(begin[:n], end[:n], ending[:n])


class HeaderProgram(NamedTuple):
    """A header's format, as the kernel reads it.

    Args:
        fields: their names, the content last.
        items: int32 [n, 3].
        texts: of the literals.
        pattern: the same as a regular expression over bytes.
        exact: the same where a space of the format is one space.
    """

    fields: tuple[str, ...]
    items: Ints
    texts: bytes
    pattern: Any
    exact: Any


def header_fields(
    text: bytes, lines: SplitLines, program: HeaderProgram, *, flexible: bool
) -> tuple[Longs, Bools]:
    """Fields of the headers of lines.

    Args:
        text: the block.
        lines: where its lines are.
        program: of the format.
        flexible: a space of the format stands for several, and none counts at a line's ends.

    Returns:
        Spans, int64 [n, fields, 2], -1 where a field is absent; and which lines have the header.
        All of a line that has not is its content.
    """
    n, fields = len(lines.begin), len(program.fields)
    spans, ok = np.full((n, fields, 2), -1, np.int64), np.zeros(n, np.bool_)
    library = native()
    if library is not None:
        library.headers(
            *(text, _at(lines.begin), _at(lines.end), n, _at(program.items), len(program.items)),
            *(program.texts, fields, int(flexible), _at(spans), _at(ok)),
        )
        return spans, ok
    for at, (begin, end) in enumerate(zip(lines.begin.tolist(), lines.end.tolist(), strict=True)):
        line = text[begin:end]
        if flexible:
            line = line.lstrip(b" \t\n\r\v\f")
            begin = end - len(line)
            line = line.rstrip(b" \t\n\r\v\f")
        found = (program.pattern if flexible else program.exact).fullmatch(line)
        ok[at] = found is not None
        if found is None:
            spans[at, -1] = begin, begin + len(line)
            continue
        for place, name in enumerate(program.fields):
            span = found.span(name)
            spans[at, place] = span if span[0] < 0 else (begin + span[0], begin + span[1])
    return spans, ok


def gather(text: Any, spans: Longs) -> Any:
    """Arrow array of large_binary: the pieces of a text at spans.

    Args:
        text: bytes, or an array of uint8.
        spans: int64 [n, 2], of any stride; what begins at -1 is empty.
    """
    pa, n = arrow(), len(spans)
    data = np.frombuffer(text, np.uint8)
    library = native()
    if library is None:
        pieces = [bytes(data[a:b]) if a >= 0 else b"" for a, b in spans.tolist()]
        return pa.array(pieces, pa.large_binary())
    if spans.strides[1] != 8:
        spans = np.ascontiguousarray(spans)
    offsets = np.empty(n + 1, np.int64)
    given = _at(data), spans.ctypes.data, spans.strides[0] // 8, n, _at(offsets)
    library.gather(*given, None)
    result = np.empty(int(offsets[-1]), np.uint8)
    library.gather(*given, _at(result))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(result)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, buffers)


def contents(column: Any) -> tuple[npt.NDArray[np.uint8], Longs]:
    """Bytes and offsets, int64 [n + 1], of an Arrow array of large_binary, without a copy."""
    _, offsets, data = column.buffers()
    n, first = len(column), column.offset
    places = np.frombuffer(offsets, np.int64, count=n + 1, offset=8 * first)
    empty = np.empty(0, np.uint8)
    return (empty if data is None else np.frombuffer(data, np.uint8)), places


class TemplateTree:
    """The tree of Drain, over masked lines.

    Args:
        routed: tokens that choose the leaf.
        similarity: share of equal tokens from which a line joins a group.
        max_children: of a node.
        exact: a token between any two spaces, even an empty one, so that nothing is lost.
        runs: count wildcards in a row as one.
    """

    def __init__(
        self,
        routed: int,
        similarity: float,
        max_children: int,
        *,
        exact: bool = False,
        runs: bool = False,
    ) -> None:
        self._library = native()
        given = routed, similarity, max_children
        if self._library is None:
            self._slow = reference.SlowTemplateTree(*given, exact=exact, runs=runs)
        else:
            self._tree = self._library.tree_new(*given, int(exact), int(runs))

    def __del__(self) -> None:
        if getattr(self, "_tree", None):
            self._library.tree_free(self._tree)  # type: ignore[union-attr]

    def add(self, masked: Any) -> Ints:
        """Int32 [n]: the group of each line; an Arrow array of large_binary."""
        if self._library is None:
            return np.array(self._slow.add(masked.to_pylist()), np.int32)
        data, offsets = contents(masked)
        groups = np.empty(len(masked), np.int32)
        self._library.tree_add(self._tree, _at(data), _at(offsets), len(masked), _at(groups))
        return groups

    def templates(self) -> list[bytes]:
        """The template of each group."""
        if self._library is None:
            return self._slow.templates()
        size = self._library.tree_templates(self._tree, None)
        text = ctypes.create_string_buffer(size)
        self._library.tree_templates(self._tree, text)
        return text.raw[:size].split(b"\n")[:-1]


class LineParameters(NamedTuple):
    """Parameters of lines.

    Args:
        counts: int64 [n], how many each line has.
        values: Arrow array of large_binary, those of all lines.
        ok: which lines are of their template; the parameters of others are empty.
    """

    counts: Longs
    values: Any
    ok: Bools


def parameters(
    column: Any, ids: Ints, templates: Sequence[bytes], *, flexible: bool
) -> LineParameters:
    """What stands in lines where their templates have ``<*>``.

    Args:
        column: Arrow array of large_binary, unmasked.
        ids: int32 [n], template of each.
        templates: text of each.
        flexible: a space stands for one or more of any kind, and none counts at the ends.
    """
    wildcards = np.array([text.count(b"<*>") for text in templates], np.int64)
    counts = wildcards[ids] if len(ids) else np.empty(0, np.int64)
    library = native()
    if library is None:
        values: list[bytes] = []
        good = np.ones(len(ids), np.bool_)
        for at, line in enumerate(column.to_pylist()):
            found = reference.parameters(templates[ids[at]], line, flexible=flexible)
            good[at] = found is not None
            values += [b""] * int(counts[at]) if found is None else found
        return LineParameters(counts, arrow().array(values, arrow().large_binary()), good)
    data, offsets = contents(column)
    spans = np.empty((int(counts.sum()), 2), np.int64)
    ok = np.empty(len(ids), np.bool_)
    sizes = list(itertools.accumulate(map(len, templates), initial=0))
    library.parameters(
        *(_at(data), _at(offsets), len(ids), _at(np.ascontiguousarray(ids, np.int32))),
        *(b"".join(templates), _at(np.array(sizes, np.int64)), len(templates), int(flexible)),
        *(_at(spans), _at(ok)),
    )
    return LineParameters(counts, gather(data, spans), ok)


def _at(array: Any) -> int:
    return int(array.ctypes.data)

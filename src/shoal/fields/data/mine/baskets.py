"""Baskets as rows of item ids, made from lists, tables and matrices."""

from __future__ import annotations

import ctypes
import functools
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import BuildError
from shoal.core.native import build
from shoal.fields.data.mine.protocols import MineError
from shoal.fields.data.readers import arrow

# Entries that the miners can number.
_MOST = 2**31 - 1


@dataclass(frozen=True)
class Baskets:
    """Rows of item ids. An item that is in a basket twice counts once; empty baskets count.

    Args:
        begins: int64 [baskets + 1], basket i is ``ids[begins[i] : begins[i + 1]]``.
        ids: int32 [entries], below the number of items.
        names: [items] what the ids stand for.
    """

    begins: np.ndarray
    ids: np.ndarray
    names: Any

    def __post_init__(self) -> None:
        if self.num_baskets > _MOST:
            raise MineError(f"{self.num_baskets:,} baskets are too many at once; use shards")

    @property
    def num_baskets(self) -> int:
        """Rows."""
        return len(self.begins) - 1

    @property
    def num_items(self) -> int:
        """Different items."""
        return len(self.names)

    @property
    def num_bytes(self) -> int:
        """Bytes of ids and rows."""
        return int(self.begins.nbytes + self.ids.nbytes)

    def rows(self, which: np.ndarray) -> Baskets:
        """Some of the baskets."""
        lengths = np.diff(self.begins)[which]
        begins = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(int(begins[-1])) + np.repeat(self.begins[:-1][which] - begins[:-1], lengths)
        return Baskets(begins, self.ids[at], self.names)

    def to_lists(self) -> list[list[Any]]:
        """A list of names for each basket."""
        names = self.names.to_pylist() if hasattr(self.names, "to_pylist") else list(self.names)
        named = [names[item] for item in self.ids]
        return [named[a:b] for a, b in itertools.pairwise(self.begins.tolist())]

    def to_arrow(self) -> Any:
        """A list array of names, a row for each basket."""
        pa = arrow()
        names = self.names if isinstance(self.names, pa.Array) else pa.array(self.names)
        return pa.LargeListArray.from_arrays(pa.array(self.begins), names.take(pa.array(self.ids)))


def from_lists(baskets: Sequence[Any]) -> Baskets:
    """Baskets from lists, tuples or sets of items: numbers, or text.

    Raises:
        MineError: a basket is no collection, or items are of kinds that cannot be compared.
    """
    rows = baskets if isinstance(baskets, list) else list(baskets)
    kinds = set(map(type, rows))
    if len(kinds) == 1 and (read := _whole_numbers(rows, kinds.pop())) is not None:
        return read
    try:
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    except TypeError:
        bad = next(at for at, row in enumerate(rows) if not hasattr(row, "__len__"))
        raise MineError(
            f"basket {bad}: {rows[bad]!r}: expected a list, tuple or set of items"
        ) from None
    text = next((at for at, row in enumerate(rows) if isinstance(row, str | bytes)), None)
    if text is not None:
        raise MineError(f"basket {text}: {rows[text]!r} is text; give a list of items")
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    try:  # refuses what is not a whole number, where numpy would convert it
        numbers = array("q", itertools.chain.from_iterable(rows))
    except (TypeError, OverflowError):
        return _encoded(begins, list(itertools.chain.from_iterable(rows)))
    return _numbered(begins, np.frombuffer(numbers, np.int64))


@functools.cache
def _library() -> ctypes.PyDLL | None:
    """Compiled reading of lists; None where it cannot be had, and Python reads them."""
    source = Path(__file__).with_name("lists.cpp").read_text("utf-8")
    try:
        path = build(source, name="lists")._name
    except BuildError:
        return None
    library = ctypes.PyDLL(path)  # which keeps the interpreter's lock
    library.measure_rows.argtypes = [ctypes.py_object, ctypes.c_int32, ctypes.c_void_p]
    library.measure_rows.restype = ctypes.c_int64
    library.flatten_rows.argtypes = [
        *(ctypes.py_object, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
    ]
    return library


def _whole_numbers(rows: list[Any], kind: type[Any]) -> Baskets | None:
    """Baskets of lists, or of tuples, of whole numbers; None of anything else."""
    library = _library()
    if library is None or kind not in (list, tuple):
        return None
    begins = np.empty(len(rows) + 1, np.int64)
    values = np.empty(library.measure_rows(rows, kind is tuple, begins.ctypes.data), np.int64)
    if not library.flatten_rows(rows, kind is tuple, begins.ctypes.data, values.ctypes.data):
        return None
    return _numbered(begins, values)


def _numbered(begins: np.ndarray, values: np.ndarray) -> Baskets:
    """Numbers, which are their own ids where they are not far apart."""
    if not len(values):
        return Baskets(begins, values.astype(np.int32), values)
    low, high = int(values.min()), int(values.max())
    if high - low < max(4 * len(values), 1024) and high - low < _MOST:
        return Baskets(begins, (values - low).astype(np.int32), np.arange(low, high + 1))
    names, ids = np.unique(values, return_inverse=True)
    return Baskets(begins, ids.astype(np.int32), names)


def _encoded(begins: np.ndarray, values: list[Any]) -> Baskets:
    numbers: dict[Any, int] = {}
    try:
        for value in values:
            numbers.setdefault(value, len(numbers))
    except TypeError as cause:
        raise MineError(f"an item cannot be used: {cause}; items are numbers or text") from None
    if any(value is None or value != value for value in numbers):
        raise MineError("an item is None or NaN; leave it out of the basket")
    ids = np.fromiter(map(numbers.__getitem__, values), np.int32, len(values))
    names = np.empty(len(numbers), object)
    names[:] = list(numbers)
    return Baskets(begins, ids, names)


def from_arrow(column: Any) -> Baskets:
    """Baskets from a list array of Arrow; null is an empty basket.

    Raises:
        MineError: it is no list array, or an item is null.
    """
    pa = arrow()
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_it(column.type) for is_it in kinds):
        raise MineError(f"baskets: a column of {column.type}; expected lists of items")
    compute = arrow("compute")
    lengths = compute.fill_null(compute.list_value_length(column), 0).cast(pa.int64())
    begins = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    flat = column.flatten()
    if flat.null_count:
        raise MineError(f"baskets: {flat.null_count:,} items are null; leave them out")
    if pa.types.is_nested(flat.type):
        raise MineError(f"baskets: items are {flat.type}; expected numbers or text")
    if pa.types.is_integer(flat.type) and not pa.types.is_unsigned_integer(flat.type):
        return _numbered(begins, flat.to_numpy().astype(np.int64))
    if isinstance(flat, pa.DictionaryArray):
        return Baskets(begins, flat.indices.to_numpy().astype(np.int32), flat.dictionary)
    coded = flat.dictionary_encode()
    return Baskets(begins, coded.indices.to_numpy().astype(np.int32), coded.dictionary)


def from_matrix(matrix: Any, names: Sequence[Any] | None = None) -> Baskets:
    """Baskets from a matrix, dense or sparse: a number above zero says that the item is there.

    Args:
        matrix: [baskets, items] numbers or booleans; what scipy makes of CSR may be sparse.
        names: of the columns.
    """
    columns = int(matrix.shape[1])
    if hasattr(matrix, "tocsr"):
        sparse = matrix.tocsr()
        there = np.flatnonzero(sparse.data > 0)
        counts = np.concatenate([[0], np.cumsum(sparse.data > 0)])
        begins, ids = counts[sparse.indptr].astype(np.int64), sparse.indices[there]
    else:
        rows, ids = np.nonzero(np.asarray(matrix) > 0)
        begins = np.searchsorted(rows, np.arange(len(matrix) + 1)).astype(np.int64)
    named = np.arange(columns) if names is None else np.asarray(names, object)
    return Baskets(begins, np.ascontiguousarray(ids, np.int32), named)

"""Indexes in directories: a file for each part, so that a process reads only what it searches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.extras import import_extra
from shoal.core.files import write_atomic, write_dir_atomic, write_json
from shoal.fields.retrieve.index.osq.attributes import AttributeCells
from shoal.fields.retrieve.index.osq.index import STORED, CodedPart, IndexArrays, OSQIndex
from shoal.fields.retrieve.index.osq.quantise import MOST_BITS
from shoal.fields.retrieve.index.protocols import VectorIndexError

_WORDS, _COMMON = "index.json", "common.safetensors"
# Memory-mapped, for searches read few of their rows.
_VECTORS, _EXACT = "vectors.npy", "attributes.npy"
_FORMAT = 1
_COMMON_ARRAYS = ("centroids", "radii", "begins", "tags")
_PART_ARRAYS = ("rotation", "bits", "low", "high", "records")


def save_index(index: OSQIndex, directory: Path) -> Path:
    """Write an index: what all parts need, a file for each part, vectors and attributes.

    Returns:
        The directory.

    Raises:
        VectorIndexError: nothing is indexed; there is something of that name, or the file system
            refuses.
    """
    numpy: Any = import_extra("safetensors.numpy", extra="run", purpose="a file of an index")
    if not len(index):
        raise VectorIndexError("osq: nothing is indexed; call build(vectors) first")
    words = {
        "format": _FORMAT,
        "options": index.options,
        "longest": index.longest,
        "attributes": [
            {"name": one.name, "bits": one.bits, "categories": one.categories}
            for one in index.cells
        ],
    }
    arrays = index.arrays
    common = {name: getattr(arrays, name) for name in _COMMON_ARRAYS}
    for at, one in enumerate(index.cells):
        common |= {f"low.{at}": one.low, f"high.{at}": one.high}
    with write_dir_atomic(directory, error=VectorIndexError) as place:
        write_json(place / _WORDS, words)
        write_atomic(place / _COMMON, numpy.save(common))
        for at, part in enumerate(index.parts):
            rows = arrays.rows[part.begin : part.begin + len(part)]
            mine = {"rows": rows, "centroid": arrays.centroids[at], "radius": arrays.radii[at:][:1]}
            write_atomic(place / _part_file(at), numpy.save({**part.arrays, **mine}))
        for name, array in ((_VECTORS, index.vectors), (_EXACT, arrays.exact)):
            with (place / name).open("wb") as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return directory


def _part_file(part: int) -> str:
    return f"part-{part:05d}.safetensors"


def load_index(directory: Path) -> OSQIndex:
    """An index that was saved; vectors and exact attributes stay on disk.

    Raises:
        VectorIndexError: it is none, or is damaged.
    """
    with _damage(directory):
        index, vectors, arrays, cells, _ = _common(directory)
        parts, blocks = [], []
        for at, begin in enumerate(map(int, arrays.begins[:-1])):
            read, _ = _read(directory / _part_file(at))
            parts.append(_part(read, begin, vectors, index))
            blocks.append(read["rows"])
        rows = np.concatenate(blocks)
        if [len(one) for one in parts] != np.diff(arrays.begins).tolist() or not np.array_equal(
            np.sort(rows), np.arange(len(vectors))
        ):
            raise ValueError("parts that are not those of the vectors")
    index.assemble(vectors, replace(arrays, rows=rows), parts, cells)
    return index


def load_filter(directory: Path) -> tuple[OSQIndex, int]:
    """Only what filters rows and chooses parts, and the bytes that were read.

    Raises:
        VectorIndexError: it is none, or is damaged.
    """
    with _damage(directory):
        index, vectors, arrays, cells, size = _common(directory)
    index.assemble(vectors, arrays, [], cells)
    return index, size


def load_part(directory: Path, part: int) -> tuple[OSQIndex, int]:
    """An index of one part, its first, and the bytes that were read.

    Raises:
        VectorIndexError: there is none, or it is damaged.
    """
    with _damage(directory):
        index, vectors, _, size = _opened(directory)
        read, more = _read(directory / _part_file(part))
        coded, rows = _part(read, 0, vectors, index), read["rows"]
        if not len(rows) or rows.min() < 0 or rows.max() >= len(vectors):
            raise ValueError("rows that the vectors do not have")
        none = np.zeros((0, len(coded)))
        arrays = IndexArrays(
            rows, read["centroid"][None], read["radius"], np.array([0, len(coded)], np.int64),
            none.astype(np.uint8), none,
        )  # fmt: skip
    index.assemble(vectors, arrays, [coded], [])
    return index, size + more


@contextlib.contextmanager
def _damage(directory: Path) -> Iterator[None]:
    """Whatever a damaged file leads to is one error."""
    damaged = import_extra("safetensors", extra="run", purpose="a file of an index").SafetensorError
    try:
        yield
    except (
        OSError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        damaged,
    ) as cause:
        raise VectorIndexError(f"{directory}: not an index of osq: {cause}") from cause


def _opened(directory: Path) -> tuple[OSQIndex, np.ndarray, Mapping[str, Any], int]:
    """An index without arrays, the vectors, what is written about both, and its bytes."""
    text = (directory / _WORDS).read_bytes()
    words = json.loads(text)
    if words["format"] != _FORMAT:
        raise ValueError(f"format {words['format']}; expected {_FORMAT}")
    vectors = np.load(directory / _VECTORS, mmap_mode="r", allow_pickle=False)
    if vectors.ndim != 2 or vectors.dtype.name not in STORED or not vectors.flags.c_contiguous:
        raise ValueError(f"{_VECTORS}: {vectors.dtype} {list(vectors.shape)}")
    index = OSQIndex(**words["options"])
    index.longest = float(words["longest"])
    return index, vectors, words, len(text)


def _common(
    directory: Path,
) -> tuple[OSQIndex, np.ndarray, IndexArrays, list[AttributeCells], int]:
    index, vectors, words, size = _opened(directory)
    common, more = _read(directory / _COMMON)
    exact = np.load(directory / _EXACT, mmap_mode="r", allow_pickle=False)
    cells = [
        AttributeCells(
            str(one["name"]), int(one["bits"]), common[f"low.{at}"], common[f"high.{at}"],
            one["categories"],
        )
        for at, one in enumerate(words["attributes"])
    ]  # fmt: skip
    named = {name: common[name] for name in _COMMON_ARRAYS}
    arrays = IndexArrays(rows=np.empty(0, np.int32), exact=exact, **named)
    _check(arrays, vectors, cells)
    return index, vectors, arrays, cells, size + more


def _read(path: Path) -> tuple[Mapping[str, np.ndarray], int]:
    numpy: Any = import_extra("safetensors.numpy", extra="run", purpose="a file of an index")
    text = path.read_bytes()
    arrays: Mapping[str, np.ndarray] = numpy.load(text)
    return arrays, len(text)


def _check(arrays: IndexArrays, vectors: np.ndarray, cells: list[AttributeCells]) -> None:
    """What the kernel reads by address is as large as it takes it to be.

    Raises:
        ValueError: it is not.
    """
    count, parts = len(vectors), len(arrays.radii)
    bits = sum(one.bits for one in cells)
    width = arrays.tags.itemsize * 8
    right = (
        _is(arrays.centroids, np.float32, parts, vectors.shape[1])
        and _is(arrays.radii, np.float32, parts)
        and _is(arrays.begins, np.int64, parts + 1)
        and arrays.begins[0] == 0
        and arrays.begins[-1] == count
        and (np.diff(arrays.begins) > 0).all()
        and arrays.tags.dtype in (np.uint8, np.uint16)
        and arrays.tags.shape == (-(-bits // width), count)
        and arrays.tags.flags.c_contiguous
        and _is(arrays.exact, np.float64, len(cells), count)
    )
    for one in cells:
        right = right and 1 <= one.bits <= width and len(one.low) <= 1 << one.bits
        right = right and _is(one.low, np.float64, len(one.low))
        right = right and _is(one.high, np.float64, len(one.low))
        right = right and all(isinstance(word, str | bool) for word in one.categories or ())
    if not right:
        raise ValueError("arrays of another size or type")


def _part(
    read: Mapping[str, np.ndarray], begin: int, vectors: np.ndarray, index: OSQIndex
) -> CodedPart:
    """A part whose arrays are as large as the kernel takes them to be.

    Raises:
        ValueError: they are not.
    """
    part = CodedPart(begin, **{name: read[name] for name in _PART_ARRAYS})
    segment, dim, count = index.segment_bits, vectors.shape[1], len(read["rows"])
    bits = part.bits.astype(np.int64)
    columns = max(1, -(-int(bits.sum()) // segment))
    right = (
        _is(part.bits, np.uint8, dim)
        and bits.max() <= MOST_BITS
        and _is(part.rotation, np.float32, dim, dim)
        and _is(part.low, np.float32, int((1 << bits).sum()))
        and _is(part.high, np.float32, int((1 << bits).sum()))
        and _is(part.records, np.uint64, count, -(-dim // 64) + -(-columns * segment // 64))
        and _is(read["rows"], np.int32, count)
        and _is(read["centroid"], np.float32, dim)
        and _is(read["radius"], np.float32, 1)
    )
    if not right:
        raise ValueError("a part of another size or type")
    return part


def _is(array: np.ndarray, dtype: Any, *shape: int) -> bool:
    return bool(array.dtype == dtype and array.shape == shape and array.flags.c_contiguous)

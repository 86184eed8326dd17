"""Examples from tables: vectors of numbers, or hashed n-grams of text, and the column of classes.

Source: Weinberger et al., Feature Hashing for Large Scale Multitask Learning, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.extras import import_extra
from shoal.core.files import open_atomic
from shoal.fields.data.prune.protocols import PruneError, PruneExamples
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.sources import SourceShard
from shoal.fields.data.vectors import check_finite, is_list, is_number, matrix_of, vector_columns

TEXT_DIM = 256
"""Numbers of the vector that text is hashed to."""

LABEL = "label"
"""Column of classes, where the user names none."""


class PruneColumns(NamedTuple):
    """What makes up an example.

    Args:
        vectors: columns of its numbers; empty for text.
        text: column of its text; empty for numbers.
        label: column of its class; empty without.
        where: the data, for errors.
    """

    vectors: tuple[str, ...]
    text: str
    label: str
    where: str


def columns_of(schema: Any, columns: Sequence[str], label: str, where: str) -> PruneColumns:
    """The columns of examples: lists of numbers, else text, else all numbers.

    Args:
        schema: of Arrow.
        columns: those that the user named; one of text, or some of numbers.
        label: column of classes; empty for ``label``, if there is one.
        where: the data, for errors.

    Raises:
        DataError: there is no such column, or none that can be used.
    """
    if label and label not in schema.names:
        raise PruneError(
            f"{where}: method.label: there is no {label!r}; it has {', '.join(schema.names[:20])}"
        )
    label = label or (LABEL if LABEL in schema.names else "")
    if label and not _is_class(schema.field(label).type):
        raise PruneError(
            f"{where}: method.label: {label!r} holds {schema.field(label).type}, not classes: "
            "whole numbers, text, or true and false"
        )
    rest = [name for name in schema.names if name != label]
    chosen = list(columns) or _offered(schema, rest)
    if len(chosen) == 1 and chosen[0] in schema.names and _is_text(schema.field(chosen[0]).type):
        return PruneColumns((), chosen[0], label, where)
    kept = arrow().schema([schema.field(name) for name in rest])
    return PruneColumns(tuple(vector_columns(kept, chosen, where)), "", label, where)


def embed_shard(shard: SourceShard, place: Path, shared: PruneColumns) -> dict[str, Any]:
    """Vectors and classes of the rows of a shard, to ``place`` with ``.npy`` and ``.labels.npy``.

    Raises:
        DataError: a row has no numbers, or no class.
    """
    bad, vectors, labels = BadRowCount(), [], []
    for batch in shard.batches(bad=bad):
        vectors.append(_numbers(batch, shared))
        if shared.label:
            labels.append(_classes(batch.column(shared.label), shared))
    names = sorted({name for _, some in labels for name in some})
    at = {name: number for number, name in enumerate(names)}
    dims = {matrix.shape[1] for matrix in vectors if len(matrix)}
    if len(dims) > 1:
        raise PruneError(
            f"{shared.where}: vectors of {' and '.join(map(str, sorted(dims)))} numbers; every "
            "example needs as many"
        )
    matrix = np.concatenate([one for one in vectors if len(one)]) if dims else np.empty((0, 0))
    _save(place.with_name(f"{place.name}.npy"), matrix.astype(np.float32))
    if shared.label:
        codes = [np.array([at[name] for name in some])[codes] for codes, some in labels if some]
        joined = np.concatenate(codes) if codes else np.empty(0)
        _save(place.with_name(f"{place.name}.labels.npy"), joined.astype(np.int64))
    return {"rows": len(matrix), "dim": matrix.shape[1], "classes": names}


def gathered(
    shards: Sequence[dict[str, Any]], place: Path, columns: PruneColumns
) -> tuple[PruneExamples, list[str]]:
    """The examples of all shards, and the names of their classes.

    Args:
        shards: what :func:`embed_shard` has returned, in order.
        place: directory of its files.
        columns: that were read.

    Raises:
        PruneError: vectors of different lengths, or no rows.
    """
    full = [(number, shard) for number, shard in enumerate(shards) if shard["rows"]]
    dims = sorted({shard["dim"] for _, shard in full})
    if len(dims) != 1:
        lengths = " and ".join(map(str, dims))
        raise PruneError(
            f"{columns.where}: vectors of {lengths} numbers; every example needs as many"
            if dims
            else f"{columns.where}: no rows"
        )
    rows = sum(shard["rows"] for shard in shards)
    X, y = np.empty((rows, dims[0]), np.float32), np.empty(rows, np.int64)
    names = sorted({name for shard in shards for name in shard["classes"]})
    at, begin = {name: number for number, name in enumerate(names)}, 0
    for number, shard in full:
        where = slice(begin, begin + shard["rows"])
        X[where] = np.load(place / f"{number:06}.npy", allow_pickle=False)
        if columns.label:
            codes = np.load(place / f"{number:06}.labels.npy", allow_pickle=False)
            y[where] = np.array([at[name] for name in shard["classes"]])[codes]
        begin = where.stop
    return PruneExamples(X, y if columns.label else None, len(names)), names


def hashed(texts: Sequence[str | None]) -> npt.NDArray[np.float32]:
    """Float32 [n, 256]: words and pairs of words by the signs and places of their hashes.

    Args:
        texts: None counts as empty.
    """
    feature: Any = import_extra(
        "sklearn.feature_extraction.text", extra="fields", purpose="vectors of text"
    )
    vectorizer = feature.HashingVectorizer(
        n_features=TEXT_DIM, ngram_range=(1, 2), dtype=np.float32
    )
    return np.asarray(vectorizer.transform([text or "" for text in texts]).toarray())


def _offered(schema: Any, names: Sequence[str]) -> list[str]:
    """What is taken where the user names nothing; empty for all columns of numbers."""
    if any(is_list(schema.field(name).type) for name in names):
        return []
    return ["text"] if "text" in names and _is_text(schema.field("text").type) else []


def _is_text(kind: Any) -> bool:
    types = arrow("types")
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_class(kind: Any) -> bool:
    types = arrow("types")
    numbers = is_number(kind) and not types.is_floating(kind)
    return numbers or _is_text(kind) or bool(types.is_dictionary(kind))


def _numbers(batch: Any, columns: PruneColumns) -> npt.NDArray[Any]:
    if columns.text:
        return hashed(batch.column(columns.text).to_pylist())
    matrix = matrix_of(batch, columns.vectors, columns.where)
    check_finite(matrix, columns.where)
    return matrix


def _classes(column: Any, columns: PruneColumns) -> tuple[npt.NDArray[np.int64], list[str]]:
    if column.null_count:
        raise PruneError(
            f"{columns.where}: {column.null_count} rows have no {columns.label!r}; fill or "
            "remove them, or choose another label"
        )
    encoded = column.cast(arrow().string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _save(path: Path, array: npt.NDArray[Any]) -> None:
    with open_atomic(path) as file:
        np.save(file, array, allow_pickle=False)

"""Vectors and queries of a job ``index``."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.corpora.photos import DIM, photo_descriptors
from shoal.fields.data.readers import num_photos
from shoal.fields.data.vectors import read_vectors, vector_shape
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.job import IndexJob
from shoal.fields.retrieve.index.protocols import Metric, VectorIndexError
from shoal.fields.retrieve.index.vectors import checked_vectors

# How ann-benchmarks calls a metric.
_DISTANCES = {"l2": "euclidean", "ip": "dot", "cosine": "angular"}
_PHOTOS, _BENCHMARK = "photos", (".hdf5", ".h5")
# Least vectors that are indexed.
_LEAST = 50


class IndexData(NamedTuple):
    """What is indexed and asked.

    Args:
        vectors: float32 [N, d].
        queries: float32 [Q, d].
    """

    vectors: np.ndarray
    queries: np.ndarray


def shape_of(job: IndexJob) -> tuple[int, int]:
    """Vectors that will be indexed, and the numbers of each.

    Raises:
        DataError: the file cannot be read, or holds no numbers.
        VectorIndexError: there are too few.
    """
    if job.data.partition(":")[0] == _PHOTOS:
        count, dim = num_photos(job.data), DIM
    elif job.data.endswith(_BENCHMARK):
        with _benchmark(job.data) as file:
            count, dim = file["train"].shape
            return _enough(count, dim)
    else:
        count, dim, _ = vector_shape(job.data, job.columns)
    return _enough(count, dim, held=job.queries)


def _enough(count: int, dim: int, held: int = 0) -> tuple[int, int]:
    if count - held < _LEAST:
        raise VectorIndexError(
            f"data: {count:,} vectors, of which {held:,} are held out as queries; expected at "
            f"least {_LEAST} others to index: give more vectors, or hold out fewer with "
            "--set queries=N"
        )
    return count - held, dim


def read(job: IndexJob) -> IndexData:
    """Read vectors and queries; those that are held out are drawn by the seed.

    Raises:
        DataError: the file cannot be read.
        VectorIndexError: vectors that cannot be indexed.
    """
    if job.data.endswith(_BENCHMARK):
        with _benchmark(job.data) as file:
            train, test = file["train"][:], file["test"][: job.queries]
        dim = train.shape[1]
        return IndexData(*(checked_vectors(one, dim, job.metric) for one in (train, test)))
    if job.data.partition(":")[0] == _PHOTOS:
        rows = photo_descriptors(num_photos(job.data)).vectors
    else:
        rows, _ = read_vectors(job.data, job.columns)
    rows = checked_vectors(rows, rows.shape[1], job.metric)
    _enough(len(rows), rows.shape[1], held=job.queries)
    order = np.random.default_rng(job.seed).permutation(len(rows))
    return IndexData(
        np.ascontiguousarray(rows[np.sort(order[job.queries :])]),
        np.ascontiguousarray(rows[order[: job.queries]]),
    )


def _benchmark(path: str) -> Any:
    """A file in the layout of ann-benchmarks: ``train`` and ``test``, each [N, d].

    Raises:
        DataError: it is none.
    """
    h5py: Any = import_extra("h5py", extra="fields", purpose="files of ann-benchmarks")
    try:
        file = h5py.File(path, "r")
    except OSError as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    if not all(name in file and file[name].ndim == 2 for name in ("train", "test")):
        file.close()
        raise DataError(f"{path}: expected data sets 'train' and 'test' with two dimensions")
    return file


def write_dataset(
    path: Path, vectors: np.ndarray, queries: np.ndarray, *, metric: Metric = "l2", k: int = 100
) -> None:
    """Write vectors and queries in the layout of ann-benchmarks, with the true neighbours.

    Args:
        path: of the file, ending with .hdf5.
        vectors: [N, d].
        queries: [Q, d].
        metric: ``l2``, ``ip`` or ``cosine``.
        k: neighbours of each query, at most N.

    Raises:
        VectorIndexError: vectors that cannot be indexed; fewer than ``k``.
    """
    h5py: Any = import_extra("h5py", extra="fields", purpose="files of ann-benchmarks")
    dim = np.shape(vectors)[-1] if np.ndim(vectors) == 2 else 0
    train, test = (checked_vectors(one, dim, metric) for one in (vectors, queries))
    if not 1 <= k <= len(train):
        raise VectorIndexError(f"k = {k}: expected 1 to {len(train)}, as many as there are vectors")
    truth = exact_neighbours(train, test, k, metric)
    # Those of ann-benchmarks are not squared, and are 1 - cosine.
    apart = truth.distances + (metric == "cosine")
    if metric == "l2":
        apart = np.sqrt(apart)
    text = io.BytesIO()
    with h5py.File(text, "w") as file:
        file["train"], file["test"] = train, test
        file["neighbors"], file["distances"] = truth.ids.astype(np.int32), apart
        file.attrs["distance"] = _DISTANCES[metric]
    write_atomic(path, text.getvalue())

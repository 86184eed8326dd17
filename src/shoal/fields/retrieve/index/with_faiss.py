"""Indexes of faiss behind the protocol of this room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.fields.retrieve.index.protocols import Hits, Metric


def faiss() -> Any:
    """The library.

    Raises:
        MissingExtraError: it is not installed.
    """
    return import_extra("faiss", extra="fields", purpose="an index of vectors")


def metric_of(metric: Metric) -> int:
    """Faiss's number of a metric."""
    return int(faiss().METRIC_L2 if metric == "l2" else faiss().METRIC_INNER_PRODUCT)


def read_faiss(directory: Path) -> Any:
    """The index of ``index.faiss``.

    Raises:
        DataError: the file is missing or damaged.
    """
    path = directory / "index.faiss"
    try:
        return faiss().read_index(str(path))
    except RuntimeError as cause:
        raise DataError(f"{path}: cannot be read; build the index again") from cause


@dataclass
class FaissIndex:
    """A faiss index that has its vectors.

    Args:
        index: of faiss.
        metric: of it.
        options: makes search parameters of an effort.
        threads: of a search.
    """

    index: Any
    metric: Metric
    options: Callable[[float], Any]
    threads: int

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        faiss().omp_set_num_threads(self.threads)
        apart, ids = self.index.search(queries, k, params=self.options(effort))
        if self.metric != "l2":
            apart = -apart
        apart[ids < 0] = np.inf
        return Hits(ids=ids, distances=apart, stats={})

    def memory(self) -> Mapping[str, int]:
        """Bytes of its file, which holds what lies in memory."""
        return {"index": len(faiss().serialize_index(self.index))}

    def save(self, directory: Path) -> Sequence[str]:
        write_atomic(directory / "index.faiss", faiss().serialize_index(self.index).tobytes())
        return ["index.faiss"]

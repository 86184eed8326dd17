"""The part ``flat``: every vector is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.parts import part
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.index.protocols import BuiltIndex, Hits, IndexGrowth, Metric

_FILE = "index.safetensors"


@part
class Flat:
    """Compare every vector with the query; always right."""

    efforts: ClassVar = (1.0,)

    def growth(self, small: int, large: int) -> IndexGrowth:
        more = large / small
        return IndexGrowth(build=more, query=more, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        return _FlatVectors(vectors, metric)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        """Read the vectors.

        Raises:
            DataError: the file is missing or damaged.
        """
        safe: Any = import_extra("safetensors", extra="run", purpose="a file of an index")
        path = directory / _FILE
        try:
            with safe.safe_open(path, "np") as file:
                vectors: np.ndarray = file.get_tensor("vectors")
        except (OSError, KeyError, ValueError, safe.SafetensorError) as cause:
            raise DataError(f"{path}: cannot be read ({cause}); build the index again") from cause
        if vectors.dtype != np.float32 or vectors.ndim != 2:
            shown = f"{vectors.dtype} {list(vectors.shape)}"
            raise DataError(f"{path}: {shown}; expected float32 [N, d]")
        return _FlatVectors(vectors, metric)


@dataclass
class _FlatVectors:
    vectors: np.ndarray
    metric: Metric

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        hits = exact_neighbours(self.vectors, queries, k, self.metric)
        compared = np.full(len(queries), len(self.vectors), np.int64)
        return Hits(ids=hits.ids, distances=hits.distances, stats={"compared": compared})

    def memory(self) -> Mapping[str, int]:
        return {"vectors": self.vectors.nbytes}

    def save(self, directory: Path) -> Sequence[str]:
        numpy: Any = import_extra("safetensors.numpy", extra="run", purpose="a file of an index")
        arrays = {"vectors": np.ascontiguousarray(self.vectors)}
        write_atomic(directory / _FILE, numpy.save(arrays, {"metric": self.metric}))
        return [_FILE]

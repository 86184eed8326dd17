"""The part ``ivf_flat``: vectors in cells, of which a query visits the nearest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.index.protocols import (
    BuiltIndex,
    IndexGrowth,
    Metric,
    VectorIndexError,
)
from shoal.fields.retrieve.index.with_faiss import FaissIndex, faiss, metric_of, read_faiss

# Vectors that k-means learns each cell from.
_EACH = 64


def num_cells(vectors: int) -> int:
    """The cells that are usual for so many vectors."""
    return max(1, min(round(4 * math.sqrt(vectors)), vectors // 39 or 1))


def visiting(index: Any, metric: Metric, threads: int) -> FaissIndex:
    """An index of faiss in cells, of which more effort visits more.

    Args:
        index: that has its vectors.
        metric: of it.
        threads: of a search.
    """

    def options(effort: float) -> Any:
        return faiss().SearchParametersIVF(nprobe=min(index.nlist, round(effort)))

    return FaissIndex(index, metric, options, threads)


@part
class IvfFlat:
    """Cells of k-means with whole vectors, by faiss.

    Args:
        cells: how many; 0 for four times the root of the number of vectors.
    """

    cells: Annotated[int, Ge(0), Le(1 << 20)] = 0

    efforts: ClassVar = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

    def growth(self, small: int, large: int) -> IndexGrowth:
        """Cells and vectors in a cell grow with the root."""
        more = large / small
        return IndexGrowth(build=more**1.5, query=more**0.5, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Learn the cells, then divide the vectors.

        Raises:
            VectorIndexError: there are fewer vectors than cells.
        """
        library, dim = faiss(), vectors.shape[1]
        cells = self.cells or num_cells(len(vectors))
        if cells > len(vectors):
            raise VectorIndexError(f"ivf_flat: {cells} cells for {len(vectors)} vectors")
        library.omp_set_num_threads(threads)
        coarse = library.IndexFlat(dim, metric_of(metric))
        index = library.IndexIVFFlat(coarse, dim, cells, metric_of(metric))
        index.cp.seed, index.cp.max_points_per_centroid = seed + 1, _EACH
        index.cp.min_points_per_centroid = 1
        index.train(vectors)
        index.add(vectors)
        return visiting(index, metric, threads)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        return visiting(read_faiss(directory), metric, threads)

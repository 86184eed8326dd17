"""The part ``ivf_pq``: vectors in cells, each as a few bytes."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.index.ivf_flat import IvfFlat, num_cells, visiting
from shoal.fields.retrieve.index.protocols import (
    BuiltIndex,
    Metric,
    VectorIndexError,
)
from shoal.fields.retrieve.index.with_faiss import faiss, metric_of

# Vectors that 256 codes are learned from.
_LEAST = 256
# Numbers that a code of a byte stands for.
_EACH = 4


@part
class IvfPq(IvfFlat):
    """Cells of k-means with vectors as product codes of a byte for some numbers, by faiss.

    Source: Jégou, Douze and Schmid, Product Quantization for Nearest Neighbor Search, 2011.

    Args:
        cells: how many; 0 for four times the root of the number of vectors.
        codes: bytes of a vector, which divide its numbers; 0 for a byte for four numbers.
    """

    codes: Annotated[int, Ge(0), Le(4096)] = 0

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Learn cells and codes, then divide the vectors.

        Raises:
            VectorIndexError: there are too few vectors, or the codes do not divide their numbers.
        """
        library, dim = faiss(), vectors.shape[1]
        cells = self.cells or num_cells(len(vectors))
        if max(cells, _LEAST) > len(vectors):
            raise VectorIndexError(
                f"ivf_pq: {cells} cells and {_LEAST} codes for {len(vectors)} vectors"
            )
        codes = self.codes or max(one for one in range(1, dim + 1) if _divides(one, dim))
        if dim % codes:
            raise VectorIndexError(f"ivf_pq: {codes} codes do not divide {dim} numbers")
        library.omp_set_num_threads(threads)
        coarse = library.IndexFlat(dim, metric_of(metric))
        index = library.IndexIVFPQ(coarse, dim, cells, codes, 8, metric_of(metric))
        index.cp.seed = index.pq.cp.seed = seed + 1
        index.cp.min_points_per_centroid = index.pq.cp.min_points_per_centroid = 1
        index.train(vectors)
        index.add(vectors)
        return visiting(index, metric, threads)


def _divides(codes: int, dim: int) -> bool:
    return dim % codes == 0 and codes * _EACH <= max(dim, _EACH)

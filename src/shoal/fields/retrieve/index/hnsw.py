"""The part ``hnsw``: a navigable graph of neighbours in levels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.index.protocols import BuiltIndex, IndexGrowth, Metric
from shoal.fields.retrieve.index.with_faiss import FaissIndex, faiss, metric_of, read_faiss


@part
class Hnsw:
    """A graph of neighbours in levels, by faiss.

    Source: Malkov and Yashunin, Efficient and robust approximate nearest neighbor search using
    Hierarchical Navigable Small World graphs, 2016.

    Args:
        links: of a vector in each level; twice as many in the lowest.
        effort_build: candidates while it is built.
    """

    links: Annotated[int, Ge(2), Le(256)] = 16
    effort_build: Annotated[int, Ge(1), Le(4096)] = 100

    efforts: ClassVar = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)

    def growth(self, small: int, large: int) -> IndexGrowth:
        """Ways through the graph grow with the logarithm."""
        more, deeper = large / small, math.log(large + 1) / math.log(small + 1)
        return IndexGrowth(build=more * deeper, query=deeper, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Add the vectors one by one."""
        library = faiss()
        library.omp_set_num_threads(threads)
        index = library.IndexHNSWFlat(vectors.shape[1], self.links, metric_of(metric))
        index.hnsw.efConstruction = self.effort_build
        index.hnsw.rng = library.RandomGenerator(seed + 1)
        index.add(vectors)
        return _walked(index, metric, threads)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        return _walked(read_faiss(directory), metric, threads)


def _walked(index: Any, metric: Metric, threads: int) -> FaissIndex:
    def options(effort: float) -> Any:
        return faiss().SearchParametersHNSW(efSearch=round(effort))

    return FaissIndex(index, metric, options, threads)

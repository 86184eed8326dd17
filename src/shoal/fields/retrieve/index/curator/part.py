"""The part ``curator``: a tree of clusters with short lists, by Shoal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.retrieve.index.curator.index import CuratorIndex
from shoal.fields.retrieve.index.protocols import BuiltIndex, Hits, IndexGrowth, Metric

# Vectors from which the tree is learned.
_SAMPLE = 100_000


@part
class SharedTree:
    """One tree of clusters for all tenants, with a cut of its own for each.

    Source: Jin et al., Curator: Efficient Indexing for Multi-Tenant Vector Databases, 2024.
    :class:`~shoal.fields.retrieve.index.curator.index.CuratorIndex` has the calls that change it.

    Args:
        branching: children of the root; halved from level to level, down to 4.
        shortlist: most ids in a list above the leaves.
    """

    branching: Annotated[int, Ge(2), Le(4096)] = 32
    shortlist: Annotated[int, Ge(1), Le(1 << 16)] = 128

    efforts: ClassVar = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

    def growth(self, small: int, large: int) -> IndexGrowth:
        """A query compares as many vectors, unless more are needed for as many neighbours."""
        more = large / small
        return IndexGrowth(build=more, query=more**0.25, memory=more)

    def build(self, vectors: np.ndarray, metric: Metric, *, seed: int, threads: int) -> BuiltIndex:
        """Learn the tree, then add the vectors as those of one tenant."""
        index = CuratorIndex(
            vectors.shape[1], metric=metric, branching=self.branching, shortlist=self.shortlist,
            tenants=1, seed=seed,
        )  # fmt: skip
        draw = np.random.default_rng(seed)
        few = min(len(vectors), _SAMPLE)
        index.train(vectors[np.sort(draw.choice(len(vectors), few, replace=False))])
        index.add(np.arange(len(vectors)), vectors, tenant=0)
        return _OneTenant(index, threads)

    def open(self, directory: Path, metric: Metric, *, threads: int) -> BuiltIndex:
        """Read tree, vectors and owners."""
        return _OneTenant(CuratorIndex.load(directory / "index.safetensors"), threads)


@dataclass
class _OneTenant:
    index: CuratorIndex
    threads: int

    def search(self, queries: np.ndarray, k: int, effort: float) -> Hits:
        """The nearest of each query."""
        return self.index.search(queries, k, tenant=0, gamma2=effort, threads=self.threads)

    def memory(self) -> Mapping[str, int]:
        """Bytes of its arrays."""
        return self.index.memory()

    def save(self, directory: Path) -> Sequence[str]:
        """Tree, vectors and owners as safetensors."""
        return [self.index.save(directory / "index.safetensors").name]

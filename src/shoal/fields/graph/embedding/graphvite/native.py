"""The compiled loops of GraphVite: pairs of walks, negative samples, and training on a block."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_float, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.core.native import build
from shoal.fields.graph.graph import CSRGraph

_FLAGS = ("-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-mprefer-vector-width=512")


@functools.cache
def _native() -> ctypes.CDLL:
    source = Path(__file__).with_name("kernel.cpp").read_text("utf-8")
    library = build(source, name="graphvite", flags=_FLAGS)
    p, n, i, f = c_void_p, c_int64, c_int, c_float
    library.graphvite_pairs.argtypes = [p, p, i, p, p, p, n, n, n, n, n, c_uint64, p]
    library.graphvite_negatives.argtypes = [p, p, p, n, c_uint64, n, p]
    library.graphvite_train.argtypes = [p, p, n, p, p, n, f, f, f, f]
    library.graphvite_pairs.restype = c_int64
    library.graphvite_negatives.restype = library.graphvite_train.restype = None
    return library


class AliasTable(NamedTuple):
    """Tables by which one of many outcomes is drawn in constant time.

    Source: Walker, An efficient method for generating discrete random variables with general
    distributions, 1977.

    Args:
        keep: float64 [n], the chance that a cell keeps its own outcome.
        other: int32 [n], the outcome that it has otherwise.
    """

    keep: np.ndarray
    other: np.ndarray

    @classmethod
    def of(cls, weight: np.ndarray) -> AliasTable:
        """Tables of outcomes with these weights, float64 [n], which do not all vanish."""
        share = weight * (len(weight) / weight.sum())
        keep, other = np.ones(len(share)), np.arange(len(share), dtype=np.int32)
        small = np.flatnonzero(share < 1).tolist()
        large = np.flatnonzero(share >= 1).tolist()
        left = share.tolist()
        while small and large:
            low, high = small.pop(), large[-1]
            keep[low], other[low] = left[low], high
            left[high] -= 1 - left[low]
            if left[high] < 1:
                small.append(large.pop())
        return cls(keep, other)


def walk_pairs(
    graph: CSRGraph,
    ends: np.ndarray | None,
    starts: AliasTable,
    walks: range,
    length: int,
    reach: int,
    seed: int,
) -> np.ndarray:
    """Pairs of nodes at most ``reach`` steps apart on some walks, int32 [n, 2].

    Args:
        graph: of the walks; every start has neighbours.
        ends: float64 [nnz + 1], sums of the weights before each entry; None without weights.
        starts: of the nodes from which walks depart.
        walks: numbers of the walks, which decide what they are.
        length: nodes of a walk, at most 4096.
        reach: steps between the nodes of a pair.
        seed: of all walks.
    """
    each = sum(min(reach, length - 1 - at) for at in range(length))
    pairs = np.empty((len(walks) * each, 2), np.int32)
    _native().graphvite_pairs(
        graph.indptr.ctypes.data, graph.indices.ctypes.data, int(graph.indices.dtype == np.int64),
        None if ends is None else ends.ctypes.data, starts.keep.ctypes.data,
        starts.other.ctypes.data, graph.num_nodes, walks.start, len(walks), length, reach, seed,
        pairs.ctypes.data,
    )  # fmt: skip
    return pairs


def draw_negatives(members: np.ndarray, table: AliasTable, count: int, seed: int) -> np.ndarray:
    """Nodes of one partition, int32 [count].

    Args:
        members: int32 [m], the nodes of the partition.
        table: of their weights.
        count: how many are drawn.
        seed: of the draws.
    """
    nodes = np.empty(count, np.int32)
    _native().graphvite_negatives(
        members.ctypes.data, table.keep.ctypes.data, table.other.ctypes.data, len(members), seed,
        count, nodes.ctypes.data,
    )  # fmt: skip
    return nodes


def train_block(
    pairs: np.ndarray,
    negatives: np.ndarray,
    vertex: np.ndarray,
    context: np.ndarray,
    *,
    rate: tuple[float, float],
    weight: float,
    decay: float,
) -> None:
    """Train on pairs, one after the other, each with one negative sample; changes both tables.

    Args:
        pairs: int32 [n, 2], row of ``vertex`` and row of ``context``.
        negatives: int32 [n], rows of ``context``.
        vertex: float32 [N, d].
        context: float32 [N, d].
        rate: step at the first pair, and after the last.
        weight: of a negative sample.
        decay: of the rows that are touched.
    """
    _native().graphvite_train(
        pairs.ctypes.data, negatives.ctypes.data, len(pairs), vertex.ctypes.data,
        context.ctypes.data, vertex.shape[1], *rate, weight, decay,
    )  # fmt: skip

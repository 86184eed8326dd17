"""The part ``graphvite``: pairs of walks made on the fly, trained in blocks that share no rows."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.random import generator, seed64
from shoal.fields.graph.embedding.graphvite.native import (
    AliasTable,
    draw_negatives,
    train_block,
    walk_pairs,
)
from shoal.fields.graph.embedding.protocols import EmbeddingError, EmbedWork, NodeEmbedding
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.ir import Estimate, Interval, Machine

# Walks of a task of a producer.
_WALKS = 2048


@part
class GraphVite:
    """Train on pairs of random walks, in blocks of nodes that share no rows, without locks.

    Nodes are dealt to partitions by degree. In a round each worker has the pairs of another two
    partitions, head and tail, and draws negative samples from its own tail partition only. The
    walks of the next rounds are made meanwhile, and never stored.

    Source: Zhu et al., GraphVite: A High-Performance CPU-GPU Hybrid System for Node Embedding,
    2019.

    Args:
        dim: numbers of a vector.
        length: nodes of a walk.
        reach: steps between the nodes of a pair, at most.
        epochs: pairs that are trained on, for each edge.
        partitions: of the nodes; None for as many as there are threads.
        episode: pairs of a pool, which all blocks pass once.
        shuffle: lanes in which the pairs of a block are written, so that neighbours of a walk lie
            apart; None for ``reach``.
        rate: step of the first pairs, which falls to 0.
        negative_weight: of the one negative sample of each pair.
        decay: of the rows that are touched.
    """

    dim: Annotated[int, Ge(1), Le(65536)] = 128
    length: Annotated[int, Ge(2), Le(4096)] = 40
    reach: Annotated[int, Ge(1), Le(4095)] = 5
    epochs: Annotated[int, Ge(1), Le(1_000_000)] = 500
    partitions: Annotated[int, Ge(1), Le(1024)] | None = None
    episode: Annotated[int, Ge(1), Le(1 << 30)] = 4_000_000
    shuffle: Annotated[int, Ge(1), Le(1 << 20)] | None = None
    rate: Annotated[float, Gt(0), Le(1)] = 0.025
    negative_weight: Annotated[float, Ge(0), Le(100)] = 5.0
    decay: Annotated[float, Ge(0), Le(1)] = 0.005

    def __post_init__(self) -> None:
        where = "node_embedder.graphvite"
        require(
            self.reach < self.length, f"{where}.reach", self.reach,
            expected=f"less than length = {self.length}",
        )  # fmt: skip
        require(
            self.episode % self._lanes == 0, f"{where}.episode", self.episode,
            expected=f"a multiple of shuffle = {self._lanes}",
        )  # fmt: skip

    @property
    def _lanes(self) -> int:
        return self.shuffle or self.reach

    def estimate(self, work: EmbedWork, machine: Machine) -> Estimate:
        """Pairs, each with one negative sample."""
        pairs, threads = 0.5 * self.epochs * work.nnz, max(work.threads, 1)
        terms = {
            "walks": pairs / self.reach * work.rates.walk_s / threads,
            "training": pairs * 2 * self.dim * work.rates.word_s / threads,
        }
        return Estimate(
            step_s=Interval.around(sum(terms.values()), 2 * work.rates.spread),
            terms_s=terms,
            memory_bytes={
                "vectors": 8.0 * work.num_nodes * self.dim,
                # Two pools, and one that is being divided.
                "pools": 40.0 * min(self.episode, pairs),
                "graph": 12.0 * work.nnz + 60.0 * work.num_nodes,
            },
            bound="compute",
        )

    def fit(
        self, graph: CSRGraph, *, seed: int, threads: int = 1, tuning: NodeLabels | None = None
    ) -> NodeEmbedding:
        """Walk and train at once; nothing is tuned."""
        graph.check_integrity()
        threads = min(threads, max(graph.num_nodes, 1))
        parts = self.partitions or threads
        require(
            threads <= parts <= max(graph.num_nodes, 1), "node_embedder.graphvite.partitions",
            parts, expected=f"{threads}, as many as there are threads, to {graph.num_nodes} nodes",
        )  # fmt: skip
        if graph.directed:
            raise EmbeddingError("graphvite: a directed graph; give one that is undirected")
        if graph.weight is not None and bool((graph.weight < 0).any()):
            raise EmbeddingError("graphvite: the graph has negative weights; a walk has none")
        draw = generator(seed, purpose="graphvite")
        shape = (graph.num_nodes, self.dim)
        vertex = ((draw.random(shape, np.float32) - 0.5) / self.dim).astype(np.float32)
        isolated = np.flatnonzero(np.diff(graph.indptr) == 0)
        if len(isolated) == graph.num_nodes:
            return NodeEmbedding(vectors=vertex, isolated=isolated)
        context = np.zeros(shape, np.float32)
        of = balanced_parts(graph.degrees(), parts)
        members = [np.flatnonzero(of == one).astype(np.int32) for one in range(parts)]
        weights = graph.degrees() ** 0.75
        tables = [AliasTable.of(np.maximum(weights[rows], 1e-300)) for rows in members]
        total, moved, trained = self.epochs * graph.nnz // 2, 0, 0

        def train(number: int, at: int, pairs: np.ndarray, rate: tuple[float, float]) -> None:
            tail = at % parts
            if not len(pairs):
                return
            key = seed64(seed, purpose="negatives", step=number, index=at)
            negatives = draw_negatives(members[tail], tables[tail], len(pairs), key)
            weight, decay = self.negative_weight, self.decay
            train_block(pairs, negatives, vertex, context, rate=rate, weight=weight, decay=decay)

        # Producers have threads of their own: they fill one pool while workers drain the other.
        with ThreadPoolExecutor(threads) as workers, ThreadPoolExecutor(threads) as producers:
            for number, blocks in enumerate(self._pools(graph, of, parts, total, seed, producers)):
                size = sum(map(len, blocks))
                rate = self._rate(trained, total), self._rate(trained + size, total)
                for turn in range(parts):
                    # A Latin square: no two of these blocks have a head or a tail in common.
                    diagonal = [one * parts + (one + turn) % parts for one in range(parts)]
                    waiting = [
                        workers.submit(train, number, at, blocks[at], rate) for at in diagonal
                    ]
                    for one in waiting:
                        one.result()
                    # Each worker keeps its rows of the context; those of the vertices move on.
                    moved += vertex.nbytes if parts > 1 else 0
                trained += size
        return NodeEmbedding(
            vectors=vertex,
            isolated=isolated,
            details={"pairs": trained, "moved_bytes": moved, "partitions": parts},
        )

    def _rate(self, trained: int, total: int) -> float:
        return self.rate * max(0.0, 1 - trained / total)

    def _pools(
        self,
        graph: CSRGraph,
        of: np.ndarray,
        parts: int,
        total: int,
        seed: int,
        pool: ThreadPoolExecutor,
    ) -> Iterator[list[np.ndarray]]:
        """Pairs of each block, [parts * parts], pool by pool; the next is made meanwhile."""
        each = sum(min(self.reach, self.length - 1 - at) for at in range(self.length))
        ends = None
        if graph.weight is not None:
            ends = np.concatenate([[0.0], np.cumsum(graph.weight, dtype=np.float64)])
        starts = AliasTable.of(graph.degrees())
        key = seed64(seed, purpose="walks of graphvite")
        per_pool = max(1, self.episode // each)
        last = -(-total // each)

        def made(first: int) -> list[Future[np.ndarray]]:
            end = min(first + per_pool, last)
            return [
                pool.submit(
                    walk_pairs, graph, ends, starts, range(at, min(at + _WALKS, end)), self.length,
                    self.reach, key,
                )
                for at in range(first, end, _WALKS)
            ]  # fmt: skip

        waiting = made(0)
        for first in range(0, last, per_pool):
            pairs = np.concatenate([one.result() for one in waiting])
            waiting = made(first + per_pool)
            yield [shuffled(block, self._lanes) for block in routed(pairs, of, parts)]


def balanced_parts(degrees: np.ndarray, parts: int) -> np.ndarray:
    """The partition of each node, int64 [N]: by falling degree, there and back again.

    Args:
        degrees: [N].
        parts: number of partitions.
    """
    place = np.arange(len(degrees))
    turn, at = place // parts, place % parts
    of = np.empty(len(degrees), np.int64)
    of[np.argsort(-degrees, kind="stable")] = np.where(turn % 2, parts - 1 - at, at)
    return of


def routed(pairs: np.ndarray, of: np.ndarray, parts: int) -> list[np.ndarray]:
    """Pairs by the partitions of their head and their tail, in their order.

    Args:
        pairs: int32 [n, 2].
        of: the partition of each node.
        parts: number of partitions.
    """
    if parts == 1:
        return [pairs]
    block = of[pairs[:, 0]] * parts + of[pairs[:, 1]]
    order = np.argsort(block.astype(np.int16 if parts < 128 else np.int64), kind="stable")
    cuts = np.cumsum(np.bincount(block, minlength=parts * parts))[:-1]
    return np.split(pairs[order], cuts)


def shuffled(pairs: np.ndarray, lanes: int) -> np.ndarray:
    """The k-th of M pairs at place ``(k mod b) (M / b) + k div b``; a rest of less than b stays.

    Args:
        pairs: int32 [M, 2].
        lanes: b.
    """
    whole = len(pairs) // lanes * lanes
    mixed = pairs[:whole].reshape(-1, lanes, 2).transpose(1, 0, 2).reshape(-1, 2)
    return np.ascontiguousarray(np.concatenate([mixed, pairs[whole:]]))

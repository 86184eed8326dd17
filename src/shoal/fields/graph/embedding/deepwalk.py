"""The part ``deepwalk``: word2vec on random walks, by gensim."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator, seed64
from shoal.core.scratch import scratch_directory
from shoal.fields.graph.embedding.protocols import EmbeddingError, EmbedWork, NodeEmbedding
from shoal.fields.graph.graph import CSRGraph, NodeLabels
from shoal.ir import Estimate, Interval, Machine

# Walks that are made at once.
_TOGETHER = 50_000


@part
class DeepWalk:
    """Train word2vec on random walks, whose nodes are the words; by gensim.

    Source: Perozzi et al., DeepWalk: Online Learning of Social Representations, 2014; with negative
    samples, as node2vec has them (Grover and Leskovec, 2016).

    Args:
        dim: numbers of a vector.
        walks: that begin at each node.
        length: nodes of a walk.
        window: nodes to either side that a node is to predict.
        negative: samples that are not pairs, drawn for each pair.
        epochs: passes over the walks.
        sample: nodes that make up more than this share of the walks are passed over at random;
            0 for none.
    """

    dim: Annotated[int, Ge(1), Le(65536)] = 128
    walks: Annotated[int, Ge(1), Le(1000)] = 4
    length: Annotated[int, Ge(2), Le(10_000)] = 40
    window: Annotated[int, Ge(1), Le(1000)] = 5
    negative: Annotated[int, Ge(1), Le(100)] = 5
    epochs: Annotated[int, Ge(1), Le(1000)] = 5
    sample: Annotated[float, Ge(0), Le(1)] = 1e-3

    def estimate(self, work: EmbedWork, machine: Machine) -> Estimate:
        """Steps of walks, and pairs that are trained on."""
        words = float(work.num_nodes) * self.walks * self.length
        # gensim draws the width of each window, half of it on average.
        pairs = self.epochs * words * (self.window + 1)
        terms = {
            "walks": words * work.rates.walk_s,
            "training": pairs * (1 + self.negative) * self.dim * work.rates.word_s
            / max(work.threads, 1),
        }  # fmt: skip
        return Estimate(
            step_s=Interval.around(sum(terms.values()), work.rates.spread),
            terms_s=terms,
            memory_bytes={
                "vectors": 12.0 * work.num_nodes * self.dim,
                "words": 400.0 * work.num_nodes,
                "graph": 4.0 * work.nnz + 8.0 * work.num_nodes,
            },
            bound="compute",
        )

    def fit(
        self, graph: CSRGraph, *, seed: int, threads: int = 1, tuning: NodeLabels | None = None
    ) -> NodeEmbedding:
        """Walk, then train; nothing is tuned."""
        word2vec: Any = import_extra(
            "gensim.models.word2vec", extra="graph", purpose="the method deepwalk"
        )
        if graph.weight is not None and bool((graph.weight < 0).any()):
            raise EmbeddingError("deepwalk: the graph has negative weights; a walk has none")
        linked = np.diff(graph.indptr) > 0
        vectors = np.zeros((graph.num_nodes, self.dim), np.float32)
        zero = np.flatnonzero(~linked)
        if not linked.any():
            return NodeEmbedding(vectors=vectors, isolated=zero)
        with scratch_directory("walks") as place:
            path = place / "walks.txt"
            counts = self._write(graph, path, seed)
            # From a file, gensim's threads read for themselves and need no lock of Python.
            model = word2vec.Word2Vec(
                vector_size=self.dim, window=self.window, negative=self.negative, sg=1, hs=0,
                min_count=1, sample=self.sample, workers=threads,
                seed=seed64(seed, purpose="word2vec") >> 32,
            )  # fmt: skip
            words = {str(node): int(count) for node, count in enumerate(counts) if count}
            model.build_vocab_from_freq(words)
            words_trained, _ = model.train(
                corpus_file=os.fspath(path), total_words=int(counts.sum()), epochs=self.epochs
            )
            stored = path.stat().st_size
        rows = np.array(model.wv.index_to_key, np.int64)
        vectors[rows] = model.wv.vectors
        details = {
            "words": int(counts.sum()),
            # gensim draws the width of each window, half of it on average.
            "pairs": int(words_trained) * (self.window + 1),
            "stored_bytes": stored,
        }
        return NodeEmbedding(vectors=vectors, isolated=zero, details=details)

    def _write(self, graph: CSRGraph, path: Path, seed: int) -> np.ndarray:
        """Write the walks, a line each; how often each node was visited."""
        names = np.arange(graph.num_nodes).astype(str).tolist()
        counts = np.zeros(graph.num_nodes, np.int64)
        with path.open("w") as file:
            for walks in self.paths(graph, seed):
                counts += np.bincount(walks.ravel(), minlength=graph.num_nodes)
                for walk in walks.tolist():
                    file.write(" ".join([names[node] for node in walk]) + "\n")
        return counts

    def paths(self, graph: CSRGraph, seed: int) -> Iterator[np.ndarray]:
        """Walks from every node that has neighbours, in another order each time.

        Some at once, int64 [n, length].

        Args:
            graph: of the walks; an edge is taken in proportion to its weight.
            seed: of the walks.
        """
        starts = np.flatnonzero(np.diff(graph.indptr))
        ends = None
        if graph.weight is not None:
            ends = np.concatenate([[0.0], np.cumsum(graph.weight, dtype=np.float64)])
        for turn in range(self.walks):
            draw = generator(seed, purpose="walks", step=turn)
            order = draw.permutation(starts)
            for first in range(0, len(order), _TOGETHER):
                yield self._walks(graph, order[first : first + _TOGETHER], draw, ends)

    def _walks(
        self,
        graph: CSRGraph,
        starts: np.ndarray,
        draw: np.random.Generator,
        ends: np.ndarray | None,
    ) -> np.ndarray:
        """A walk from each of some nodes, int64 [n, length].

        Args:
            graph: of the walks.
            starts: int64 [n].
            draw: what is random.
            ends: sums of the weights before each entry; None without weights.
        """
        walks = np.empty((len(starts), self.length), np.int64)
        walks[:, 0] = starts
        for step in range(1, self.length):
            here, chance = walks[:, step - 1], draw.random(len(starts))
            begin, end = graph.indptr[here], graph.indptr[here + 1]
            if ends is None:
                entry = begin + (chance * (end - begin)).astype(np.int64)
            else:
                goal = ends[begin] + chance * (ends[end] - ends[begin])
                entry = np.searchsorted(ends, goal, side="right") - 1
            entry = np.clip(entry, begin, np.maximum(end - 1, begin))
            # At a node from which no edge leads, of a directed graph, it stays.
            walks[:, step] = np.where(
                end > begin, graph.indices[np.minimum(entry, graph.nnz - 1)], here
            )
        return walks

"""The part ``pagerank``: personalised PageRank among the candidates."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from shoal.core.parts import part
from shoal.fields.graph.communities.protocols import CommunityWork, Expansion, Similarities
from shoal.ir import Estimate, Interval, Machine


@part
class SimilarityPageRank:
    """Take the candidates that a walk which returns to the seeds visits most.

    The walk is on a graph of the seeds and the candidates most similar to them, whose edges are
    weighted by similarity.

    Source: Chamberlain et al., Real-Time Community Detection in Large Social Networks on a Laptop,
    2016; Haveliwala, Topic-Sensitive PageRank, 2002.

    Args:
        damping: probability that the walk goes on.
        pool: candidates in the graph, at least four times as many as are wanted.
    """

    damping: Annotated[float, Gt(0), Lt(1)] = 0.85
    pool: Annotated[int, Ge(1), Le(16_384)] = 384

    def estimate(self, work: CommunityWork, machine: Machine) -> Estimate:
        """All pairs of the pool are compared, and a system of equations is solved."""
        nodes = work.seeds + min(self._pool(work.size), work.candidates)
        terms = {
            "candidates": work.lookup_s,
            "similarities": work.compare_s,
            "pairs": work.rates.slot_s * work.hashes * nodes**2,
            "walk": work.rates.solve_s * nodes**3 / 3,
            "calls": work.rates.step_s,
        }
        return Estimate(
            step_s=Interval.around(sum(terms.values()), work.rates.spread),
            terms_s=terms,
            memory_bytes={"pairs": 32.0 * nodes**2},
            bound="compute",
        )

    def expand(self, graph: Similarities, seeds: np.ndarray, count: int) -> Expansion:
        """Rows in descending order of the share of time that the walk spends there."""
        candidates = graph.candidates(seeds)
        near = graph.similarity(seeds, candidates).mean(axis=0)
        pool = candidates[np.sort(np.argsort(-near, kind="stable")[: self._pool(count)])]
        nodes = np.concatenate([seeds, pool])
        weights = graph.similarity(nodes, nodes)
        np.fill_diagonal(weights, 0.0)
        start = np.zeros(len(nodes))
        start[: len(seeds)] = 1 / len(seeds)
        scores = personalised_pagerank(weights, start, self.damping)[len(seeds) :]
        order = np.argsort(-scores, kind="stable")[:count]
        return Expansion(pool[order], scores[order], len(candidates))

    def _pool(self, count: int) -> int:
        return max(self.pool, 4 * count)


def personalised_pagerank(weights: np.ndarray, start: np.ndarray, damping: float) -> np.ndarray:
    """The share of time that a walk spends at each node, float64 [n]; solved, not iterated.

    Args:
        weights: float64 [n, n], of edges; at a node without any the walk begins anew.
        start: float64 [n], where it begins; adds up to 1.
        damping: probability of a step along an edge; else the walk begins anew.
    """
    total = weights.sum(axis=1)
    linked = total > 0
    steps = np.where(linked[:, None], weights / np.where(linked, total, 1.0)[:, None], start)
    return np.linalg.solve(np.eye(len(start)) - damping * steps.T, (1 - damping) * start)

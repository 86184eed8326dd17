"""The part ``mean_similarity``: the candidates most similar to the seeds."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.fields.graph.communities.protocols import CommunityWork, Expansion, Similarities
from shoal.ir import Estimate, Interval, Machine


@part
class MeanSimilarity:
    """Take the candidates whose mean similarity to the seeds is highest.

    Source: Chamberlain et al., Real-Time Community Detection in Large Social Networks on a Laptop,
    2016.
    """

    def estimate(self, work: CommunityWork, machine: Machine) -> Estimate:
        """Candidates are looked up, and compared with each seed."""
        terms = {"candidates": work.lookup_s, "similarities": work.compare_s}
        return Estimate(
            step_s=Interval.around(sum(terms.values()) + work.rates.step_s, work.rates.spread),
            terms_s={**terms, "calls": work.rates.step_s},
            memory_bytes={"similarities": 12.0 * work.candidates * work.seeds},
            bound="memory",
        )

    def expand(self, graph: Similarities, seeds: np.ndarray, count: int) -> Expansion:
        """Rows in descending order of mean similarity."""
        candidates = graph.candidates(seeds)
        scores = graph.similarity(seeds, candidates).mean(axis=0)
        order = np.argsort(-scores, kind="stable")[:count]
        return Expansion(candidates[order], scores[order], len(candidates))

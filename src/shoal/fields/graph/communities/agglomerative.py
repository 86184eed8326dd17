"""The part ``agglomerative``: the community grows by the vertex most similar to all of it."""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.fields.graph.communities.protocols import CommunityWork, Expansion, Similarities
from shoal.ir import Estimate, Interval, Machine


@part
class Agglomerative:
    """Add, again and again, the candidate most similar to the union of the community's sets.

    Source: Chamberlain et al., Real-Time Community Detection in Large Social Networks on a Laptop,
    2016. Of signatures, that of the union is the least of each slot.
    """

    def estimate(self, work: CommunityWork, machine: Machine) -> Estimate:
        """Of a candidate, only the slots that the last vertex has changed are compared again."""
        steps = max(work.size - work.seeds, 0)
        # Of m sets, the next one has the least hash with a probability of 1 / (m + 1).
        changed = sum(1 / (work.seeds + step + 1) for step in range(steps))
        terms = {
            "candidates": work.lookup_s,
            "similarities": work.compare_s / max(work.seeds, 1),
            "growing": 8 * work.rates.slot_s * work.hashes * work.candidates * changed,
            "calls": work.rates.step_s * (1 + steps),
        }
        return Estimate(
            step_s=Interval.around(sum(terms.values()), work.rates.spread),
            terms_s=terms,
            memory_bytes={"candidates": 4.0 * work.candidates * work.hashes},
            bound="memory",
        )

    def expand(self, graph: Similarities, seeds: np.ndarray, count: int) -> Expansion:
        """Rows in the order in which they were added, with the similarity that each had then."""
        candidates = graph.candidates(seeds)
        union = graph.union(seeds, candidates)
        free = np.ones(len(candidates), bool)
        chosen, scores = [], []
        for _ in range(min(count, len(candidates))):
            similar = np.where(free, union.scores(), -1.0)
            at = int(similar.argmax())
            union.add(at)
            free[at] = False
            chosen.append(at)
            scores.append(similar[at])
        return Expansion(candidates[chosen], np.array(scores, np.float64), len(candidates))

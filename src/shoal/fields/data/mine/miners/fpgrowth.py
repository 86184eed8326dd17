"""FP-growth: prefix trees of the baskets, and of those that have an item, and so on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from shoal.core.parts import part
from shoal.fields.data.mine.miners.costs import estimate_of, grown
from shoal.fields.data.mine.miners.native import mine
from shoal.fields.data.mine.protocols import Itemsets, MineWork, MiningProblem
from shoal.ir import Estimate, Machine

_NAME = "fpgrowth"


@part
class FPGrowth:
    """Put baskets in a prefix tree; quickest where many of them are alike.

    Items are taken by descending support, so that baskets share the beginning of their path. For
    each item the paths above its nodes become a smaller tree, until a tree is one path, whose
    subsets are written down without a search.

    Source: Han, Pei, Yin, Mining Frequent Patterns without Candidate Generation, 2000; flat arrays
    with the nodes of an item side by side as in Racz, nonordfp, 2004.
    """

    def counts(self, problem: MiningProblem) -> Mapping[str, float]:
        """Nodes visited and made, items looked at."""
        work = mine(_NAME, problem.whole(), direct=False).work
        return {"nodes": work[0] + work[1] + work[3], "items": work[2]}

    def estimate(self, work: MineWork, machine: Machine) -> Estimate:
        """Nodes grow with the baskets, the less the more of them are alike."""
        counts, rates = work.counts.get(_NAME, {}), work.rates
        terms = {
            "inserting": work.num_baskets * work.mean_len * rates.insert_s,
            "nodes": grown(work, counts.get("nodes", 0.0)) * rates.node_s,
            "items": counts.get("items", 0.0) * rates.item_s,
        }
        return estimate_of(work, terms, whole=True, tree=True)

    def candidates(self, work: MineWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def mine(self, problem: MiningProblem) -> Itemsets:
        """Find the sets; closed and maximal ones are chosen from all."""
        return mine(_NAME, problem, direct=False).itemsets

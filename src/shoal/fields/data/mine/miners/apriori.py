"""Apriori: level by level, candidates from the frequent sets that are one item shorter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

from shoal.core.parts import part
from shoal.fields.data.mine.miners.costs import estimate_of, scaled
from shoal.fields.data.mine.miners.native import mine
from shoal.fields.data.mine.protocols import Itemsets, MineWork, MiningProblem
from shoal.ir import Estimate, Machine

_NAME = "apriori"


@part
class Apriori:
    """Count candidates of one length after the other; quickest where hardly any pair is frequent.

    Candidates of k items are joined from frequent sets that share their first k - 2 items, dropped
    if a subset is infrequent, and counted through a prefix trie over baskets that have only
    the items still needed; equal baskets are one. Pairs are counted without candidates.

    Source: Agrawal, Srikant, Fast Algorithms for Mining Association Rules, 1994.
    """

    def counts(self, problem: MiningProblem) -> Mapping[str, float]:
        """Items of baskets merged, steps past items, candidates joined, nodes of tries."""
        work = mine(_NAME, problem.whole(), direct=False).work
        return {"merged": work[3], "steps": work[0], "joins": work[1], "trie": work[2]}

    def estimate(self, work: MineWork, machine: Machine) -> Estimate:
        """Pairs and tries grow with the baskets; candidates do not."""
        counts, rates = work.counts.get(_NAME, {}), work.rates
        return estimate_of(
            work,
            {
                "merging": scaled(work, counts.get("merged", 0.0)) * rates.merge_s,
                "pairs": scaled(work, counts.get("steps", 0.0)) * rates.step_s,
                "candidates": counts.get("joins", 0.0) * rates.join_s,
                "tries": scaled(work, counts.get("trie", 0.0)) * rates.trie_s,
            },
            whole=True,
        )

    def candidates(self, work: MineWork, machine: Machine) -> Iterator[Self]:
        """Always; its price says whether it is worth it."""
        yield self

    def mine(self, problem: MiningProblem) -> Itemsets:
        """Find the sets; closed and maximal ones are chosen from all."""
        return mine(_NAME, problem, direct=False).itemsets

"""Eclat: depth first, with the baskets of each item as bits where they are dense, else as lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.fields.data.mine.miners.costs import estimate_of, scaled
from shoal.fields.data.mine.miners.native import mine
from shoal.fields.data.mine.protocols import Itemsets, MineWork, MiningProblem
from shoal.ir import Estimate, Machine

_NAME = "eclat"


@part
class Eclat:
    """Intersect the baskets of items, depth first; quickest on dense data, and most other.

    Items are taken by ascending support. What is left of the baskets under an item is made into a
    matrix of bits, in which a set is one AND with a count of bits (AVX-512 where there is), and
    which shrinks to the baskets that are left; where that matrix would be sparser than
    ``bit_density`` it stays sorted lists. Items that are in all baskets of a prefix are
    set aside. Closed and maximal sets are found without the others (Lucchese, Orlando, Perego,
    DCI_Closed, 2004).

    Args:
        bit_density: share of ones from which on bits are used.

    Source: Zaki, Scalable Algorithms for Association Mining, 2000.
    """

    bit_density: Annotated[float, Ge(0), Le(1)] = 1 / 64

    def counts(self, problem: MiningProblem) -> Mapping[str, float]:
        """Steps past items, words intersected and packed, intersections."""
        work = mine(_NAME, problem, direct=True, bit_density=self.bit_density).work
        return {"words": work[0], "packed": work[1], "calls": work[2], "steps": work[3]}

    def estimate(self, work: MineWork, machine: Machine) -> Estimate:
        """Words and steps grow with the baskets; intersections do not."""
        counts, rates = work.counts.get(_NAME, {}), work.rates
        terms = {
            "steps": scaled(work, counts.get("steps", 0.0)) * rates.step_s * 2,
            "words": scaled(work, counts.get("words", 0.0)) * rates.word_s,
            "packing": scaled(work, counts.get("packed", 0.0)) * rates.pack_s,
            "calls": counts.get("calls", 0.0) * rates.call_s,
        }
        return estimate_of(work, terms, whole=False)

    def candidates(self, work: MineWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def mine(self, problem: MiningProblem) -> Itemsets:
        """Find the sets."""
        return mine(_NAME, problem, direct=True, bit_density=self.bit_density).itemsets

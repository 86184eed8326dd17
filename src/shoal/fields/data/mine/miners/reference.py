"""Frequent sets, counts and rules in Python: the oracle of the compiled miners, and the fallback.

Depth first over items, with a Python int as the set of baskets of each.
"""

from __future__ import annotations

import itertools

import numpy as np

from shoal.fields.data.mine.baskets import Baskets
from shoal.fields.data.mine.protocols import Itemsets, MiningProblem, Target, too_many


def mine(problem: MiningProblem) -> Itemsets:
    """All, closed or maximal frequent sets.

    Raises:
        TooManyError: more than ``max_itemsets``.
    """
    columns = {
        item: bits
        for item, bits in _columns(problem.baskets).items()
        if bits.bit_count() >= problem.least
    }
    found: dict[tuple[int, ...], int] = {}
    longest = problem.max_len or len(columns)

    def grow(prefix: tuple[int, ...], rows: int, later: list[int]) -> None:
        for at, item in enumerate(later):
            both = rows & columns[item]
            if (support := both.bit_count()) >= problem.least:
                found[(*prefix, item)] = support
                if len(found) > problem.max_itemsets:
                    raise too_many(problem)
                if len(prefix) + 1 < longest:
                    grow((*prefix, item), both, later[at + 1 :])

    grow((), -1, sorted(columns))
    sets = _itemsets(found, problem.baskets)
    return sets if problem.target == "all" else sets.take(keep(sets, problem.target))


def keep(found: Itemsets, target: Target) -> np.ndarray:
    """Bool [sets]: which of all frequent sets are closed, or maximal."""
    sets = [frozenset(items.tolist()) for items in _each(found)]
    support = dict(zip(sets, found.support.tolist(), strict=True))
    beaten = {
        smaller
        for items in sets
        for smaller in (items - {item} for item in items)
        if target == "maximal" or support.get(smaller) == support[items]
    }
    return np.array([items not in beaten for items in sets], np.bool_)


def recount(baskets: Baskets, sets: Itemsets) -> np.ndarray:
    """Int32 [sets]: in how many baskets each set is."""
    columns = _columns(baskets)
    every = (1 << baskets.num_baskets) - 1
    counts = []
    for items in _each(sets):
        rows = every
        for item in items.tolist():
            rows &= columns.get(item, 0)
        counts.append(rows.bit_count())
    return np.array(counts, np.int32)


def find_rules(found: Itemsets, confidence: float) -> tuple[np.ndarray, ...]:
    """Place of the set, mask of its consequent, support of both sides, for each rule."""
    sets = [frozenset(items.tolist()) for items in _each(found)]
    support = dict(zip(sets, found.support.tolist(), strict=True))
    rules = []
    for at, items in enumerate(_each(found)):
        for size in range(1, len(items)):
            for places in itertools.combinations(range(len(items)), size):
                then = frozenset(int(items[place]) for place in places)
                given = support[frozenset(items.tolist()) - then]
                if found.support[at] >= confidence * given * (1 - 1e-12):
                    mask = sum(1 << place for place in places)
                    rules.append((at, mask, given, support[then]))
    kinds = (np.int64, np.uint64, np.int32, np.int32)
    columns = list(zip(*rules, strict=True)) or [()] * 4
    return tuple(np.array(column, kind) for column, kind in zip(columns, kinds, strict=True))


def _columns(baskets: Baskets) -> dict[int, int]:
    """Item -> its baskets, as the bits of a number."""
    columns: dict[int, int] = {}
    begins = baskets.begins.tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(begins)):
        for item in baskets.ids[begin:end].tolist():
            columns[item] = columns.get(item, 0) | 1 << row
    return columns


def _each(found: Itemsets) -> list[np.ndarray]:
    return np.split(found.items, found.ends[:-1])[: len(found)]


def _itemsets(found: dict[tuple[int, ...], int], baskets: Baskets) -> Itemsets:
    lengths = [len(items) for items in found]
    return Itemsets(
        items=np.fromiter(itertools.chain.from_iterable(found), np.int32, sum(lengths)),
        ends=np.cumsum(np.array(lengths, np.int64)),
        support=np.fromiter(found.values(), np.int32, len(found)),
        num_baskets=baskets.num_baskets,
        names=baskets.names,
    )

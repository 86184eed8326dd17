"""What a miner is, what it is given, and what it returns.

A basket is a set of items. The *support* of a set of items is the number of baskets that have them
all; a set is *frequent* if its support is at least a given one. All miners find the same sets; they
differ in time and memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.core.random import generator

if TYPE_CHECKING:
    from shoal.fields.data.mine.baskets import Baskets
    from shoal.ir import Estimate, Machine

Target: TypeAlias = Literal["all", "closed", "maximal"]
"""All frequent sets; those that no larger one equals in support; those in no larger one."""

NO_LIMIT = 2**62
"""No limit to the number of sets."""


class MineError(ConfigError, ValueError):
    """Baskets or limits that cannot be used."""


class TooManyError(MineError):
    """More sets than the limit."""


def too_many(problem: MiningProblem, *, memory: bool = False) -> TooManyError:
    """The error of a search that found too many sets."""
    limit = "the memory has room for" if memory else f"max_itemsets = {problem.max_itemsets:,}"
    remedies = ["a larger min_support"]
    if problem.max_len is None:
        remedies.append("max_len")
    if problem.target != "maximal":
        remedies.append('target="maximal"')
    return TooManyError(
        f"more frequent sets than {limit}, at a support of {problem.least:,} of "
        f"{problem.baskets.num_baskets:,} baskets; give {', '.join(remedies[:-1])} or "
        f"{remedies[-1]}"
        if len(remedies) > 1
        else f"more frequent sets than {limit}; give {remedies[0]}"
    )


def least_support(min_support: float, num_baskets: int) -> int:
    """The least number of baskets that makes a set frequent.

    Args:
        min_support: a share of all baskets, a float in (0, 1]; or a number of them, an int.
        num_baskets: all of them, the empty ones too.

    Raises:
        MineError: it is out of bounds.
    """
    if isinstance(min_support, bool) or not isinstance(
        min_support, int | float | np.integer | np.floating
    ):
        raise MineError(f"min_support = {min_support!r}: expected a number")
    if isinstance(min_support, int | np.integer):
        if min_support < 1:
            raise MineError(f"min_support = {min_support}: expected a number of baskets from 1 on")
        return int(min_support)
    if not 0 < min_support <= 1:
        raise MineError(
            f"min_support = {float(min_support)}: expected a share in (0, 1], or a whole number of "
            "baskets"
        )
    return max(1, math.ceil(min_support * num_baskets - 1e-9))


@dataclass(frozen=True)
class Itemsets:
    """Sets of items with their support, in no particular order.

    Args:
        items: int32 [length of all sets], ids of items.
        ends: int64 [sets], set i is ``items[ends[i - 1] : ends[i]]``.
        support: int32 [sets], number of baskets.
        num_baskets: all baskets.
        names: [items] what the ids stand for.
    """

    items: np.ndarray
    ends: np.ndarray
    support: np.ndarray
    num_baskets: int
    names: Any

    @classmethod
    def none(cls, baskets: Baskets) -> Self:
        """No sets."""
        nothing = np.empty(0, np.int32)
        return cls(nothing, nothing.astype(np.int64), nothing, baskets.num_baskets, baskets.names)

    def __len__(self) -> int:
        return len(self.ends)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """Int64 [sets]: items of each set."""
        return np.diff(self.ends, prepend=0)

    def take(self, which: np.ndarray) -> Itemsets:
        """Some of the sets: a mask, or their numbers in an order."""
        which = np.flatnonzero(which) if which.dtype == np.bool_ else which
        lengths = self.lengths[which]
        ends = np.cumsum(lengths)
        begins = (self.ends - self.lengths)[which]
        at = np.arange(int(ends[-1]) if len(ends) else 0)
        at += np.repeat(begins - (ends - lengths), lengths)
        return replace(self, items=self.items[at], ends=ends, support=self.support[which])

    def ordered(self) -> Itemsets:
        """The same sets by length, then lexicographically; items ascending in each."""
        owner = np.repeat(np.arange(len(self)), self.lengths)
        items = self.items[np.lexsort((self.items, owner))]
        within = replace(self, items=items)
        order = np.empty(len(self), np.int64)
        done = 0
        for length in np.unique(self.lengths):
            which = np.flatnonzero(self.lengths == length)
            rows = items[(self.ends[which] - length)[:, None] + np.arange(length)]
            order[done : done + len(which)] = which[np.lexsort(rows.T[::-1])]
            done += len(which)
        return within.take(order)

    def same_as(self, other: Itemsets) -> bool:
        """Whether both have the same sets of the same support; their ids must agree.

        Sets are compared by two sums of random 64-bit keys of their items.
        """
        size = max(self.items.max(initial=0), other.items.max(initial=0)) + 1
        keys = generator(0, purpose="keys of sets").integers(0, 2**64, (2, size), np.uint64)

        def marks(one: Itemsets) -> np.ndarray:
            if not len(one):
                return np.empty((3, 0), np.uint64)
            begins = one.ends - one.lengths
            sums = [np.add.reduceat(key[one.items], begins) for key in keys]
            rows = np.stack([*sums, one.support.astype(np.uint64)])
            ordered: np.ndarray = rows[:, np.lexsort(rows[:2])]
            return ordered

        return np.array_equal(marks(self), marks(other))

    def as_dict(self) -> dict[frozenset[Any], int]:
        """Set of names -> support; for few sets."""
        names = [self.names[int(item)] for item in self.items]
        names = [name.as_py() if hasattr(name, "as_py") else name for name in names]
        begins = self.ends - self.lengths
        return {
            frozenset(names[begin:end]): int(count)
            for begin, end, count in zip(begins, self.ends, self.support, strict=True)
        }


@dataclass(frozen=True)
class MiningProblem:
    """One search for frequent sets.

    Args:
        baskets: where.
        least: support that makes a set frequent.
        target: which frequent sets.
        max_len: most items of a set; None for any number. Closed and maximal sets are then those of
            the sets that are no longer.
        max_itemsets: more sets are an error.
        threads: not used by every miner.
        budget: operations after which the search may give up; of samples.
        tick: called with (share done, sets found), some times a second.
    """

    baskets: Baskets
    least: int
    target: Target = "all"
    max_len: int | None = None
    max_itemsets: int = NO_LIMIT
    threads: int = 1
    budget: int = NO_LIMIT
    tick: Callable[[float, int], None] = lambda done, sets: None

    def whole(self) -> MiningProblem:
        """The same search for all sets."""
        return replace(self, target="all")


class MineRates(Value):
    """Seconds of the miners' operations on one thread of a machine.

    Args:
        entry_s: to number and sort one item of one basket.
        kept_s: to put one frequent item of a basket in its place.
        merge_s: to look for an equal basket, for each item of one with several.
        insert_s: to put one item of a basket into a prefix tree.
        step_s: to go past one item of a basket and count it.
        word_s: to intersect 64 baskets of two items and count them.
        call_s: of one intersection beside its words.
        pack_s: to take 64 baskets of an item over into a smaller matrix.
        node_s: to visit a node of a prefix tree on the way up and down.
        item_s: of an item of a conditional tree beside its nodes.
        trie_s: to look at a node of a trie of candidates.
        join_s: to make and check a candidate.
        set_s: to write a set.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or taken from a core of a server.
    """

    entry_s: float
    kept_s: float
    merge_s: float
    insert_s: float
    step_s: float
    word_s: float
    call_s: float
    pack_s: float
    node_s: float
    item_s: float
    trie_s: float
    join_s: float
    set_s: float
    spread: float
    measured: bool


class MineWork(Value):
    """The shape of the data, as the miners' estimates see it.

    Args:
        num_baskets: all.
        entries: items of all baskets together.
        least: support that makes a set frequent.
        num_items: frequent ones.
        mean_len: frequent items of a basket.
        longest: most frequent items of a basket.
        density: ``mean_len / num_items``.
        depth: items of the largest set found in the sample.
        sets: frequent sets of the sample; of all data there are about as many.
        wanted: those of them that are asked for.
        set_len: items of one, in the mean.
        sample: baskets of the sample.
        capped: the sample has more sets than were waited for, so a higher support was taken.
        counts: miner -> operations that it took on the sample, by sort.
        rates: of the machine.
    """

    num_baskets: int
    entries: int
    least: int
    num_items: int
    mean_len: float
    longest: int
    density: float
    depth: int
    sets: float
    wanted: float
    set_len: float
    sample: int
    capped: bool
    counts: Mapping[str, Mapping[str, float]]
    rates: MineRates


@runtime_checkable
class Miner(Protocol):
    """A part of kind ``miner``: one way to find frequent sets."""

    def counts(self, problem: MiningProblem) -> Mapping[str, float]:
        """Operations by sort that a search takes: run on a sample, they price the whole."""

    def estimate(self, work: MineWork, machine: Machine) -> Estimate:
        """Seconds of the whole search, and bytes by cause."""

    def candidates(self, work: MineWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def mine(self, problem: MiningProblem) -> Itemsets:
        """Find the sets.

        Raises:
            TooManyError: more than ``max_itemsets``, or than the memory has room for.
        """

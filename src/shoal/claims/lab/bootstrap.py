"""How process groups are made when a job starts, and how many barriers that takes.

Made by all ranks of the job, each group costs a barrier of all: n arrivals for each of a number
of groups that grows with n. Made by its own members alone, through a store that does not block
and in one order on all ranks, a group costs as many arrivals as it has members, and the job one
barrier in the end.

Source: Jiang et al., MegaScale, 2024, section 3.5 (initialisation from 1047 s to under 5 s at
2,048 GPUs).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from shoal.core.errors import RankError, require
from shoal.ir import Parallel

Group = tuple[int, ...]


class BootstrapCost(NamedTuple):
    """Groups that were made, arrivals at barriers, and operations on the store with these."""

    groups: int
    arrivals: int
    operations: int


class _Store:
    """Counters by key, and how often they were touched."""

    def __init__(self) -> None:
        self.counts: dict[object, int] = {}
        self.operations = 0
        self.arrivals = 0

    def arrive(self, key: object) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1
        self.operations += 1
        self.arrivals += 1

    def complete(self, key: object, members: int) -> bool:
        return self.counts.get(key, 0) >= members


def groups_of(parallel: Parallel) -> list[Group]:
    """Every group of a job with more than one rank, in the order in which ranks make them."""
    layout = parallel.attention()
    groups: dict[Group, None] = {}
    for axes in (("tp",), ("cp",), ("pp",), ("dp", "cp"), ("pp", "tp")):
        for group in layout.groups(*axes):
            if len(group) > 1:
                groups.setdefault(tuple(group))
    return list(groups)


def bootstrap(world: int, orders: Sequence[Sequence[Group]], *, everyone: bool) -> BootstrapCost:
    """Let ``world`` ranks make their groups against a store, one turn each, and count.

    Args:
        world: ranks.
        orders: of each rank, the groups in its own order; all groups with ``everyone``, else
            those that it is in.
        everyone: each group is made by all ranks with a barrier of all; else by its members.

    Raises:
        RankError: ranks make their groups in different orders and wait for each other.
    """
    require(len(orders) == world, "orders", len(orders), expected=f"one for each of {world} ranks")
    store = _Store()
    made: set[Group] = set()

    def rank(own: int) -> Iterator[tuple[object, int]]:
        for group in orders[own]:
            members = world if everyone else len(group)
            store.arrive(group)
            made.add(group)
            yield group, members
        store.arrive("all")
        yield "all", world

    running = {number: rank(number) for number in range(world)}
    waiting = {number: next(program, None) for number, program in running.items()}
    while running:
        moved = False
        for number in list(running):
            wanted = waiting[number]
            # A key that is complete costs one look; one that is not costs none: the store calls.
            while wanted is not None and store.complete(*wanted):
                store.operations += 1
                moved = True
                wanted = waiting[number] = next(running[number], None)
            if wanted is None:
                del running[number]
        if running and not moved:
            stuck = {number: waiting[number] for number in sorted(running)[:4]}
            raise RankError(
                f"groups are made in different orders, so {len(running)} ranks wait for each "
                f"other: {', '.join(f'rank {n} for {w[0]}' for n, w in stuck.items() if w)}"
            )
    return BootstrapCost(len(made), store.arrivals, store.operations)

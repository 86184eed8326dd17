"""Put nodes into the stages of a pipeline, by a genetic search.

A stage's nodes average their gradients, so the slowest link inside a stage counts; so do
the links between neighbouring stages, of which each is as slow as the slowest link of the
best pairing of the two stages' nodes.

Source: Yuan et al., Decentralized Training of Foundation Models in Heterogeneous
Environments, 2022 (both costs and the genetic search); Blagoev et al., SkipPipe, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.core.random import generator
from shoal.plan.routes.network import WanNetwork

Arrangement = tuple[tuple[int, ...], ...]
"""Numbers of the nodes of every stage."""

_POPULATION = 32
_GENERATIONS = 60
_PATIENCE = 15


def default_sizes(nodes: int, stages: int, keep: int) -> tuple[int, ...]:
    """Nodes of each stage, so that the busiest node has as little to do as it can.

    Every micro-batch visits stage 0 and ``keep - 1`` of the others.

    Raises:
        PlanError: fewer nodes than stages.
    """
    require(
        nodes >= stages,
        "nodes",
        nodes,
        expected=f"at least {stages}, one for each stage",
        error=PlanError,
    )
    share = (keep - 1) / (stages - 1) if stages > 1 else 1.0
    load = [1.0] + [share] * (stages - 1)
    sizes = [1] * stages
    for _ in range(nodes - stages):
        sizes[max(range(stages), key=lambda s: load[s] / sizes[s])] += 1
    return tuple(sizes)


def bottleneck(cost: Sequence[Sequence[float]]) -> float:
    """Least greatest cost of a pairing in which every row or every column has a partner.

    Args:
        cost: rows by columns; infinite where there is no link.
    """
    rows, columns = len(cost), len(cost[0])
    if rows > columns:
        return bottleneck([list(column) for column in zip(*cost, strict=True)])
    for limit in sorted({value for row in cost for value in row}):
        partner = [-1] * columns

        def free(
            row: int, seen: set[int], limit: float = limit, partner: list[int] = partner
        ) -> bool:
            for column in range(columns):
                if cost[row][column] <= limit and column not in seen:
                    seen.add(column)
                    if partner[column] < 0 or free(partner[column], seen):
                        partner[column] = row
                        return True
            return False

        if all(free(row, set()) for row in range(rows)):
            return limit
    return math.inf


def arrangement_cost(
    network: WanNetwork, stages: Arrangement, *, sync_bytes: float, boundary_bytes: float
) -> tuple[float, float]:
    """(slowest link inside a stage, sum of the bottlenecks round the stages), in seconds."""
    within = max(
        (network.seconds(a, b, sync_bytes) for stage in stages for a in stage for b in stage),
        default=0.0,
    )
    around = sum(
        bottleneck([[network.seconds(a, b, boundary_bytes) for b in stages[s - 1]] for a in stage])
        for s, stage in enumerate(stages)
        if len(stages) > 1
    )
    return within, around


def arrange(
    network: WanNetwork,
    sizes: Sequence[int],
    *,
    sync_bytes: float,
    boundary_bytes: float,
    seed: int = 0,
) -> Arrangement:
    """Nodes of each stage.

    Args:
        network: the nodes.
        sizes: nodes of each stage; together all of them.
        sync_bytes: gradients of a stage.
        boundary_bytes: activations of a micro-batch.
        seed: of the search.

    Raises:
        PlanError: the sizes do not fit, nodes cannot reach each other, or a stage would hold
            nodes without a link.
    """
    network.connected()
    count = len(network.nodes)
    require(
        sum(sizes) == count and min(sizes) >= 1,
        "sizes",
        tuple(sizes),
        expected=f"numbers of at least 1 that add up to {count} nodes",
        error=PlanError,
    )

    @cache
    def pair(one: frozenset[int], other: frozenset[int]) -> float:
        return bottleneck(
            [[network.seconds(a, b, boundary_bytes) for b in sorted(other)] for a in sorted(one)]
        )

    @cache
    def inside(stage: frozenset[int]) -> float:
        return max(network.seconds(a, b, sync_bytes) for a in stage for b in stage)

    def cost(genes: tuple[int, ...]) -> float:
        stages = [
            frozenset(n for n, stage in enumerate(genes) if stage == s) for s in range(len(sizes))
        ]
        total = max(map(inside, stages))
        if len(stages) > 1:
            total += sum(pair(stages[s - 1], stage) for s, stage in enumerate(stages))
        return total

    best = _evolve(cost, [s for s, size in enumerate(sizes) for _ in range(size)], seed)
    require(
        math.isfinite(cost(best)),
        f"network {network.name}",
        "links that are missing",
        expected=f"stages of {', '.join(map(str, sizes))} nodes in which all nodes are linked, "
        "and links from each stage to the next",
        hint="give more links, or make the stages smaller",
        error=PlanError,
    )
    return tuple(tuple(n for n, stage in enumerate(best) if stage == s) for s in range(len(sizes)))


def _evolve(cost: object, genes: list[int], seed: int) -> tuple[int, ...]:
    """The best found; a gene is the stage of a node, and stages keep their sizes."""
    assert callable(cost)
    random = generator(seed, purpose="arrange nodes")

    def climbed(candidate: tuple[int, ...]) -> tuple[int, ...]:
        """Exchange two nodes as long as that is better."""
        value = cost(candidate)
        better = True
        while better:
            better = False
            for a in range(len(candidate)):
                for b in range(a):
                    if candidate[a] == candidate[b]:
                        continue
                    other = list(candidate)
                    other[a], other[b] = other[b], other[a]
                    now = cost(tuple(other))
                    if now < value:
                        candidate, value, better = tuple(other), now, True
        return candidate

    def shuffled() -> tuple[int, ...]:
        return tuple(np.array(genes)[random.permutation(len(genes))].tolist())

    population = sorted((shuffled() for _ in range(_POPULATION)), key=cost)
    population[0] = climbed(population[0])
    idle = 0
    for _ in range(_GENERATIONS):
        first, second = (population[int(min(random.integers(0, _POPULATION, 2)))] for _ in range(2))
        # What the parents agree on stays; the rest is drawn anew.
        child = [a if a == b else -1 for a, b in zip(first, second, strict=True)]
        rest = list(genes)
        for gene in child:
            if gene >= 0:
                rest.remove(gene)
        assigned = iter(np.array(rest, int)[random.permutation(len(rest))].tolist())
        made = tuple(gene if gene >= 0 else next(assigned) for gene in child)
        made = climbed(shuffled() if first == second else made)
        if cost(made) < cost(population[0]):
            idle = -1
        idle += 1
        if made not in population:
            population = sorted([*population[:-1], made], key=cost)
        if idle >= _PATIENCE:
            break
    return population[0]

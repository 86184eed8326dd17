"""Orders of the devices of some clusters: those that are tried, naive ones, and all.

A tensor-parallel group is a unit: neighbours of one node, which no order of these tears apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, permutations, product

from shoal.plan.topology.clusters import Clusters
from shoal.plan.topology.groups import DegreeGrid

# Orders of stages, or of clusters, that are all tried.
_ALL = 120
# Where there are more, exchanges of two of so many stages, so often.
_STAGES, _ROUNDS = 12, 4


def _stages_of(clusters: Clusters, grid: DegreeGrid) -> list[int]:
    """Stages that each cluster holds: in proportion to its devices."""
    each = clusters.devices_per_node
    return [cluster.nodes * each // grid.per_stage for cluster in clusters.clusters]


def _sequences(clusters: Clusters, grid: DegreeGrid) -> int:
    """Ways to say which cluster each stage is in."""
    held = _stages_of(clusters, grid)
    return math.factorial(sum(held)) // math.prod(map(math.factorial, held))


def searched_whole(clusters: Clusters, grid: DegreeGrid) -> bool:
    """Whether all ways to say which cluster each stage is in are few enough to be tried."""
    return _sequences(clusters, grid) <= _ALL


def candidates(clusters: Clusters, grid: DegreeGrid, *, whole: bool) -> Iterator[tuple[int, ...]]:
    """Devices by rank: clusters in every order, or stages in every order where these are few.

    In a cluster a stage takes the devices of a node after another, or some of every node, so that
    the next stage has others of the same nodes.
    """
    count = len(clusters.clusters)
    lists = [
        [_listed(clusters, at, grid.tp, far=far) for far in (False, True)] for at in range(count)
    ]
    ways: Iterator[tuple[int, ...]] | list[tuple[int, ...]] = product((0, 1), repeat=count)
    if count > 3:
        ways = [(0,) * count, (1,) * count]
    held = _stages_of(clusters, grid)
    for way in ways:
        members = [own[far] for own, far in zip(lists, way, strict=True)]
        if whole and searched_whole(clusters, grid):
            for sequence in _labels(held):
                yield _assigned(members, sequence, grid.per_stage)
            continue
        orders: Iterable[tuple[int, ...]] = permutations(range(count))
        if math.factorial(count) > _ALL:
            fast = sorted(range(count), key=lambda at: -clusters.speeds[at])
            orders = [tuple(range(count)), tuple(fast), tuple(reversed(fast))]
        for order in orders:
            yield tuple(device for at in order for device in members[at])


def _labels(held: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to give so many stages of each cluster an order."""
    if not any(held):
        yield ()
    for at, left in enumerate(held):
        if left:
            rest = [stages - (other == at) for other, stages in enumerate(held)]
            for behind in _labels(rest):
                yield (at, *behind)


def _listed(clusters: Clusters, cluster: int, tp: int, *, far: bool) -> tuple[int, ...]:
    """Devices of a cluster, in units of ``tp``: node by node, or a unit of each node in turn."""
    nodes: dict[int, list[int]] = {}
    for number, place in enumerate(clusters.places):
        if place.cluster == cluster:
            nodes.setdefault(place.node, []).append(number)
    units = [
        (unit, node, tuple(own[unit : unit + tp]))
        for node, own in nodes.items()
        for unit in range(0, len(own), tp)
    ]
    if far:
        units.sort(key=lambda x: x[:2])
    return tuple(device for _, _, unit in units for device in unit)


def _assigned(
    members: Sequence[Sequence[int]], sequence: Sequence[int], size: int
) -> tuple[int, ...]:
    """Each stage the next ``size`` devices of its cluster."""
    taken = [0] * len(members)
    numbers: list[int] = []
    for cluster in sequence:
        numbers += members[cluster][taken[cluster] : taken[cluster] + size]
        taken[cluster] += size
    return tuple(numbers)


def improved(
    devices: tuple[int, ...], grid: DegreeGrid, seconds: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """Exchange two stages as long as that is faster."""
    size = grid.per_stage
    for _ in range(_ROUNDS):
        swaps = []
        for a, b in combinations(range(min(grid.pp, _STAGES)), 2):
            stages = [devices[s : s + size] for s in range(0, grid.world, size)]
            stages[a], stages[b] = stages[b], stages[a]
            swaps.append(tuple(device for stage in stages for device in stage))
        best = min(swaps, key=seconds, default=devices)
        if seconds(best) >= seconds(devices):
            break
        devices = best
    return devices


def interleaved(clusters: Clusters) -> tuple[int, ...]:
    """Devices as a launcher that knows nothing lists them: a node of each cluster in turn."""
    nodes: dict[int, list[list[int]]] = {}
    for number, place in enumerate(clusters.places):
        of = nodes.setdefault(place.cluster, [])
        if place.device == 0:
            of.append([])
        of[-1].append(number)
    numbers: list[int] = []
    for turn in range(max(len(of) for of in nodes.values())):
        for of in nodes.values():
            if turn < len(of):
                numbers += of[turn]
    return tuple(numbers)


@lru_cache(maxsize=8)
def _assignments_of(nodes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Orders of nodes, one entry a device, in which the nodes of a cluster begin in turn."""
    assignments = []

    def extend(order: list[int], left: dict[int, int], begun: dict[int, list[int]]) -> None:
        if not any(left.values()):
            assignments.append(tuple(order))
            return
        for cluster, node in dict.fromkeys(nodes):
            if not left[node]:
                continue
            fresh = [n for c, n in dict.fromkeys(nodes) if c == cluster and n not in begun[cluster]]
            if node not in begun[cluster] and node != fresh[0]:
                continue
            before = begun[cluster]
            begun[cluster] = before if node in before else [*before, node]
            left[node] -= 1
            extend([*order, node], left, begun)
            left[node] += 1
            begun[cluster] = before

    counts = {node: sum(n == node for _, n in nodes) for _, node in nodes}
    extend([], counts, {cluster: [] for cluster, _ in nodes})
    return tuple(assignments)


def assignments(clusters: Clusters) -> Iterator[tuple[int, ...]]:
    """Devices by rank, in all orders that differ: devices of a node are alike, and nodes too."""
    places = clusters.places
    of_node: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        of_node.setdefault(place.node, []).append(number)
    for order in _assignments_of(tuple((place.cluster, place.node) for place in places)):
        taken = dict.fromkeys(of_node, 0)
        devices = []
        for node in order:
            devices.append(of_node[node][taken[node]])
            taken[node] += 1
        yield tuple(devices)

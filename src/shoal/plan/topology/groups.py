"""Who talks to whom, over which network, and how fast: the groups of a split on given devices.

Ranks are ordered tp < dp < pp: those of a tensor-parallel group are neighbours, then those of a
stage. A port of a node is shared by all groups that leave the node through it at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shoal.plan.topology.clusters import Clusters, DevicePath


class DegreeGrid(NamedTuple):
    """The degrees of a split of all devices.

    Args:
        pp: stages, slowest.
        dp: replicas of a stage.
        tp: ranks of a layer, fastest.
    """

    pp: int
    dp: int
    tp: int

    @property
    def per_stage(self) -> int:
        """Ranks of a stage."""
        return self.dp * self.tp

    @property
    def world(self) -> int:
        """All ranks."""
        return self.pp * self.dp * self.tp

    def ranks(self, axis: str) -> list[tuple[int, ...]]:
        """Groups of ranks that differ in one axis alone, in order."""
        tp, stage = self.tp, self.per_stage
        if axis == "tp":
            return [tuple(range(s, s + tp)) for s in range(0, self.world, tp)]
        if axis == "dp":
            starts = [s + t for s in range(0, self.world, stage) for t in range(tp)]
            return [tuple(range(s, s + stage, tp)) for s in starts]
        return [tuple(range(s, self.world, stage)) for s in range(stage)]


class Group(NamedTuple):
    """Ranks that communicate with each other.

    Args:
        axis: tp, dp or pp.
        ranks: members.
        devices: theirs, by number in the clusters.
        nic: the network that all of them understand: that of the slowest way; ``device`` inside a
            node.
        bandwidth: byte/s that one member reaches while all groups of its axis talk.
        latency_s: the longest of a way.
        clusters: how many of them it is spread over.
    """

    axis: str
    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    nic: str
    bandwidth: float
    latency_s: float
    clusters: int


def groups(clusters: Clusters, devices: Sequence[int], grid: DegreeGrid, axis: str) -> list[Group]:
    """The groups of one axis.

    Args:
        clusters: what there is.
        devices: by rank, its device.
        grid: the split.
        axis: tp, dp (rings) or pp (chains).
    """
    rings = axis != "pp"
    members = [tuple(devices[rank] for rank in ranks) for ranks in grid.ranks(axis)]
    ways = [_ways(clusters, one, ring=rings) for one in members]
    # Messages that leave a node through a port at once, by all groups.
    load: Counter[tuple[int, str]] = Counter()
    for one in ways:
        for (source, _), way in one:
            if way.nic != "device":
                load[clusters.places[source].node, way.nic] += 1
    groups = []
    for ranks, own, one in zip(grid.ranks(axis), members, ways, strict=True):
        rates = [
            (way.bandwidth / max(1, load[clusters.places[source].node, way.nic]), way)
            for (source, _), way in one
        ]
        rate, slowest = min(rates, key=lambda x: x[0], default=(float("inf"), None))
        groups.append(
            Group(
                axis,
                ranks,
                own,
                "device" if slowest is None else slowest.nic,
                rate,
                max((way.latency_s for _, way in rates), default=0.0),
                len({clusters.places[device].cluster for device in own}),
            )
        )
    return groups


def _ways(
    clusters: Clusters, devices: Sequence[int], *, ring: bool
) -> list[tuple[tuple[int, int], DevicePath]]:
    """Each message of a round, from whom to whom, and its way.

    A collective between different networks falls to the one that all members share, and so do all
    of its messages between nodes.
    """
    if len(devices) < 2:
        return []
    pairs = list(pairwise(devices))
    if ring and len(devices) > 2:
        pairs.append((devices[-1], devices[0]))
    elif ring:
        pairs.append((devices[1], devices[0]))
    ways = [clusters.way(a, b) for a, b in pairs]
    if ring:
        outside = [way for way in ways if way.nic != "device"]
        if len({way.nic for way in outside}) > 1:
            common = min(outside, key=lambda way: way.bandwidth)
            ways = [way if way.nic == "device" else common for way in ways]
    return list(zip(pairs, ways, strict=True))


def crossing(found: Sequence[Group]) -> int:
    """Groups that are spread over several clusters."""
    return sum(group.clusters > 1 for group in found)

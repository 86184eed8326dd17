"""Nodes far from each other, and what it takes to send between them.

The table of regions is a fact about public clouds: one-way numbers of a machine in each
region to one in the other, as published with the simulation of decentralised training.

Source: Yuan et al., Decentralized Training of Foundation Models in Heterogeneous
Environments, 2022 (delays in ms and bandwidths in Gbit/s between ten regions).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from shoal.core.config import Value
from shoal.core.errors import MachineError, PlanError, nearest, require

# Between two regions: (ms, Gbit/s).
WAN: dict[tuple[str, str], tuple[float, float]] = {
    ("oregon", "virginia"): (67, 0.79),
    ("oregon", "ohio"): (49, 1.10),
    ("oregon", "tokyo"): (96, 0.523),
    ("oregon", "seoul"): (124, 0.46),
    ("oregon", "singapore"): (163, 0.341),
    ("oregon", "sydney"): (139, 0.36),
    ("oregon", "london"): (136, 0.42),
    ("oregon", "frankfurt"): (143, 0.404),
    ("oregon", "ireland"): (124, 0.482),
    ("virginia", "ohio"): (11, 1.12),
    ("virginia", "tokyo"): (143, 0.524),
    ("virginia", "seoul"): (172, 0.500),
    ("virginia", "singapore"): (230, 0.364),
    ("virginia", "sydney"): (197, 0.383),
    ("virginia", "london"): (76, 1.16),
    ("virginia", "frankfurt"): (90, 1.02),
    ("virginia", "ireland"): (67, 1.05),
    ("ohio", "tokyo"): (130, 0.694),
    ("ohio", "seoul"): (159, 0.529),
    ("ohio", "singapore"): (197, 0.452),
    ("ohio", "sydney"): (185, 0.484),
    ("ohio", "london"): (86, 1.05),
    ("ohio", "frankfurt"): (99, 0.799),
    ("ohio", "ireland"): (77, 1.14),
    ("tokyo", "seoul"): (34, 1.10),
    ("tokyo", "singapore"): (73, 1.01),
    ("tokyo", "sydney"): (100, 0.761),
    ("tokyo", "london"): (210, 0.366),
    ("tokyo", "frankfurt"): (223, 0.36),
    ("tokyo", "ireland"): (199, 0.465),
    ("seoul", "singapore"): (74, 1.14),
    ("seoul", "sydney"): (148, 0.58),
    ("seoul", "london"): (238, 0.342),
    ("seoul", "frankfurt"): (235, 0.358),
    ("seoul", "ireland"): (228, 0.335),
    ("singapore", "sydney"): (92, 0.816),
    ("singapore", "london"): (169, 0.500),
    ("singapore", "frankfurt"): (155, 0.535),
    ("singapore", "ireland"): (179, 0.492),
    ("sydney", "london"): (262, 0.326),
    ("sydney", "frankfurt"): (265, 0.328),
    ("sydney", "ireland"): (254, 0.344),
    ("london", "frankfurt"): (14, 1.14),
    ("london", "ireland"): (12, 1.09),
    ("frankfurt", "ireland"): (24, 1.08),
}

REGIONS: tuple[str, ...] = tuple(dict.fromkeys(name for pair in WAN for name in pair))

# Two machines of one region, as the same publication assumes: (ms, Gbit/s).
_WITHIN = (10.0, 2.0)
_BYTES = 1e9 / 8


class WanNode(Value):
    """One node: a machine that holds one stage.

    Args:
        name: display name.
        region: a region of the table, from which its links follow.
        speed: passes of a stage in the time in which a node of speed 1 does one.
        in_flight: micro-batches whose activations fit beside the weights; 0 where not even
            one does; None takes the number of stages.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    region: str | None = None
    speed: PositiveFloat = 1.0
    in_flight: NonNegativeInt | None = None


class NodeLink(Value):
    """The link of two nodes, the same in both directions; goes before the table of regions.

    Args:
        between: names of the two nodes.
        latency_s: one small message.
        bandwidth: byte/s.
    """

    between: tuple[str, str]
    latency_s: NonNegativeFloat = Field(le=10.0)
    bandwidth: PositiveFloat


class WanNetwork(Value):
    """Nodes and the links between them; node i is rank i of the pipeline.

    Two nodes are linked if ``links`` says how, or if both are in a region of the table.

    Args:
        nodes: at least one; each holds one stage.
        links: links that are known by themselves.
    """

    name: str = "network"
    nodes: tuple[WanNode, ...] = Field(min_length=1)
    links: tuple[NodeLink, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [node.name for node in self.nodes]
        for name in names:
            require(
                names.count(name) == 1,
                f"network {self.name}: node",
                name,
                expected="a name that no other node has",
                error=MachineError,
            )
        for node in self.nodes:
            require(
                node.region is None or node.region in REGIONS,
                f"network {self.name}: region of node {node.name}",
                node.region,
                expected=f"one of {', '.join(REGIONS)}, or links of its own",
                hint=nearest(node.region or "", REGIONS),
                error=MachineError,
            )
        for link in self.links:
            for end in link.between:
                require(
                    end in names,
                    f"network {self.name}: link between",
                    end,
                    expected="the name of a node",
                    hint=nearest(end, names),
                    error=MachineError,
                )
            require(
                link.between[0] != link.between[1],
                f"network {self.name}: link between",
                link.between,
                expected="two different nodes",
                error=MachineError,
            )
        return self

    @classmethod
    def wan(cls, nodes: int, regions: Sequence[str] = REGIONS) -> WanNetwork:
        """``nodes`` nodes assigned to regions in turn."""
        where = [regions[i % len(regions)] for i in range(nodes)]
        return cls(
            name=f"wan-{nodes}",
            nodes=tuple(
                WanNode(name=f"{region}-{where[:i].count(region)}", region=region)
                for i, region in enumerate(where)
            ),
        )

    @cached_property
    def _links(self) -> dict[tuple[int, int], tuple[float, float]]:
        """(node, node) -> (s, byte/s) of those that are linked."""
        links: dict[tuple[int, int], tuple[float, float]] = {}
        for a, one in enumerate(self.nodes):
            for b, other in enumerate(self.nodes):
                if a == b or one.region is None or other.region is None:
                    continue
                pair = (one.region, other.region)
                delay, rate = (
                    _WITHIN if pair[0] == pair[1] else WAN.get(pair) or WAN[pair[1], pair[0]]
                )
                links[a, b] = (1e-3 * delay, rate * _BYTES)
        numbers = {node.name: i for i, node in enumerate(self.nodes)}
        for link in self.links:
            a, b = (numbers[end] for end in link.between)
            links[a, b] = links[b, a] = (link.latency_s, link.bandwidth)
        return links

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """Latency and bytes over bandwidth; 0 within a node, infinite where there is no link."""
        if source == target:
            return 0.0
        link = self._links.get((source, target))
        return math.inf if link is None else link[0] + nbytes / link[1]

    def connected(self) -> None:
        """Refuse nodes that cannot reach each other.

        Raises:
            PlanError: names those that the first node does not reach.
        """
        reached, todo = {0}, [0]
        while todo:
            here = todo.pop()
            for b in range(len(self.nodes)):
                if b not in reached and (here, b) in self._links:
                    reached.add(b)
                    todo.append(b)
        lost = [node.name for i, node in enumerate(self.nodes) if i not in reached]
        require(
            not lost,
            f"network {self.name}",
            f"{', '.join(lost[:8])} without a way to {self.nodes[0].name}",
            expected="every node reachable from every other",
            hint="give these nodes links or a region, or leave them out",
            error=PlanError,
        )

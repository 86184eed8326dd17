"""A leaf-spine fabric: hosts on leaves, leaves joined by spines, rails and bonded ports.

Every link has a number, so that paths are rows of numbers:

========================  ==============================  =============================
links                     how many                        capacity, B/s
========================  ==============================  =============================
host to leaf, and back    2 x hosts x ports               ``bandwidth / ports``
leaf to spine, and back   2 x leaves x spines             ``uplink_bandwidth`` x health
all uplinks of a leaf     2 x leaves (for spraying)       their sum
nothing                   1 (pads rows)                   without limit
========================  ==============================  =============================

Source: Al-Fares et al., A Scalable, Commodity Data Center Network Architecture, 2008.
"""

from __future__ import annotations

from functools import cached_property
from typing import Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import MachineError, require
from shoal.ir.machine import Fabric

_MOST_HOSTS = 1 << 20


class DegradedLink(Value):
    """A pair of links between a leaf and a spine that is not as good as the others.

    Args:
        leaf: number of the leaf.
        spine: number of the spine.
        share: of the bandwidth that is left; 0 when the links are down.
    """

    leaf: int = Field(ge=0)
    spine: int = Field(ge=0)
    share: float = Field(ge=0.0, le=1.0)


class LeafSpine(Value):
    """Leaves with hosts below and spines above; every leaf is joined with every spine.

    A *host* is a network card. With ``rails`` cards of a node are on as many leaves, one
    on each; with ``ports`` a card is on as many leaves, one port on each.

    Args:
        leaves: leaf switches.
        hosts: ports of a leaf to hosts.
        spines: spine switches, which are the uplinks of a leaf.
        bandwidth: byte/s of a host in one direction, all its ports together.
        uplink_bandwidth: byte/s of a link between leaf and spine; a host's port, if absent.
        rails: network cards of a node, each connected to a different leaf.
        ports: bonded ports of a card, each connected to a different leaf.
        latency_s: of one message between two hosts.
        health: links that are slower than the others, or down.
    """

    leaves: PositiveInt = 16
    hosts: PositiveInt = 8
    spines: PositiveInt = 8
    bandwidth: PositiveFloat = Field(default=50e9, le=1e15)
    uplink_bandwidth: PositiveFloat | None = Field(default=None, le=1e15)
    rails: PositiveInt = 1
    ports: PositiveInt = 1
    latency_s: NonNegativeFloat = Field(default=5e-6, le=10.0)
    health: tuple[DegradedLink, ...] = ()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        group = self.rails * self.ports
        require(
            self.leaves % group == 0,
            "fabric.leaves",
            self.leaves,
            expected=f"a multiple of rails x ports = {group}",
            hint="a node's cards and ports are on leaves of their own",
            error=MachineError,
        )
        require(
            self.num_hosts <= _MOST_HOSTS,
            "fabric.hosts",
            self.num_hosts,
            expected=f"at most {_MOST_HOSTS} in all",
            error=MachineError,
        )
        seen = set()
        for pair in self.health:
            where = f"fabric.health of leaf {pair.leaf} and spine {pair.spine}"
            require(
                pair.leaf < self.leaves and pair.spine < self.spines,
                where,
                (pair.leaf, pair.spine),
                expected=f"leaf below {self.leaves} and spine below {self.spines}",
                error=MachineError,
            )
            require(
                (pair.leaf, pair.spine) not in seen,
                where,
                "twice",
                expected="one entry a pair",
                error=MachineError,
            )
            seen.add((pair.leaf, pair.spine))
        for leaf in range(self.leaves):
            require(
                bool(self.uplinks[leaf].any()),
                f"fabric.leaf {leaf}",
                "no uplink",
                expected="at least one spine that it reaches",
                hint="its hosts are cut off; repair a link or leave the leaf out",
                error=MachineError,
            )
        return self

    @classmethod
    def of(cls, fabric: Fabric) -> Self:
        """One rail of a machine's fabric; its hosts are nodes, and rails do not meet."""
        return cls(
            leaves=fabric.leaves,
            hosts=fabric.hosts_per_leaf,
            # Several links between a leaf and a spine are paths like those over other spines.
            spines=max(1, fabric.spines * fabric.uplinks),
            bandwidth=fabric.port_bandwidth,
            uplink_bandwidth=fabric.uplink,
            # Up, over a spine and down again.
            latency_s=3 * fabric.hop_s,
        )

    @property
    def num_hosts(self) -> int:
        """Hosts (network cards) of the whole fabric."""
        return self.leaves // self.ports * self.hosts

    @property
    def port_bandwidth(self) -> float:
        """Byte/s of one port of a host."""
        return self.bandwidth / self.ports

    @cached_property
    def uplinks(self) -> np.ndarray:
        """Byte/s from each leaf to each spine, and back, [L, S]."""
        full = self.uplink_bandwidth or self.port_bandwidth
        out = np.full((self.leaves, self.spines), full)
        for pair in self.health:
            out[pair.leaf, pair.spine] *= pair.share
        return out

    @property
    def uniform(self) -> bool:
        """Every link between leaf and spine is as good as the others."""
        return bool((self.uplinks == self.uplinks[0, 0]).all())

    def leaf(self, host: np.ndarray, port: np.ndarray | int = 0) -> np.ndarray:
        """Leaf of a port of a host, any shape."""
        node, rail = np.divmod(host, self.rails)
        group = node // self.hosts
        return np.asarray((group * self.rails + rail) * self.ports + port)

    # ------------------------------------------------------------------ numbers of links

    @property
    def _starts(self) -> tuple[int, int, int, int, int, int, int]:
        ends, middle = self.num_hosts * self.ports, self.leaves * self.spines
        down = ends
        up = 2 * ends
        return (
            0,
            down,
            up,
            up + middle,
            up + 2 * middle,
            up + 2 * middle + self.leaves,
            up + 2 * middle + 2 * self.leaves,
        )

    def host_up(self, host: np.ndarray, port: np.ndarray | int = 0) -> np.ndarray:
        """Numbers of the links from hosts to leaves."""
        return np.asarray(self._starts[0] + host * self.ports + port)

    def host_down(self, host: np.ndarray, port: np.ndarray | int = 0) -> np.ndarray:
        """Numbers of the links from leaves to hosts."""
        return np.asarray(self._starts[1] + host * self.ports + port)

    def up(self, leaf: np.ndarray, spine: np.ndarray) -> np.ndarray:
        """Numbers of the links from leaves to spines."""
        return np.asarray(self._starts[2] + leaf * self.spines + spine)

    def down(self, leaf: np.ndarray, spine: np.ndarray) -> np.ndarray:
        """Numbers of the links from spines to leaves."""
        return np.asarray(self._starts[3] + leaf * self.spines + spine)

    def all_up(self, leaf: np.ndarray) -> np.ndarray:
        """Numbers that stand for all uplinks of a leaf together."""
        return np.asarray(self._starts[4] + leaf)

    def all_down(self, leaf: np.ndarray) -> np.ndarray:
        """Numbers that stand for all downlinks of a leaf together."""
        return np.asarray(self._starts[5] + leaf)

    @property
    def nothing(self) -> int:
        """Number of the link that limits nothing."""
        return self._starts[6]

    @cached_property
    def capacity(self) -> np.ndarray:
        """Byte/s of every link by its number."""
        ends = np.full(2 * self.num_hosts * self.ports, self.port_bandwidth)
        middle = self.uplinks.ravel()
        sums = self.uplinks.sum(1)
        return np.concatenate([ends, middle, middle, sums, sums, [np.inf]])

"""Clusters with networks of their own, and what joins them.

Source: Yang et al., Holmes: Towards Distributed Training Across Clusters with Heterogeneous NIC
Environment, 2023, section 2.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Value
from shoal.core.errors import MachineError, nearest, require
from shoal.ir import Machine
from shoal.ir.machine import MAX_BANDWIDTH, MIN_BANDWIDTH
from shoal.machine.composition import LATENCY_S
from shoal.machine.described import load

Nic = Literal["infiniband", "roce", "ethernet"]
_USUAL_LATENCY = {
    "infiniband": LATENCY_S["IB"],
    "roce": LATENCY_S["ROCE"],
    "ethernet": LATENCY_S["ETH"],
}


class Port(Value):
    """A network card of a node.

    Args:
        bandwidth: byte/s of the node in each direction; its devices share it.
        latency_s: one small message; what is usual for the network if not given.
    """

    bandwidth: PositiveFloat = Field(ge=MIN_BANDWIDTH, le=MAX_BANDWIDTH)
    latency_s: NonNegativeFloat | None = Field(default=None, le=10.0)


class Cluster(Value):
    """Equal nodes behind one kind of network.

    Args:
        nic: what joins them.
        bandwidth: byte/s of a node in each direction; its devices share it.
        latency_s: one small message; what is usual for ``nic`` if not given.
        device: a described device, where it is not that of the whole.
        flops: FLOP/s that a device was measured to reach in training; by its description if not
            given. Where one cluster says it, all do.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    nodes: PositiveInt = Field(le=100_000)
    nic: Nic
    bandwidth: PositiveFloat = Field(ge=MIN_BANDWIDTH, le=MAX_BANDWIDTH)
    latency_s: NonNegativeFloat | None = Field(default=None, le=10.0)
    device: str | None = None
    flops: PositiveFloat | None = None


class InterClusterLink(Value):
    """What nodes of two clusters reach each other over, where it is not the common network.

    Args:
        between: names of the two clusters.
        nic: what it is.
        bandwidth: byte/s of a node in each direction; its devices share it.
        latency_s: one small message; what is usual for ``nic`` if not given.
    """

    between: tuple[str, str]
    nic: Nic = "ethernet"
    bandwidth: PositiveFloat = Field(ge=MIN_BANDWIDTH, le=MAX_BANDWIDTH)
    latency_s: NonNegativeFloat | None = Field(default=None, le=10.0)


class DeviceLocation(NamedTuple):
    """Where a device is.

    Args:
        cluster: number of its cluster.
        node: number of its node, of all clusters.
        device: number in its node.
    """

    cluster: int
    node: int
    device: int


class DevicePath(NamedTuple):
    """How two devices reach each other.

    Args:
        nic: ``device`` inside a node, else the kind of network.
        bandwidth: byte/s of a node in each direction, or of a device inside one.
        latency_s: one small message.
    """

    nic: str
    bandwidth: float
    latency_s: float


class Clusters(Value):
    """Some clusters whose devices train one model together; devices are numbered in this order.

    Two nodes of a cluster talk over its own network. Nodes of different clusters talk over their
    joint, where there is one, else over the common network, which all nodes have a port to: cards
    of different kinds do not understand each other, nor do equal ones that no switch joins.

    Args:
        devices_per_node: of every node.
        clusters: at least one, of any sizes.
        common: the network that all nodes have a port to, usually Ethernet.
        joints: networks of pairs of clusters.
        described: what ``device`` is, where no name says it.
    """

    name: str = "clusters"
    device: str
    devices_per_node: PositiveInt = Field(default=8, le=1024)
    clusters: tuple[Cluster, ...] = Field(min_length=1)
    common: Port | None = None
    joints: tuple[InterClusterLink, ...] = ()
    described: Machine | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [one.name for one in self.clusters]
        where = f"clusters {self.name}"
        for name in names:
            require(
                names.count(name) == 1,
                f"{where}: cluster",
                name,
                expected="a name that no other cluster has",
                error=MachineError,
            )
        for joint in self.joints:
            for end in joint.between:
                require(
                    end in names,
                    f"{where}: joint between",
                    end,
                    expected="the name of a cluster",
                    hint=nearest(end, names),
                    error=MachineError,
                )
            require(
                joint.between[0] != joint.between[1],
                f"{where}: joint between",
                joint.between,
                expected="two different clusters",
                error=MachineError,
            )
        stated = [one.name for one in self.clusters if one.flops is None]
        require(
            len(stated) in (0, len(names)),
            f"{where}: flops of",
            ", ".join(stated),
            expected="measured FLOP/s of all clusters, or of none",
            error=MachineError,
        )
        for a, one in enumerate(names):
            for b, other in enumerate(names[:a]):
                if (b, a) not in self._joined and self.common is None:
                    raise MachineError(
                        f"{where}: no link between {other} and {one}: give common, the network "
                        "that all nodes have a port to, or a joint between the two"
                    )
        return self

    @classmethod
    def of(cls, machine: Machine) -> Self:
        """The sites of a described machine as clusters; one, where it has one site.

        Raises:
            MachineError: its nodes are joined by nothing.
        """
        inside, wide = machine.link("node") or machine.link("device"), machine.link("wan")
        if inside is None:
            raise MachineError(
                f"machine {machine.name}: no link of scope node or device; add one, or give a file "
                "of clusters"
            )
        each = machine.devices_per_node
        return cls(
            name=machine.name,
            device=machine.name,
            devices_per_node=each,
            clusters=tuple(
                Cluster(
                    name=f"site-{site}",
                    nodes=machine.nodes // machine.sites,
                    nic="infiniband",
                    bandwidth=min(inside.bandwidth * each, MAX_BANDWIDTH),
                    latency_s=inside.latency_s,
                )
                for site in range(machine.sites)
            ),
            common=None
            if wide is None
            else Port(bandwidth=wide.bandwidth * each, latency_s=wide.latency_s),
            described=machine,
        )

    @cached_property
    def _joined(self) -> dict[tuple[int, int], InterClusterLink]:
        number = {one.name: at for at, one in enumerate(self.clusters)}
        result = {}
        for joint in self.joints:
            a, b = sorted(number[end] for end in joint.between)
            result[a, b] = joint
        return result

    @cached_property
    def places(self) -> tuple[DeviceLocation, ...]:
        """Of every device, by number."""
        places, node = [], 0
        for at, cluster in enumerate(self.clusters):
            for _ in range(cluster.nodes):
                places += [
                    DeviceLocation(at, node, device) for device in range(self.devices_per_node)
                ]
                node += 1
        return tuple(places)

    @property
    def num_devices(self) -> int:
        """All devices of all clusters."""
        return len(self.places)

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        """One node of each cluster, as its device's description has it.

        Raises:
            MachineError: a device without a description, or nodes whose devices nothing joins.
        """
        machines = []
        for cluster in self.clusters:
            text = cluster.device or self.device
            if self.described is not None and cluster.device is None:
                machines.append(self.described)
                continue
            one = load(text)
            if one.devices_per_node != self.devices_per_node:
                one = load(f"1x{self.devices_per_node}x{text}")
            machines.append(one)
        return tuple(machines)

    @cached_property
    def speeds(self) -> tuple[float, ...]:
        """FLOP/s of a device of each cluster."""
        speeds = []
        for cluster, machine in zip(self.clusters, self.machines, strict=True):
            rates = machine.device.matmul_flops or machine.device.peak_flops
            speeds.append(cluster.flops or rates.get("bf16") or max(rates.values()))
        return tuple(speeds)

    def way(self, a: int, b: int) -> DevicePath:
        """How devices ``a`` and ``b`` reach each other."""
        one, other = self.places[a], self.places[b]
        if one.node == other.node:
            link = self.machines[one.cluster].link("device")
            if link is None:
                link = self.machines[one.cluster].link("loopback")
            return DevicePath("device", math.inf if link is None else link.bandwidth,
                       0.0 if link is None else link.latency_s)  # fmt: skip
        if one.cluster == other.cluster:
            cluster = self.clusters[one.cluster]
            return _way(cluster.nic, cluster.bandwidth, cluster.latency_s)
        low, high = sorted((one.cluster, other.cluster))
        joint = self._joined.get((low, high))
        if joint is not None:
            return _way(joint.nic, joint.bandwidth, joint.latency_s)
        assert self.common is not None  # a file without it was refused
        return _way("ethernet", self.common.bandwidth, self.common.latency_s)


def _way(nic: str, bandwidth: float, latency_s: float | None) -> DevicePath:
    return DevicePath(nic, bandwidth, _USUAL_LATENCY[nic] if latency_s is None else latency_s)

"""Clusters made of described devices: nodes, networks, sites and switches."""

from __future__ import annotations

from typing import Any

from shoal.core.errors import MachineError, require
from shoal.ir.machine import Link, Machine

# One small message between nodes: RDMA verbs, the same over routed Ethernet, and TCP through
# the kernel. One way over a wide-area line of some thousand kilometres.
LATENCY_S = {"IB": 5e-6, "ROCE": 8e-6, "ETH": 3e-5}
WAN_LATENCY_S = 0.02


def compose(
    one: Machine,
    count: int | None = None,
    *,
    nodes: int | None = None,
    network: str | None = None,
    gbit: float | None = None,
    name: str = "",
) -> Machine:
    """Equal nodes of a described device or node.

    Args:
        one: a machine of one device, whose links say what joins several; or of one node of
            several devices.
        count: devices of all nodes, which are filled with ``node_size`` each; with ``nodes``,
            devices of each. Of a description of a whole node: the number of nodes.
        nodes: number of nodes.
        network: IB, ROCE or ETH, to replace the link between nodes.
        gbit: Gbit/s of that network for each device.
        name: name of the result.

    Raises:
        MachineError: devices that do not fill the nodes, or that nothing joins.
    """
    where = name or str(count)
    if one.devices_per_node > 1:
        require(
            nodes is None,
            "machine",
            where,
            expected=f"a number of nodes, such as 4x{one.name}, which has "
            f"{one.devices_per_node} devices",
            error=MachineError,
        )
        nodes, each = one.nodes if count is None else count, one.devices_per_node
    elif nodes is None:
        size, total = one.node_size, 1 if count is None else count
        require(
            total >= 1 and (total <= size or total % size == 0),
            "machine",
            where,
            expected=f"1 to {size} devices, or a multiple of {size} (nodes of {size})",
            hint=f"name nodes and devices, such as 2x{max(1, total // 2)}x{one.name}",
            error=MachineError,
        )
        nodes, each = max(1, total // size), min(total, size)
    else:
        each = 1 if count is None else count
    require(
        nodes >= 1 and each >= 1,
        "machine",
        where,
        expected="1 node or more, of 1 device or more",
        error=MachineError,
    )
    changes: dict[str, Any] = {
        "name": name or one.name,
        "nodes": nodes,
        "devices_per_node": each,
        # A part of a node answers for its part of the rest.
        "overhead_watts": one.overhead_watts * min(1.0, each / one.node_size),
    }
    if network is not None and gbit is not None:
        require(
            network in LATENCY_S,
            "machine.network",
            network,
            expected=", ".join(LATENCY_S),
            error=MachineError,
        )
        require(gbit > 0, "machine", where, expected="a network above 0 Gbit/s", error=MachineError)
        link = Link(scope="node", bandwidth=gbit * 1e9 / 8, latency_s=LATENCY_S[network])
        changes["links"] = _replaced(one, link)
        changes["fabric"] = None
        changes["sources"] = {
            **one.sources,
            "links.node": f"the shorthand {name}: {gbit:g} Gbit/s for each device",
            "links.node.latency_s": "assumed: a small message of the collective library",
        }
    return _changed(one, changes)


def join(one: Machine, sites: int, gbit: float, *, name: str = "") -> Machine:
    """Equal sites, each like ``one``, joined by a wide-area network.

    Args:
        one: what a site has.
        sites: number of sites.
        gbit: Gbit/s of a site's way to the others; its devices share it evenly.
        name: name of the result.

    Raises:
        MachineError: numbers that cannot be.
    """
    require(sites >= 2, "machine.sites", sites, expected="2 or more", error=MachineError)
    require(gbit > 0, "machine.wan", gbit, expected="above 0 Gbit/s", error=MachineError)
    share = gbit * 1e9 / 8 / one.num_devices
    link = Link(scope="wan", bandwidth=share, latency_s=WAN_LATENCY_S)
    sources = {
        **one.sources,
        "links.wan": f"the shorthand {name}: {gbit:g} Gbit/s a site, an equal share a device",
        "links.wan.latency_s": "assumed: one way over some thousand kilometres of fibre",
    }
    changes = {
        "name": name or one.name,
        "nodes": one.nodes * sites,
        "sites": sites,
        "links": _replaced(one, link),
        "sources": sources,
    }
    return _changed(one, changes)


def _replaced(one: Machine, link: Link) -> list[dict[str, Any]]:
    kept = [other for other in one.links if other.scope != link.scope]
    return [other.model_dump() for other in (*kept, link)]


def _changed(one: Machine, changes: dict[str, Any]) -> Machine:
    """A copy with changes, checked again."""
    return Machine.model_validate({**one.model_dump(), **changes})

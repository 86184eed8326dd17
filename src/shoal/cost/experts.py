"""What experts on a grid of their own hold and send.

A rank's tokens go to the ranks of their experts and back, forward and backward: four exchanges a
layer and micro-batch. Routing is taken to be even; what a real routing sends, the dispatcher
counts.

Source: Liu et al., MoE Parallel Folding, 2025; Lepikhin et al., GShard, 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import expert_parameters, mixture_layers, parameters
from shoal.cost.ops import stage_share
from shoal.cost.rates import ranks_per_host
from shoal.ir import Layout, Machine, ModelShape, Parallel, TrainJob

__all__ = [
    "Exchange",
    "dispatch",
    "exchange",
    "exchange_s",
    "held_parameters",
    "ranks_per_node",
    "routed",
]

# Of a layer and micro-batch: rows go there and back, and so do their gradients.
_EXCHANGES = 4


def held_parameters(shape: ModelShape, split: Parallel) -> tuple[float, float]:
    """Parameters of the fullest stage that one rank holds: of experts' grid, and all others."""
    share = stage_share(shape, split.pp)
    if not split.folded:
        return 0.0, parameters(shape) * share / split.tp
    experts = expert_parameters(shape)
    rest = (parameters(shape) - experts) * share / split.tp
    return experts * share / (split.ep * split.etp), rest


class Exchange(NamedTuple):
    """Bytes that the busiest rank sends in one direction of one layer and micro-batch.

    Args:
        near: to ranks of its own node.
        far: to ranks of other nodes.
        peers: ranks that it sends to.
    """

    near: float
    far: float
    peers: int


def exchange(
    groups: Sequence[Sequence[int]], row_bytes: float, rows: float, per_node: int | None
) -> Exchange:
    """What ranks send that spread their rows evenly over their group.

    Args:
        groups: of ranks, each a partition's.
        row_bytes: of one row.
        rows: of a rank, before it is known where they go.
        per_node: ranks of a node; None for one node.
    """
    most = Exchange(0.0, 0.0, 0)
    for group in groups:
        size = len(group)
        for rank in group:
            node = None if per_node is None else rank // per_node
            far = sum(per_node is not None and other // per_node != node for other in group)
            each = rows * row_bytes / size
            found = Exchange(each * (size - 1 - far), each * far, size - 1)
            most = max(most, found, key=lambda one: (one.far, one.near))
    return most


def routed(
    groups: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    row_bytes: float,
    per_node: int | None,
) -> tuple[float, float]:
    """Bytes (near, far) that all ranks together send to experts of a known routing, one way.

    Args:
        groups: of ranks that share out the experts, in the order of the experts.
        counts: rank -> expert -> rows.
        row_bytes: of one row.
        per_node: ranks of a node; None for one node.

    Raises:
        PlanError: a group that the experts cannot be shared by.
    """
    near = far = 0.0
    for group in groups:
        for rank in group:
            own = counts[rank]
            require(
                len(own) % len(group) == 0,
                "ep",
                len(group),
                expected=f"a divisor of {len(own)} experts",
                error=PlanError,
            )
            each = len(own) // len(group)
            for place, other in enumerate(group):
                if other == rank:
                    continue
                sent = row_bytes * sum(own[place * each : (place + 1) * each])
                if per_node is None or other // per_node == rank // per_node:
                    near += sent
                else:
                    far += sent
    return near, far


def exchange_s(sent: Exchange, machine: Machine) -> float:
    """Seconds of an exchange: what goes far and what stays near travel at the same time."""
    near, far = machine.link("device") or machine.link("loopback"), machine.link("node")
    seconds = 0.0
    if near is not None and sent.near:
        seconds = sent.near / near.bandwidth + near.latency_s * sent.peers
    if sent.far:
        link = far or near
        if link is not None:
            seconds = max(seconds, sent.far / link.bandwidth + link.latency_s * sent.peers)
    return seconds


def ranks_per_node(machine: Machine, split: Parallel) -> int | None:
    """Ranks of a node; None where all are on one."""
    each = ranks_per_host(machine, split)
    return each if each < split.world else None


def dispatch(
    job: TrainJob, shape: ModelShape, machine: Machine, microbatch: int, wire: dict[str, float]
) -> float:
    """Seconds in which the experts' rows travel, of one micro-batch and the fullest stage.

    Args:
        job: with experts on a grid of their own, or not.
        shape: the model.
        machine: whose links they travel over.
        microbatch: sequences.
        wire: bytes that a rank sends in a step, by scope; added to.
    """
    split = job.parallel
    if not split.folded:
        return 0.0
    grid: Layout = split.experts()
    width = shape.hidden * (2.0 if job.precision == "bf16" else 4.0)
    rows = microbatch * job.seq_len / split.cp / split.tp * shape.top_k
    per_node = ranks_per_node(machine, split)
    layers = mixture_layers(shape) * stage_share(shape, split.pp)
    passes = max(1, job.global_batch // split.dp // microbatch)
    times = layers * (_EXCHANGES + 2 * (job.recompute != "none"))
    seconds = 0.0
    # Over etp every rank's rows go to all the others, not a share to each.
    for axis, size in (("ep", split.ep), ("etp", split.etp)):
        if size == 1:
            continue
        every = rows * (size if axis == "etp" else 1)
        sent = exchange(grid.groups(axis)[: max(1, per_node or 1)], width, every, per_node)
        seconds += times * exchange_s(sent, machine)
        for scope, count in (("device", sent.near), ("node", sent.far)):
            if count:
                link = machine.link(scope) or machine.link("loopback")
                name = link.scope if link is not None else scope
                wire[name] = wire.get(name, 0.0) + times * passes * count
    return seconds

"""What experts on a grid of their own hold and send.

A rank's tokens go to the ranks of their experts and back, forward and backward: four exchanges a
layer and micro-batch. Routing is taken to be even; what a real routing sends, the dispatcher
counts.

Source: Liu et al., MoE Parallel Folding, 2025; Lepikhin et al., GShard, 2020.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

from shoal.cost.arithmetic import expert_parameters, mixture_layers, parameters
from shoal.cost.gpu.device import CALIBRATED
from shoal.cost.gpu.spec import SHOAL, EngineSpec, groups_of
from shoal.cost.price.expert_hops import ExpertExchange, hops, once_a_node
from shoal.cost.price.ops import stage_share
from shoal.cost.price.rates import ranks_per_host
from shoal.cost.price.shares import passes_of
from shoal.ir import Layout, Machine, ModelShape, Parallel, TrainJob

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


def exchange_s(sent: ExpertExchange, machine: Machine) -> float:
    """Seconds of an exchange, in which messages between and within nodes overlap."""
    near, far = machine.link("device") or machine.link("loopback"), machine.link("node")
    reached = CALIBRATED.wire if machine.device.kind == "gpu" else 1.0
    seconds = 0.0
    if near is not None and sent.near:
        seconds = sent.near / (reached * near.bandwidth) + near.latency_s * sent.peers
    if sent.far:
        link = far or near
        if link is not None:
            rate = reached * link.bandwidth
            seconds = max(seconds, sent.far / rate + link.latency_s * sent.peers)
    return seconds


def ranks_per_node(machine: Machine, split: Parallel) -> int | None:
    """Ranks of a node; None where all are on one."""
    each = ranks_per_host(machine, split)
    return each if each < split.world else None


@functools.lru_cache(maxsize=4096)
def first_groups(grid: Layout, axis: str, most: int) -> tuple[tuple[int, ...], ...]:
    """The first groups of ranks along an axis, of which no more than ``most`` are wanted."""
    (outer, stages), *inner = grid.axes
    each = math.prod(size for name, size in inner if name != axis)
    few = Layout(((outer, min(stages, -(-most // each))), *inner))
    return tuple(few.groups(axis)[:most])


def dispatches(machine: Machine, split: Parallel) -> tuple[str, ...]:
    """Ways of tokens to experts that are worth trying: by node where groups lie on several."""
    near = ranks_per_node(machine, split)
    if near is None or split.ep == 1:
        return ("flat",)
    group = first_groups(split.experts(), "ep", 1)[0]
    nodes = Counter(rank // near for rank in group)
    evenly = len(set(nodes.values())) == 1 and 1 < len(nodes) < len(group)
    # Over a node's first rank (1dh) its one port carries what 2dh has all ports carry.
    return ("flat", "2dh") if evenly else ("flat",)


def spread(machine: Machine, split: Parallel) -> bool:
    """Ranks that share out experts lie on several nodes."""
    near = ranks_per_node(machine, split)
    if near is None or split.ep == 1:
        return False
    return len({rank // near for rank in first_groups(split.experts(), "ep", 1)[0]}) > 1


def dispatch(
    job: TrainJob,
    shape: ModelShape,
    machine: Machine,
    microbatch: int,
    wire: dict[str, float],
    engine: EngineSpec = SHOAL,
) -> float:
    """Seconds of the token exchange of one micro-batch on the stage with the most experts.

    Args:
        job: with experts on a grid of their own, or not.
        shape: the model.
        machine: machine with the links.
        microbatch: sequences.
        wire: bytes that a rank sends in a step, by scope; added to.
        engine: how tokens cross to other nodes.
    """
    split = job.parallel
    if not split.folded:
        return 0.0
    grid: Layout = split.experts()
    width = shape.hidden * (2.0 if job.precision == "bf16" else 4.0)
    tokens = microbatch * job.seq_len / split.cp / split.tp
    rows = tokens * shape.top_k
    per_node = ranks_per_node(machine, split)
    layers = mixture_layers(shape) * stage_share(shape, split.pp)
    passes = passes_of(job, microbatch)
    times = layers * (_EXCHANGES + 2 * (job.sends_again))
    seconds = 0.0
    # Over etp every rank's rows go to all the others, not a share to each.
    for axis, size in (("ep", split.ep), ("etp", split.etp)):
        if size == 1:
            continue
        every = rows * (size if axis == "etp" else 1)
        groups = first_groups(grid, axis, max(1, per_node or 1))
        way = split.expert_dispatch if axis == "ep" else "flat"
        sends = hops(groups, width, every, per_node, way)
        if axis == "ep" and engine.dedup and way == "flat":
            sends = [once_a_node(groups, width, tokens, shape.top_k, groups_of(shape), per_node)]
        for sent in sends:
            seconds += times * exchange_s(sent, machine)
            for scope, count in (("device", sent.near), ("node", sent.far)):
                if count:
                    link = machine.link(scope) or machine.link("loopback")
                    name = link.scope if link is not None else scope
                    wire[name] = wire.get(name, 0.0) + times * passes * count
    return seconds

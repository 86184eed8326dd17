"""What copies and moves of experts take of a training step: bytes on links, seconds, room.

Routing is not known before a run, so nothing is predicted of what copies save, and every slot is
taken to be used. Copies travel while attention computes, their gradients and those that are
gathered again while it goes backward; what takes longer is waited for. Ranks on CPUs send with the
cores that compute, so there nothing is hidden.
"""

from __future__ import annotations

import functools

from shoal.core.parts import table
from shoal.cost.arithmetic import expert_parameters, mixture_layers, parameters
from shoal.cost.price.expert_hops import exchange
from shoal.cost.price.experts import (
    exchange_s,
    first_groups,
    held_parameters,
    ranks_per_node,
)
from shoal.cost.price.ops import stage_share
from shoal.cost.price.rates import RankRates
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.cost.training.wire import add_wire
from shoal.ir import Estimate, Interval, Machine, Work
from shoal.plan.placement.protocols import Again, LinkBudget

# Of a forward pass, what a backward pass computes.
_BACKWARD = 2.0


def attention_s(work: Work, machine: Machine) -> float:
    """Seconds of one layer's attention of one micro-batch, forward, with its projections."""
    job, shape, split = work.job, work.shape, work.job.parallel
    tokens = microbatch_of(job) * job.seq_len / split.cp / split.tp
    query, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    # A token at place t sees t + 1 keys.
    each = 4.0 * shape.hidden * (query + keys) + 4.0 * query * job.seq_len / 2
    return (
        tokens * each / RankRates(machine, split).matmul_curve(job.precision)(float(shape.hidden))
    )


def budget(work: Work, machine: Machine) -> LinkBudget | None:
    """Of links, while attention computes; None where nothing is hidden behind it."""
    if machine.device.kind == "cpu":
        return None
    size = _travelling(work)
    near, far = machine.link("device") or machine.link("loopback"), machine.link("node")
    far = far or near
    return LinkBudget(
        attention_s(work, machine),
        0.0 if near is None else size / near.bandwidth,
        0.0 if far is None else size / far.bandwidth,
    )


def hidden_again(work: Work, machine: Machine, slots: int) -> bool:
    """Gathering again costs no time: it and gradients fit where attention goes backward."""
    if machine.device.kind == "cpu" or not slots:
        return False
    there, _ = _spread(work, machine, slots * _travelling(work))
    back, _ = _spread(work, machine, slots * _expert_bytes(work))
    return there + back <= _BACKWARD * attention_s(work, machine)


def copies(work: Work, machine: Machine, slots: int, again: Again = "off") -> Estimate:
    """Of ``slots`` copies that every rank gets of every layer's experts."""
    job, shape = work.job, work.shape
    split = job.parallel
    if split.ep == 1 or not shape.num_experts or not slots:
        return nothing()
    layers = mixture_layers(shape) * stage_share(shape, split.pp)
    passes = passes_of(job)
    computed_again = job.sends_again
    gathered = 0.0  # layers that gather again for themselves
    if not computed_again and (
        again == "on" or (again == "auto" and hidden_again(work, machine, slots))
    ):
        gathered = layers if again == "on" else layers - 1
    there, wire = _spread(work, machine, slots * _travelling(work))
    back, gradients = _spread(work, machine, slots * _expert_bytes(work))
    hidden = 0.0 if machine.device.kind == "cpu" else attention_s(work, machine)
    forward = max(0.0, there - hidden) * (2 if computed_again else 1)
    backward = max(0.0, back + there * gathered / layers - _BACKWARD * hidden)
    seconds = layers * passes * (forward + backward)
    times = (2 if computed_again else 1) * layers + gathered
    # Those that are gathered again are there for one layer at a time.
    kept = 1.0 if computed_again else max(1.0, layers - gathered)
    return Estimate(
        step_s=Interval.around(seconds, 0.3),
        terms_s={"collective": seconds},
        wire_bytes={
            scope: passes * (times * sent + layers * gradients[scope])
            for scope, sent in wire.items()
        },
        memory_bytes={"activations": slots * _travelling(work) * kept},
    )


def moves(work: Work, machine: Machine, every: int) -> Estimate:
    """Of experts that get other owners after ``every`` steps, as a share of each step.

    Assumes random new owners: of a rank's experts, one in ``ep`` stays.
    """
    job, shape = work.job, work.shape
    split = job.parallel
    if split.ep == 1 or not shape.num_experts or not every:
        return nothing()
    updated = table("optimizer").build(job.optimizer).estimate(work, machine)
    kept = 4.0 + updated.memory_bytes.get("optimizer", 0.0) / parameters(shape)
    experts, _ = held_parameters(shape, split)
    divides = table("shard").build(job.shard).divides
    # The rank that updates a weight moves it; the others get it as they do after every update.
    size = kept * experts / (split.edp if "optimizer" in divides else 1)
    once, wire = _spread(work, machine, size * (split.ep - 1) / split.ep)
    return Estimate(
        step_s=Interval.around(once / every, 0.3),
        terms_s={"collective": once / every},
        wire_bytes={scope: sent / every for scope, sent in wire.items()},
    )


def _expert_bytes(work: Work) -> float:
    """Of one expert of one layer, in fp32, as its gradients travel."""
    shape = work.shape
    return 4.0 * expert_parameters(shape) / (mixture_layers(shape) * shape.num_experts)


def _travelling(work: Work) -> float:
    """Of one expert of one layer, as a copy of it travels."""
    return _expert_bytes(work) / (2 if work.job.precision == "bf16" else 1)


def _spread(work: Work, machine: Machine, size: float) -> tuple[float, dict[str, float]]:
    """Seconds and bytes by scope of ``size`` bytes that a rank sends, as much to each of ep."""
    split = work.job.parallel
    per_node = ranks_per_node(machine, split)
    groups = first_groups(split.experts(), "ep", max(1, per_node or 1))
    sent = exchange(groups, 1.0, size * split.ep / (split.ep - 1), per_node)
    wire: dict[str, float] = {}
    for scope, count in (("device", sent.near), ("node", sent.far)):
        link = machine.link(scope) or machine.link("loopback")
        if count and link is not None:
            wire[link.scope] = wire.get(link.scope, 0.0) + count
    return exchange_s(sent, machine), wire


@functools.cache
def nothing() -> Estimate:
    """Of what is not done."""
    return Estimate(step_s=Interval.around(0.0, 0.3), terms_s={"collective": 0.0})


def both(one: Estimate, other: Estimate) -> Estimate:
    """Two costs behind each other; the memory of the first."""
    seconds = one.terms_s["collective"] + other.terms_s["collective"]
    wire = dict(one.wire_bytes)
    add_wire(other, wire)
    return Estimate(
        step_s=Interval.around(seconds, 0.3),
        terms_s={"collective": seconds},
        wire_bytes=wire,
        memory_bytes=one.memory_bytes,
    )

"""What copies of experts take of a training step: bytes on links, seconds, room.

Routing is not known before a run, so nothing is foretold of what copies save: every slot is taken
to be used, and copies to be waited for.
"""

from __future__ import annotations

from shoal.core.parts import table
from shoal.cost.arithmetic import expert_parameters, mixture_layers, parameters
from shoal.cost.experts import Exchange, exchange, exchange_s, held_parameters, ranks_per_node
from shoal.cost.ops import stage_share
from shoal.cost.rates import data_link
from shoal.cost.training import microbatch_of
from shoal.cost.training_wire import add_wire
from shoal.ir import Estimate, Interval, Machine, Work

__all__ = ["both", "copies", "moves"]


def copies(work: Work, machine: Machine, slots: int) -> Estimate:
    """Of ``slots`` copies that every rank gets of every layer's experts."""
    job, shape = work.job, work.shape
    split = job.parallel
    if split.ep == 1 or not shape.num_experts or not slots:
        return nothing()
    every = mixture_layers(shape)
    size = 4.0 * slots * expert_parameters(shape) / (every * shape.num_experts)
    layers = every * stage_share(shape, split.pp)
    passes = max(1, job.global_batch // split.dp // microbatch_of(job))
    full = job.recompute == "full"
    # There, back as gradients, and there again where the forward pass is computed again.
    travels = (3 if full else 2) * layers * passes
    seconds = travels * exchange_s(Exchange(near=size, far=0.0, peers=slots), machine)
    link = data_link(machine, split)
    # Autograd keeps them until the backward pass.
    held = size * (1 if full else layers)
    return Estimate(
        step_s=Interval.around(seconds, 0.3),
        terms_s={"collective": seconds},
        wire_bytes={link.scope: size * travels} if link is not None else {},
        memory_bytes={"activations": held},
    )


def moves(work: Work, machine: Machine, every: int) -> Estimate:
    """Of experts that get other owners after ``every`` steps, as a share of each step.

    As if owners were drawn anew: of a rank's experts, one in ``ep`` stays.
    """
    job, shape = work.job, work.shape
    split = job.parallel
    if split.ep == 1 or not shape.num_experts or not every:
        return nothing()
    updated = table("optimizer").build(job.optimizer).estimate(work, machine)
    kept = 4.0 + updated.memory_bytes.get("optimizer", 0.0) / parameters(shape)
    experts, _ = held_parameters(shape, split)
    divides = table("shard").build(job.shard).divides
    # Whoever updates a weight moves it; the others get it as they do after every update.
    size = kept * experts / (split.edp if "optimizer" in divides else 1)
    per_node = ranks_per_node(machine, split)
    groups = split.experts().groups("ep")[: max(1, per_node or 1)]
    sent = exchange(groups, 1.0, size, per_node)
    seconds = exchange_s(sent, machine) / every
    wire: dict[str, float] = {}
    for scope, count in (("device", sent.near), ("node", sent.far)):
        link = machine.link(scope) or machine.link("loopback")
        if count and link is not None:
            wire[link.scope] = wire.get(link.scope, 0.0) + count / every
    return Estimate(
        step_s=Interval.around(seconds, 0.3), terms_s={"collective": seconds}, wire_bytes=wire
    )


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

"""What copies of experts take of a training step: bytes on links, seconds, room.

Routing is not known before a run, so nothing is foretold of what copies save: every slot is taken
to be used, and copies to be waited for.
"""

from __future__ import annotations

from shoal.cost.arithmetic import expert_parameters, mixture_layers
from shoal.cost.expert_hops import Exchange
from shoal.cost.experts import exchange_s
from shoal.cost.ops import stage_share
from shoal.cost.rates import data_link
from shoal.cost.training import microbatch_of
from shoal.ir import Estimate, Interval, Machine, Work

__all__ = ["copies"]


def copies(work: Work, machine: Machine, slots: int) -> Estimate:
    """Of ``slots`` copies that every rank gets of every layer's experts."""
    job, shape = work.job, work.shape
    split = job.parallel
    if split.ep == 1 or not shape.num_experts or not slots:
        return Estimate(
            step_s=Interval.around(0.0, 0.3), terms_s={"collective": 0.0}, memory_bytes={}
        )
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

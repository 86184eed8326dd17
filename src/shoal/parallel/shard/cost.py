"""What sharding puts on the wire, in the words of the ring formulas."""

from __future__ import annotations

from shoal.cost.arithmetic import expert_parameters, parameters
from shoal.cost.price.rates import data_link
from shoal.ir import Estimate, Interval, Link, Machine, Parallel, Work


def sharding_estimate(
    work: Work, machine: Machine, *, sent_per_parameter_byte: float, messages: int
) -> Estimate:
    """Bytes and seconds of one step's parameter and gradient traffic of one rank.

    Args:
        work: the job; the number of ranks N is dp * cp of its ``parallel``, and edp of experts
            with a grid of their own.
        machine: whose slowest link on the way is used.
        sent_per_parameter_byte: how often a rank sends each parameter byte (4 bytes a
            parameter, fp32), before the ring's factor (N - 1) / N.
        messages: collectives of one step, each of which costs 2 (N - 1) latencies.
    """
    split, shape = work.job.parallel, work.shape
    ranks = split.dp * split.cp
    experts = expert_parameters(shape) if split.folded else 0
    rest = 4.0 * (parameters(shape) - experts) / (split.tp * split.pp)
    sent = rest * sent_per_parameter_byte * (ranks - 1) / ranks
    if experts:
        share, among = 4.0 * experts / (split.ep * split.etp * split.pp), split.edp
        sent += share * sent_per_parameter_byte * (among - 1) / among
    link = data_link(machine, split)
    seconds = 0.0
    if ranks > 1 and link is not None:
        seconds = sent / link.bandwidth + messages * 2 * (ranks - 1) * link.latency_s
    return Estimate(
        step_s=Interval.around(seconds, 0.3),
        terms_s={"collective": seconds},
        wire_bytes={link.scope: sent} if ranks > 1 and link is not None else {},
    )


def group_link(machine: Machine, span: int) -> Link | None:
    """The slowest link among ``span`` ranks that are neighbours by number."""
    return data_link(machine, Parallel(dp=span))

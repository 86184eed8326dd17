"""What attention over shared sequences adds to a step: bytes, and seconds not hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.cost.context.traffic import ContextTraffic, SentElements, ring_traffic
from shoal.cost.price.rates import RankRates, context_link
from shoal.ir import Estimate, Interval, Machine, Work


class Route(NamedTuple):
    """Messages among neighbouring ranks that share a sequence.

    Args:
        traffic: of one rank and one layer.
        among: ranks of a group of neighbours; all, where it goes beyond groups.
    """

    traffic: ContextTraffic
    among: int


def context_estimate(
    routes: Callable[[int, int, int, int, int], Sequence[Route]],
    balanced: bool,
    work: Work,
    machine: Machine,
) -> Estimate:
    """Bytes and seconds of one step of one rank.

    Messages that overlap with the computation of blocks cost only the time beyond that of the
    blocks; on CPU ranks nothing overlaps, because the same cores compute and copy.

    Args:
        routes: closed form of a part, of (tokens, heads, kv_heads, head_dim, world).
        balanced: every rank has the same share of causal work.
        work: the job; ``work.job.parallel.cp`` is the number of ranks N.
        machine: whose slowest link between the ranks of a route is used.
    """
    job, shape = work.job, work.shape
    split = job.parallel
    ranks = split.cp
    if ranks == 1 or context_link(machine, split) is None:
        return Estimate(step_s=Interval.around(0.0, 0.0))
    sequences = job.global_batch // job.parallel.dp
    passes = max(1, sequences // (job.microbatch or sequences))
    layers = shape.num_layers / job.parallel.pp
    heads, kv_heads = (
        max(1, count // job.parallel.tp) for count in (shape.num_heads, shape.num_kv_heads)
    )
    itemsize = 2 if job.precision == "bf16" else 4
    wire: dict[str, float] = {}
    total = hidden = latest = 0.0
    for result, among in routes(
        sequences * job.seq_len // ranks, heads, kv_heads, shape.head_dim, ranks
    ):
        link = context_link(machine, split.model_copy(update={"cp": among}))
        if link is None or among == 1:
            continue
        if job.sends_again:
            result = result._replace(backward=_sum(result.backward, result.forward))
        sent = layers * (result.forward.num_bytes(itemsize) + result.backward.num_bytes(itemsize))
        wire[link.scope] = wire.get(link.scope, 0.0) + sent
        # A link's bandwidth is that of one device, whichever way its messages go.
        seconds = sent / link.bandwidth + layers * passes * result.messages * link.latency_s
        if result.hidden and machine.device.kind != "cpu":
            hidden += seconds
            latest = max(latest, layers * link.latency_s)
        else:
            total += seconds
    if hidden:
        # Forward 4, backward 10 FLOPs a cell and channel; the last block hides nothing.
        cells = sequences * job.seq_len**2 / 2 / ranks
        flops = layers * 14.0 * cells * heads * shape.head_dim * (ranks - 1) / ranks
        rate = RankRates(machine, job.parallel, job.threads).matmul_curve(job.precision)
        total += max(hidden - flops / rate(float(job.seq_len // ranks)), latest)
    return Estimate(
        step_s=Interval.around(total, 0.5 if not balanced else 0.3),
        terms_s={"collective": total},
        wire_bytes=wire,
    )


def waits(work: Work, machine: Machine) -> bool:
    """Whether a ring of keys and values is waited for: where not, no other way is worth trying."""
    result = context_estimate(
        lambda *sizes: [Route(ring_traffic(*sizes), sizes[-1])], True, work, machine
    )
    share = result.terms_s.get("collective", 0.0)
    link = context_link(machine, work.job.parallel)
    layers = work.shape.num_layers / work.job.parallel.pp
    return link is not None and share > layers * link.latency_s


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> SentElements:
    return SentElements(*(x + y for x, y in zip(a, b, strict=True)))

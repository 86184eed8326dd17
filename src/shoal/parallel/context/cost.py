"""What attention over shared sequences adds to a step: bytes, and seconds not hidden."""

from __future__ import annotations

from collections.abc import Callable

from shoal.cost.context.traffic import Sent, Traffic
from shoal.cost.price.rates import Rates, context_link
from shoal.ir import Estimate, Interval, Machine, Work

__all__ = ["context_estimate"]


def context_estimate(
    traffic: Callable[[int, int, int, int, int], Traffic],
    balanced: bool,
    work: Work,
    machine: Machine,
) -> Estimate:
    """Bytes and seconds of one step of one rank.

    Messages that travel while blocks are computed cost what they take longer than the
    blocks; on CPU ranks nothing is hidden, for the cores that compute also carry the bytes.

    Args:
        traffic: closed form of a part, of (tokens, heads, kv_heads, head_dim, world).
        balanced: every rank has the same share of causal work.
        work: the job; ``work.job.parallel.cp`` is the number of ranks N.
        machine: whose slowest link between these ranks is used.
    """
    job, shape = work.job, work.shape
    ranks = job.parallel.cp
    link = context_link(machine, job.parallel)
    if ranks == 1 or link is None:
        return Estimate(step_s=Interval.around(0.0, 0.0))
    sequences = job.global_batch // job.parallel.dp
    passes = max(1, sequences // (job.microbatch or sequences))
    layers = shape.num_layers / job.parallel.pp
    heads, kv_heads = (
        max(1, count // job.parallel.tp) for count in (shape.num_heads, shape.num_kv_heads)
    )
    found = traffic(sequences * job.seq_len // ranks, heads, kv_heads, shape.head_dim, ranks)
    itemsize = 2 if job.precision == "bf16" else 4
    if job.recompute != "none":
        found = found._replace(backward=_sum(found.backward, found.forward))
    sent = layers * (found.forward.num_bytes(itemsize) + found.backward.num_bytes(itemsize))
    # A link's bandwidth is that of one device, whichever way its messages go.
    seconds = sent / link.bandwidth + layers * passes * found.messages * link.latency_s
    if found.hidden and machine.device.kind != "cpu":
        # Forward 4, backward 10 FLOPs a cell and channel; the last block hides nothing.
        cells = sequences * job.seq_len**2 / 2 / ranks
        flops = layers * 14.0 * cells * heads * shape.head_dim * (ranks - 1) / ranks
        rate = Rates(machine, job.parallel, job.threads).matmul_curve(job.precision)
        seconds = max(seconds - flops / rate(float(job.seq_len // ranks)), layers * link.latency_s)
    return Estimate(
        step_s=Interval.around(seconds, 0.5 if not balanced else 0.3),
        terms_s={"collective": seconds},
        wire_bytes={link.scope: sent},
    )


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> Sent:
    return Sent(*(x + y for x, y in zip(a, b, strict=True)))

"""What three-level ZeRO sends on each level, over which link, and what a rank keeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from shoal.cost.arithmetic import parameters
from shoal.cost.price.rates import neighbours_link, ranks_per_host
from shoal.ir import Link, Machine, Parallel, TrainJob, Work
from shoal.parallel.comm.wire import packed_bytes

if TYPE_CHECKING:
    from shoal.parallel.shard.topo3 import Topo3

_MANY = 1 << 20


class Hop(NamedTuple):
    """One level's collectives of a step.

    Args:
        name: contents of the messages.
        members: ranks of a group.
        sent: bytes that a rank sends.
        calls: collectives.
        link: the slowest link between members; None where the machine has none.
    """

    name: str
    members: int
    sent: float
    calls: int
    link: Link | None


def width(part: Topo3, what: str, job: TrainJob) -> float:
    """Bytes of one number of ``weights`` or ``grads`` on the wire."""
    bits = part.bits(what)
    if bits is not None:
        return packed_bytes(_MANY, bits) / _MANY
    return 2.0 if part.dtype == "bf16" else 4.0


def near_ranks(machine: Machine, job: TrainJob) -> int:
    """Ranks of one node that sum gradients."""
    split = job.parallel
    each = (
        ranks_per_host(machine, split) if machine.device.kind == "cpu" else machine.devices_per_node
    )
    return max(1, each // split.tp)


def span(parallel: Parallel, count: int) -> int:
    """From the first to the last of the first ``count`` ranks that sum gradients, in ranks."""
    last, distance, stride = count - 1, 1, 1
    for axis in reversed(parallel.order.split("-")):
        degree = getattr(parallel, axis)
        if axis in ("dp", "cp"):
            last, place = divmod(last, degree)
            distance += place * stride
        stride *= degree
    return distance


def hops(part: Topo3, work: Work, machine: Machine) -> Iterator[Hop]:
    """The collectives of a step, level by level; every pass gathers, forward and backward."""
    job = work.job
    split = job.parallel
    ranks = split.dp * split.cp
    here = near_ranks(machine, job)
    g0, g1 = part.sizes(ranks, min(ranks, here))
    micro = job.global_batch // split.dp
    passes = max(1, micro // (job.microbatch or micro))
    units = work.shape.num_layers + 1
    share = parameters(work.shape) / (split.tp * split.pp)
    weights, grads = (share * width(part, what, job) for what in ("weights", "grads"))

    def hop(name: str, members: int, whole: float, calls: int, far: int, near: int) -> Hop:
        sent = whole * (members - 1) / members * calls
        link = neighbours_link(machine, span(split, far), near)
        return Hop(name, members, sent, calls * units, link)

    islands = ranks // g1
    second = part.secondary
    if second is None:
        yield hop("weights of a package", g0, weights, 2 * passes, g0, min(g0, here))
    else:
        yield hop("weights of all", g0, weights, passes, g0, min(g0, here))
        yield hop("weights of the second copy", second, weights, passes, second, min(second, here))
    yield hop("gradients of an island", g1, grads, passes, g1, min(g1, here))
    across = max(1, here // g1)
    yield hop("gradients across", islands, grads / g1, 1, ranks, across)
    if g0 < ranks:
        near = max(1, min(g1, here) // g0)
        yield hop("new weights across", islands, weights / g1, 1, ranks, across)
        yield hop("new weights of an island", g1 // g0, weights / g0, 1, g1, near)


def kept_bytes(
    part: Topo3, job: TrainJob, machine: Machine, local: float, block: float
) -> dict[str, float]:
    """Bytes of a rank's weights and gradients at the end of a backward pass.

    Args:
        part: the sharding.
        job: whose ranks share.
        machine: whose nodes give the levels that are not set.
        local: parameters of a rank's stages and slices.
        block: those of one block, of which two are whole at a time.
    """
    ranks = job.parallel.dp * job.parallel.cp
    g0, g1 = part.sizes(ranks, min(ranks, near_ranks(machine, job)))
    weights = width(part, "weights", job)
    copies = weights / g0 + (weights / part.secondary if part.secondary else 0.0)
    sums = 2.0 if part.dtype == "bf16" else 4.0
    return {
        "weights": local * (4.0 / ranks + copies) + 2 * 4.0 * block,
        "gradients": local * sums / g1 + 4.0 * block,
    }

"""What the ranks of a training step send, and for how long that is not hidden."""

from __future__ import annotations

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.price.collectives import all_reduce_s
from shoal.cost.price.ops import stage_share
from shoal.cost.price.rates import data_link, tensor_link
from shoal.cost.price.shares import passes_of, sharers, vocab_ranks, workers_of
from shoal.ir import Estimate, Machine, TrainJob, Work
from shoal.ir.job import TILES


def add_wire(own: Estimate, wire: dict[str, float]) -> float:
    """Count what a part sends; the seconds that it takes."""
    for scope, sent in own.wire_bytes.items():
        wire[scope] = wire.get(scope, 0.0) + sent
    return own.terms_s.get("collective", 0.0)


def tied_s(work: Work, machine: Machine, wire: dict[str, float]) -> float:
    """Seconds in which both ends of a pipeline sum the gradient of a tied embedding."""
    job, shape = work.job, work.shape
    split = job.parallel
    if not shape.tied or split.vocab_split == "pp":
        return 0.0
    size = 4.0 * shape.vocab_size * shape.hidden / vocab_ranks(job)
    link = data_link(machine, split.model_copy(update={"dp": split.dp * split.pp}))
    if link is not None:
        wire[link.scope] = wire.get(link.scope, 0.0) + size
    return all_reduce_s(size, 2, link)


def tensor_parallel_s(
    work: Work, machine: Machine, microbatch: int, wire: dict[str, float]
) -> float:
    """Seconds of one micro-batch's all-reduces: two a block forward, two backward.

    Experts with a grid of their own take the tokens as they lie: attention's are left.
    """
    job, shape, tp = work.job, work.shape, work.job.parallel.tp
    if tp == 1:
        return 0.0
    link = tensor_link(machine, job.parallel)
    tokens = microbatch * job.seq_len / job.parallel.cp
    size = tokens * shape.hidden * (2.0 if job.precision == "bf16" else 4.0)
    sparse = mixture_layers(shape) if job.parallel.folded else 0
    layers = stage_share(shape, job.parallel.pp) * (shape.num_layers - sparse / 2)
    number = layers * (6 if job.sends_again else 4) + 2
    passes = passes_of(job, microbatch)
    if link is not None:
        sent = number * 2 * size * (tp - 1) / tp * passes
        wire[link.scope] = wire.get(link.scope, 0.0) + sent
    return number * all_reduce_s(size, tp, link)


def not_hidden_s(job: TrainJob, machine: Machine, tensor_s: float, products_s: float) -> float:
    """Seconds of a micro-batch's all-reduces that do not overlap with tiles of the products.

    The first tile is computed before anything can be sent, and the last one is sent when nothing
    is left to compute. Ranks of one host that sum through its memory hide nothing: summing is
    computing.
    """
    link = tensor_link(machine, job.parallel)
    if job.parallel.overlap != "tile" or link is None or link.scope == "loopback":
        return tensor_s
    tiles = TILES * job.parallel.tp
    return max(tensor_s / tiles, tensor_s - products_s * (1 - 1 / tiles))


def data_parallel_s(work: Work, machine: Machine, shard: object, wire: dict[str, float]) -> float:
    """Seconds of the gradients' and weights' collectives, as the shard part says."""
    if sharers(work.job) == 1:
        return 0.0
    workers = workers_of(work.job)
    if workers > 1:
        split = work.job.parallel
        inside = split.model_copy(update={"dp": split.dp // workers})
        job = work.job.model_copy(update={"parallel": inside})
        work = work.model_copy(update={"job": job})
    own: Estimate = shard.estimate(work, machine)  # type: ignore[attr-defined]
    if getattr(shard, "placed", False):
        return add_wire(own, wire)
    link = data_link(machine, work.job.parallel)
    sent = sum(own.wire_bytes.values())
    scope = link.scope if link is not None else next(iter(own.wire_bytes), "loopback")
    wire[scope] = wire.get(scope, 0.0) + sent
    # The part does not know where the other axes put its ranks; the slower link counts.
    floor = sent / link.bandwidth if link is not None else 0.0
    return max(own.terms_s.get("collective", 0.0), floor)

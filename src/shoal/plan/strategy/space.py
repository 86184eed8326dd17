"""The space of plans: every legal way to run a job on a machine.

What a job states stays as it is. A field is stated when it was given, even with its
default's value: ``parallel``, ``shard``, ``microbatch``, ``recompute`` and ``precision``
are open otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.parts import Choice, table
from shoal.core.traits import traits
from shoal.cost.gpu.engines import overlaps_experts
from shoal.cost.price.experts import dispatches
from shoal.cost.price.rates import ranks_per_host
from shoal.cost.shapes import shape_of
from shoal.ir import Machine, ModelShape, Parallel, Recomputation, TrainJob, Work
from shoal.plan.composition import clash, split_traits, work_traits
from shoal.plan.emit.expressed import refuses
from shoal.plan.experts.moe_auto import ChunkChooser

# Sequences of so many tokens and more are worth being shared by ranks.
_LONG = 8192


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def most_ranks(machine: Machine) -> int:
    """Ranks that a machine has room for: one a GPU, one a core of a CPU."""
    if machine.device.kind == "gpu":
        return machine.num_devices
    return machine.nodes * (machine.device.num_cores or 1)


def legal_parallel(
    job: TrainJob, shape: ModelShape, machine: Machine, world: int
) -> Iterator[Parallel]:
    """Every split of ``world`` ranks into dp x tp x pp that job, shape and machine allow.

    Tensor parallelism stays inside a node: its all-reduces wait for nothing else.
    """
    inside = machine.devices_per_node if machine.device.kind == "gpu" else most_ranks(machine)
    for tp in divisors(world):
        if tp > inside or shape.num_heads % tp or shape.num_kv_heads % tp:
            continue
        if shape.ffn_hidden % tp or (shape.num_experts and shape.expert_hidden % tp):
            continue
        for pp in divisors(world // tp):
            dp = world // tp // pp
            split = Parallel(dp=dp, tp=tp, pp=pp)
            if pp <= shape.num_layers and job.global_batch % dp == 0 and composes(job, split):
                yield split


def splits(job: TrainJob, shape: ModelShape, machine: Machine, world: int) -> Iterator[Parallel]:
    """Those of :func:`legal_parallel`, with shared sequences, and under every schedule."""
    for cp in (1, *_context_degrees(job, world)):
        for plain in legal_parallel(job, shape, machine, world // cp):
            plain = plain.model_copy(update={"cp": cp})
            for way in _ways(plain, job, shape, machine):
                yield way
                yield from _folds(way, job, shape, machine)


def _folds(way: Parallel, job: TrainJob, shape: ModelShape, machine: Machine) -> Iterator[Parallel]:
    """The split with a grid of the experts' own, each of them whole or cut as the rest is."""
    if not shape.num_experts or (way.tp > 1 and not way.sp):
        return
    inner = way.dp * way.cp * way.tp
    for ep in divisors(shape.num_experts)[1:]:
        for etp in sorted({1, way.tp}):
            if inner % (ep * etp) == 0:
                folded = way.model_copy(update={"ep": ep, "etp": etp})
                overlaps = ("none", "experts") if overlaps_experts(job, folded) else ("none",)
                for placer, _ in _offered("placer", job, folded, shape, machine):
                    for by, overlap in product(dispatches(machine, folded), overlaps):
                        update = {"placer": placer, "expert_dispatch": by, "overlap": overlap}
                        yield folded.model_copy(update=update)


def _context_degrees(job: TrainJob, ranks: int) -> list[int]:
    """Ranks that may share a long sequence; zigzag cuts it into twice as many pieces."""
    if job.seq_len < _LONG:
        return []
    return [cp for cp in divisors(ranks) if cp > 1 and job.seq_len % (2 * cp) == 0 and cp <= 16]


def _ways(
    plain: Parallel, job: TrainJob, shape: ModelShape, machine: Machine
) -> Iterator[Parallel]:
    """The split, with and without the residual stream shared, under all contexts and schedules."""
    ways = [plain]
    if plain.tp > 1 and job.seq_len % (plain.tp * plain.cp) == 0:
        ways.append(plain.model_copy(update={"sp": True}))
    if plain.cp > 1:
        ways = [
            way.model_copy(update={"context": choice})
            for way in ways
            for choice, _ in _offered("context", job, way, shape, machine)
        ]
    for way in ways:
        yield way
        if plain.pp == 1:
            continue
        for choice, chunks in _offered("schedule", job, way, shape, machine):
            if choice != way.schedule:
                yield way.model_copy(update={"vpp": chunks, "schedule": choice})


def _offered(
    kind: str, job: TrainJob, split: Parallel, shape: ModelShape, machine: Machine
) -> Iterator[tuple[Choice, Any]]:
    """What the parts of a kind offer for a split, in the order of their table."""
    # Both are values already; to check them again for every split takes longer than to price it.
    work = Work.model_construct(shape=shape, job=job.model_copy(update={"parallel": split}))
    return table(kind).offered(work, machine)


def sharding_choices(
    job: TrainJob, parallel: Parallel, machine: Machine, shape: ModelShape | None = None
) -> tuple[Choice, ...]:
    """Shard parts to try for a split."""
    if "shard" in job.model_fields_set:
        levels = job.shard.options.get("levels")
        shared = not levels or parallel.dp * parallel.cp % levels[-1] == 0
        # Of a stated split the part itself says what is wrong.
        return (job.shard,) if shared or "parallel" in job.model_fields_set else ()
    stated = split_traits(parallel) | work_traits(job)
    if parallel.dp == 1 or stated & {"leaves_device", "local_updates"}:
        default: Choice = TrainJob.model_fields["shard"].default
        return (default,)
    offered = _offered("shard", job, parallel, shape or shape_of(job), machine)
    return tuple(choice for choice, _ in offered if not clash(stated, traits("shard", choice)))


def worlds(job: TrainJob, machine: Machine) -> list[int]:
    """Numbers of ranks to try, most first: a small job may be fastest on few of them."""
    if "parallel" in job.model_fields_set:
        return [job.parallel.world]
    most = most_ranks(machine)
    # Of an odd number of nodes a power of two may be the best part, as batches are.
    inside = max(1, most // machine.nodes)
    powers = {inside << k for k in range((most // inside).bit_length())}
    return sorted({*divisors(most), *powers}, reverse=True)


class PlanFamily(NamedTuple):
    """Concrete jobs that differ in micro-batch, recomputation and precision.

    Args:
        job: with everything else chosen.
        sizes: micro-batches that go, ascending.
        recomputes: what may be computed again.
        precisions: of computing.
    """

    job: TrainJob
    sizes: tuple[int, ...]
    recomputes: tuple[Recomputation, ...]
    precisions: tuple[Literal["bf16", "fp32"], ...]

    def member(self, microbatch: int, recompute: str, precision: str) -> TrainJob:
        """One of the jobs."""
        update = {"microbatch": microbatch, "recompute": recompute, "precision": precision}
        return self.job.model_copy(update=update)


def candidates(
    job: TrainJob, machine: Machine, *, shape: ModelShape | None = None
) -> Iterator[TrainJob]:
    """Every concrete job that its engine can run, in no particular order.

    Raises:
        PlanError: the stated split is not legal.
    """
    shape = shape or shape_of(job)
    for one in _members(job, machine, shape):
        if not refuses(one, shape, machine):
            yield one


def _members(job: TrainJob, machine: Machine, shape: ModelShape) -> Iterator[TrainJob]:
    chooser = ChunkChooser(shape, machine)
    for family in families(job, machine, shape):
        for size in family.sizes:
            for recompute in family.recomputes:
                for precision in family.precisions:
                    yield chooser.planned(family.member(size, recompute, precision))


def no_candidates(job: TrainJob, machine: Machine, shape: ModelShape) -> PlanError:
    """Why a job has none."""
    for one in _members(job, machine, shape):
        if refused := refuses(one, shape, machine):
            return cannot_run(job, refused)
    return PlanError(
        f"{job.model} on {machine.name}: no parallelism configuration is valid for global_batch = "
        f"{job.global_batch}; change global_batch, or leave parallel open"
    )


def cannot_run(job: TrainJob, refused: Sequence[str]) -> PlanError:
    """The engine of a job has no words for any plan."""
    return PlanError(f"engine = {job.engine}: it cannot run any of the plans: {'; '.join(refused)}")


def families(
    job: TrainJob, machine: Machine, shape: ModelShape, syncs: Sequence[str] = ()
) -> Iterator[PlanFamily]:
    """The same, those of a split and a sharding together; chunks may be left open.

    Args:
        job: what it leaves open is chosen.
        machine: to run on.
        shape: the model.
        syncs: parts of kind ``sync`` that are tried beside the job's own, where they offer
            themselves.

    Raises:
        PlanError: the stated split is not legal.
    """
    _possible(job, shape)
    if "parallel" in job.model_fields_set:
        _stated(job, shape, machine)
        every = [job.parallel]
    else:
        require(
            job.base != "divided" or most_ranks(machine) > 1,
            "base",
            job.base,
            expected=f"own on {machine.name}, which has memory for one rank",
            error=PlanError,
        )
        every = [
            split for world in worlds(job, machine) for split in splits(job, shape, machine, world)
        ]
    fixed = job.model_fields_set
    precisions = (job.precision,) if "precision" in fixed else _precisions(machine)
    recomputes = _recomputes(job, machine)
    for parallel in every:
        share = job.global_batch // parallel.dp
        if job.microbatch is not None and share % job.microbatch:
            continue
        sizes = divisors(share) if job.microbatch is None else [job.microbatch]
        if job.batching is not None and job.microbatch is None:
            # Passes are as long as an assigner makes them; these are the rows that come next to it.
            tokens = table("assigner").build(job.batching, where="batching").capacity_tokens
            sizes = [max((n for n in sizes if n * job.seq_len <= tokens), default=1)]
        legal = _going(parallel, share, sizes)
        if not legal:
            continue
        facts = split_traits(parallel)
        for agreeing in _agreeing(job, parallel, shape, machine, syncs):
            if "parallel" not in fixed and not composes(agreeing, parallel):
                continue
            for shard in sharding_choices(agreeing, parallel, machine, shape):
                if not clash(facts, traits("shard", shard)):
                    one = agreeing.model_copy(update={"parallel": parallel, "shard": shard})
                    yield PlanFamily(one, legal, recomputes, precisions)


def _recomputes(job: TrainJob, machine: Machine) -> tuple[Recomputation, ...]:
    """What may be computed again, from least to most.

    Selective calls every operator through Python's hands, which hides behind an accelerator alone.
    """
    stated = work_traits(job)
    if "recompute" in job.model_fields_set or clash(stated, frozenset({"recomputes"})):
        return (job.recompute,)
    if machine.device.kind == "cpu" or clash(stated, frozenset({"keeps_products"})):
        return ("none", "full")
    return ("none", "selective", "full")


def _agreeing(
    job: TrainJob, parallel: Parallel, shape: ModelShape, machine: Machine, syncs: Sequence[str]
) -> Iterator[TrainJob]:
    """The job, with its base whole and divided, and with every way to agree that is asked for."""
    yield job
    whole = job.finetune is not None and "base" not in job.model_fields_set
    if whole and parallel.dp > 1 and not clash(work_traits(job), frozenset({"divides_base"})):
        yield job.model_copy(update={"base": "divided"})
    if syncs and parallel.dp > 1:
        for choice, _ in _offered("sync", job, parallel, shape, machine):
            if choice.name in syncs and choice != job.sync:
                yield job.model_copy(update={"sync": choice})


def composes(job: TrainJob, parallel: Parallel) -> bool:
    """Whether an open split goes with what the job states."""
    if job.base == "divided" and parallel.dp == 1:
        return False
    if clash(split_traits(parallel), work_traits(job)):
        return False
    try:
        table("sync").build(job.sync).workers(parallel.dp)
    except ConfigError:
        return False
    return True


def _going(parallel: Parallel, share: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches, of a rank's share of sequences, of which the schedule takes so many."""
    if "groups_of_microbatches" in traits("schedule", parallel.schedule):
        return tuple(size for size in sizes if share // size % parallel.pp == 0)
    return tuple(sizes)


def _precisions(machine: Machine) -> tuple[Literal["bf16", "fp32"], ...]:
    """Precisions to try: a device with fast bf16 products is never faster in fp32."""
    rates = machine.device.matmul_flops or machine.device.peak_flops
    if machine.device.kind == "gpu" and rates.get("bf16", 0.0) > rates.get("fp32", 0.0):
        return ("bf16",)
    return ("bf16", "fp32")


def _possible(job: TrainJob, shape: ModelShape) -> None:
    require(
        job.seq_len <= shape.max_position,
        "seq_len",
        job.seq_len,
        expected=f"at most {shape.max_position}, the longest sequence of {shape.name}",
        error=PlanError,
    )


def _stated(job: TrainJob, shape: ModelShape, machine: Machine) -> None:
    parallel, most = job.parallel, most_ranks(machine)
    if machine.device.kind == "gpu":
        require(
            parallel.world <= most,
            "parallel",
            f"dp={parallel.dp} tp={parallel.tp} pp={parallel.pp} ({parallel.world} ranks)",
            expected=f"at most {most} ranks, one for each device of machine {machine.name}",
            error=PlanError,
        )
    else:
        # More ranks than cores is slow and legal: a laptop may rehearse a cluster.
        require(
            ranks_per_host(machine, parallel) <= 64,
            "parallel",
            f"{parallel.world} ranks",
            expected=f"at most 64 ranks on each of the {machine.nodes} hosts of {machine.name}",
            error=PlanError,
        )
    widths = {"heads": shape.num_heads, "key/value heads": shape.num_kv_heads}
    for what, number in widths.items():
        require(
            number % parallel.tp == 0,
            "parallel.tp",
            parallel.tp,
            expected=f"a divisor of the {number} {what} of {shape.name}: "
            + ", ".join(map(str, divisors(number))),
            error=PlanError,
        )
    require(
        parallel.pp <= shape.num_layers,
        "parallel.pp",
        parallel.pp,
        expected=f"at most {shape.num_layers}, the blocks of {shape.name}",
        error=PlanError,
    )

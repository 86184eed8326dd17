"""Whether a model and a batch can be split as a job says: asked before any process group exists.

Torch-free. Every rule names the option, the number that does not divide, and the values that
would do, so that a wrong split is one error at start and never a hang.
"""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.price.shares import microbatch_of, passes_of
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import ModelShape, Schedule, TrainJob
from shoal.ir.architecture import Architecture
from shoal.ir.routing import Routing
from shoal.parallel.legal_architecture import check_architecture
from shoal.parallel.legal_experts import check_experts, divisors_text
from shoal.parallel.legal_layers import check_layers_apart
from shoal.parallel.overlap import TILES
from shoal.plan.composition import check_composition
from shoal.plan.partition import cells_for


def schedule_of(job: TrainJob) -> Schedule:
    """The schedule of one pipeline of ``job``.

    Raises:
        PlanError: the schedule cannot be built for these numbers.
    """
    parallel = job.parallel
    part = table("schedule").build(parallel.schedule, where="parallel.schedule")
    passes = passes_of(job)
    schedule: Schedule = part.build(parallel.pp, passes, parallel.vpp)
    if parallel.vocab_split == "pp":
        require(
            not schedule.cells,
            "parallel.vocab",
            parallel.vocab,
            expected=f"auto, none or tp with schedule {parallel.schedule.name}, where stage 0 has "
            "embedding and output layer",
            error=PlanError,
        )
        from shoal.plan.schedules.vocab import with_vocabulary

        schedule = with_vocabulary(schedule, parallel.vocab_barriers)
    return schedule


def check_split(job: TrainJob, shape: ModelShape) -> Schedule:
    """Refuse a split that cannot run.

    Returns:
        The schedule of one pipeline.

    Raises:
        PlanError: names the option, the number that does not divide, and the legal values.
    """
    p = job.parallel
    tp, cp, pp = p.tp, p.cp, p.pp
    require(
        job.engine == "shoal",
        "engine",
        job.engine,
        expected="shoal: a plan that is priced for another program is run by that program",
        hint="shoal plan train --emit writes its launch files; or give --set engine=shoal",
        error=PlanError,
    )
    require(
        job.products == "same",
        "products",
        job.products,
        expected="same: Shoal's runtime computes products in the precision of the job",
        hint="plan with --engine megatron, nemo or torchtitan for products in eight bits",
        error=PlanError,
    )
    require(
        shape.family != "mdlm" or tp == cp == pp == 1,
        "parallel",
        f"tp={tp}, cp={cp}, pp={pp}",
        expected=f"1 of each for {shape.name}, a masked-diffusion model: use dp, with any shard",
        error=PlanError,
    )
    require(
        shape.num_heads % tp == 0 and shape.num_kv_heads % tp == 0,
        "parallel.tp",
        tp,
        expected=f"a divisor of {shape.num_heads} heads and {shape.num_kv_heads} key/value heads: "
        + divisors_text(shape.num_kv_heads, shape.num_heads),
        error=PlanError,
    )
    width = shape.expert_hidden if shape.num_experts else shape.ffn_hidden
    check_experts(job, shape)
    require(
        p.folded or width % tp == 0,
        "parallel.tp",
        tp,
        expected=f"a divisor of the feed-forward width {width}: {divisors_text(width)}",
        error=PlanError,
    )
    check_architecture(job, shape)
    check_composition(job)
    schedule = schedule_of(job)
    moe = shape.architecture.moe
    require(
        not schedule.cells or moe == Routing(),
        "parallel.schedule",
        job.parallel.schedule.name,
        expected=f"one whose micro-batches visit every layer, with gate {moe.gate.name}, capacity "
        "or balance losses",
        error=PlanError,
    )
    require(
        shape.num_layers % schedule.stages == 0 or p.vpp == 1 or bool(p.stages),
        "parallel.vpp",
        p.vpp,
        expected=f"with pp = {pp} a number of stages that divides {shape.num_layers} layers: "
        f"pp * vpp of {divisors_text(shape.num_layers)}",
        error=PlanError,
    )
    require(
        schedule.num_cells - schedule.bare_head <= shape.num_layers,
        "parallel.pp",
        pp,
        expected=f"at most {shape.num_layers} stages, one for each layer",
        error=PlanError,
    )
    _check_layers(job, shape)
    table("sync").build(job.sync).workers(p.dp)  # refuses a number that they cannot be
    _check_batching(job, shape)
    if p.stages:
        cells_for(shape, schedule, given=p.stages)
    if cp > 1:
        context = table("context").build(p.context, where="parallel.context")
        context.positions(job.seq_len, cp)
        context.check(shape.num_heads // tp, shape.num_kv_heads // tp, cp)
    rows = microbatch_of(job) * job.seq_len // cp
    require(
        not p.sp or rows % tp == 0,
        "parallel.sp",
        p.sp,
        expected=f"microbatch * seq_len / cp = {rows} tokens that tp = {tp} divides",
        error=PlanError,
    )
    require(
        p.overlap == "none" or tp == 1 or rows >= tp * TILES,
        "parallel.overlap",
        p.overlap,
        expected=f"none, or microbatch * seq_len / cp = {rows} tokens of at least tp * {TILES} = "
        f"{tp * TILES}, a tile for each",
        error=PlanError,
    )
    shard = table("shard").build(job.shard)
    if hasattr(shard, "check"):
        shard.check(job)
    if job.offload is not None:
        table("offload").build(job.offload).check(job)
    require(
        "gradients" not in shard.divides or p.dp * cp > 1,
        "shard",
        job.shard.name,
        expected="replicated where dp * cp = 1: there is nobody to share with",
        error=PlanError,
    )
    return schedule


def _check_batching(job: TrainJob, shape: ModelShape) -> None:
    """Refuse what ranks with numbers of passes of their own cannot do."""
    if job.batching is None:
        return
    p, name = job.parallel, job.batching.name
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (shape.family != "mdlm", "model", shape.name, "a model whose tokens see those before"),
        (
            job.architecture == Architecture() and shape.architecture == Architecture(),
            "architecture",
            shape.name,
            "a plain transformer",
        ),
    )
    for legal, where, given, expected in rules:
        require(
            legal,
            where,
            str(given),
            expected=f"{expected}, with batching {name}",
            hint="change it, or leave batching out",
            error=PlanError,
        )
    part = table("assigner").build(job.batching, where="batching")
    if getattr(part, "offload", "none") != "none":
        require(
            job.recompute == "none" and not job.layers,
            "recompute",
            job.recompute,
            expected="none with batching.offload: what is computed again is not kept anywhere",
            error=PlanError,
        )
        return  # what the host takes depends on the machine; asked when its rates are known
    # A document may fill a row.
    part.assign([job.seq_len], p.dp, SequenceCost.of(shape, 1e12, [(p.dp, 1e10)]))


def _check_layers(job: TrainJob, shape: ModelShape) -> None:
    """Refuse groups of blocks that are not the model's, or that the runtime cannot run."""
    if not job.layers:
        return
    total = sum(group.blocks for group in job.layers)
    require(
        total == shape.num_layers,
        "layers",
        f"{total} blocks",
        expected=f"groups whose blocks add up to the {shape.num_layers} of {shape.name}",
        error=PlanError,
    )
    if job.layers_apart:
        check_layers_apart(job, shape)

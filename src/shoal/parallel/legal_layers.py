"""Which blocks with degrees or a sharding of their own the runtime of training runs.

Torch-free, as :mod:`shoal.parallel.legal`. What is not refused here runs, and equals one process.
"""

from __future__ import annotations

from shoal.core.errors import PlanError, require
from shoal.cost.price.shares import microbatch_of
from shoal.ir import ModelShape, TrainJob
from shoal.parallel.legal_experts import divisors_text
from shoal.plan.composition import check_composition
from shoal.plan.layered import layers_alike


def check_layers_apart(job: TrainJob, shape: ModelShape) -> None:
    """Refuse groups of blocks whose own degrees or sharding cannot run.

    Raises:
        PlanError: names the group, its option, and the legal values.
    """
    p = job.parallel
    reason = layers_alike(job, shape)
    if reason:
        raise PlanError(
            f"{reason}, where blocks have dp, tp or shard of their own; such blocks are planned "
            "only: plan with --set planner.runnable=true, or remove these keys from layers"
        )
    sequences = p.dp * microbatch_of(job)
    for number, group in enumerate(job.layers):
        dp, tp, _ = job.degrees(group)
        where = f"layers.{number}"
        require(
            sequences % dp == 0,
            f"{where}.dp",
            dp,
            expected=f"a divisor of a micro-batch on all ranks, parallel.dp * microbatch = "
            f"{sequences} sequences: {divisors_text(sequences)}",
            error=PlanError,
        )
        require(
            not any(n % tp for n in (shape.num_heads, shape.num_kv_heads, shape.ffn_hidden)),
            f"{where}.tp",
            tp,
            expected=f"a divisor of {shape.num_heads} heads, {shape.num_kv_heads} key/value heads "
            f"and the feed-forward width {shape.ffn_hidden}: "
            + divisors_text(shape.num_kv_heads, shape.num_heads, shape.ffn_hidden),
            error=PlanError,
        )
        check_composition(job.model_copy(update={"shard": group.shard or job.shard}))

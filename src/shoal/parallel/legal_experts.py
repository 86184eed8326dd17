"""Whether experts can have the grid, the copies and the owners that a job gives them.

And whether their tokens can travel as it says.

Torch-free, as :mod:`shoal.parallel.legal`.
"""

from __future__ import annotations

import math

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.cost.price.shares import microbatch_of
from shoal.ir import ModelShape, TrainJob
from shoal.plan.placement.protocols import ExpertPlacer

_MOST_LISTED = 12


def divisors_text(number: int, *others: int) -> str:
    """Divisors that all the numbers share, as text."""
    shared = math.gcd(number, *others)
    small = [n for n in range(1, math.isqrt(shared) + 1) if shared % n == 0]
    items = sorted({*small, *(shared // n for n in small)})
    shown = ", ".join(map(str, items[:_MOST_LISTED]))
    return shown + (" ..." if len(items) > _MOST_LISTED else "")


def check_experts(job: TrainJob, shape: ModelShape) -> None:
    """Refuse a grid of experts that cannot run, and ways of their tokens.

    Raises:
        PlanError: names the option, and what would do.
    """
    p = job.parallel
    copies = "experts_stay" not in traits("placer", p.placer)
    require(
        not copies or (p.ep > 1 and p.etp == 1 and max(p.chunks) == 1),
        "parallel.placer",
        p.placer.name,
        expected="owners, or ep above 1, etp = 1 and one chunk: whole experts are copied, from "
        "rank to rank",
        error=PlanError,
    )
    _check_placer(job)
    tokens = microbatch_of(job) * job.seq_len // p.cp // p.tp
    require(
        max(p.chunks) == 1 or (p.folded and max(p.chunks) <= tokens),
        "parallel.expert_chunks",
        p.expert_chunks,
        expected=f"1 to {tokens}, the tokens of a rank, forward and backward"
        if p.folded
        else "1 without experts on a grid of their own; give parallel.ep",
        error=PlanError,
    )
    require(
        p.expert_dispatch == "flat" or p.ep > 1,
        "parallel.expert_dispatch",
        p.expert_dispatch,
        expected="flat where no ranks share out experts; give parallel.ep",
        error=PlanError,
    )
    require(
        p.overlap != "experts",
        "parallel.overlap",
        p.overlap,
        expected="none or tile; give expert_chunks to compute while tokens travel",
        error=PlanError,
    )
    _check_slices(job, shape)
    if not p.folded:
        return
    experts = shape.num_experts
    require(
        experts > 0,
        "parallel.ep, parallel.etp",
        f"{p.ep}, {p.etp}",
        expected=f"1: {shape.name} has no experts",
        error=PlanError,
    )
    shared = {
        "ep": (p.ep, experts, f"{experts} experts"),
        "etp": (p.etp, shape.expert_hidden, f"the experts' width {shape.expert_hidden}"),
    }
    for axis, (ranks, number, what) in shared.items():
        require(
            number % ranks == 0,
            f"parallel.{axis}",
            ranks,
            expected=f"a divisor of {what}: {divisors_text(number)}",
            error=PlanError,
        )
    require(
        p.tp == 1 or p.sp,
        "parallel.sp",
        p.sp,
        expected="true with tp above 1 and experts on a grid of their own: every rank then has "
        "tokens of its own to send",
        error=PlanError,
    )
    require(
        p.order.startswith("pp"),
        "parallel.order",
        p.order,
        expected="pp first: both grids have the same stages",
        error=PlanError,
    )


def _check_slices(job: TrainJob, shape: ModelShape) -> None:
    """Refuse slices of gradients that have no hole to travel in, or nothing to sum."""
    p = job.parallel
    if not p.slices:
        return
    blocks = len(p.slices)
    rules: tuple[tuple[bool, str], ...] = (
        (p.folded, "without experts on a grid of their own, whose tokens travel; give parallel.ep"),
        (p.dp * p.cp > 1, "where dp * cp = 1: nobody has gradients to sum with"),
        # Stages end their backward passes at different times.
        (p.pp == 1, f"with pp = {p.pp}, whose stages are done at different times; use pp = 1"),
        (not traits("schedule", p.schedule), f"with schedule {p.schedule.name}; use 1f1b"),
        (
            "experts_stay" in traits("placer", p.placer),
            f"with placer {p.placer.name}; use owners",
        ),
        (
            blocks in (1, shape.num_layers),
            f"for {blocks} blocks; give a pair for each of {shape.num_layers}, or one for all",
        ),
    )
    for legal, why in rules:
        require(
            legal,
            "parallel.gradient_slices",
            p.slices[0] if blocks == 1 else f"{blocks} pairs",
            expected=f"nothing {why}",
            error=PlanError,
        )


def _check_placer(job: TrainJob) -> None:
    """Refuse copies and moves of experts that the rest of the job does not go with."""
    placer: ExpertPlacer = table("placer").build(job.parallel.placer, where="parallel.placer")
    optimizer = table("optimizer").build(job.optimizer)
    owners_stay = "; or placer: {name: fssdp, resharding_every: null}"
    saved = job.checkpoint
    rules: tuple[tuple[bool, str, object, str], ...] = (
        (
            not placer.every or not getattr(optimizer, "whole_tensors", False),
            "optimizer",
            job.optimizer.name,
            f"one that updates each expert by itself, such as adamw{owners_stay}",
        ),
        (
            not placer.every or saved.memory is None,
            "checkpoint.memory",
            saved.memory,
            f"nothing where experts change owners: it is fixed who keeps what{owners_stay}",
        ),
        (
            not placer.every or not saved.dump,
            "checkpoint.dump",
            saved.dump,
            f"nothing where experts change owners{owners_stay}",
        ),
        (
            placer.rematerialize != "on" or job.recompute == "none",
            "parallel.placer.rematerialize",
            placer.rematerialize,
            f"auto or off with recompute = {job.recompute}: what is computed again gathers its "
            "copies again",
        ),
    )
    for legal, where, given, expected in rules:
        require(legal, where, str(given), expected=expected, error=PlanError)

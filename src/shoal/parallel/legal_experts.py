"""Whether experts can have a grid of their own, copies and other owners as a job says.

Torch-free.
"""

from __future__ import annotations

import math

from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.cost.training import microbatch_of
from shoal.ir import ModelShape, TrainJob
from shoal.plan.placement.protocols import ExpertPlacer

__all__ = ["check_experts", "divisors"]

_MOST_LISTED = 12


def divisors(number: int, *others: int) -> str:
    """Divisors that all the numbers share, as text."""
    shared = math.gcd(number, *others)
    small = [n for n in range(1, math.isqrt(shared) + 1) if shared % n == 0]
    found = sorted({*small, *(shared // n for n in small)})
    shown = ", ".join(map(str, found[:_MOST_LISTED]))
    return shown + (" ..." if len(found) > _MOST_LISTED else "")


def check_experts(job: TrainJob, shape: ModelShape) -> None:
    """Refuse a grid of experts that cannot run.

    Raises:
        PlanError: names the option, the number that does not divide, and the legal values.
    """
    p = job.parallel
    require(
        p.placer.name == "owners" or (p.ep > 1 and p.etp == 1 and max(p.expert_chunks) == 1),
        "parallel.placer",
        p.placer.name,
        expected="owners, or ep above 1, etp = 1 and one chunk: whole experts are copied, from "
        "rank to rank",
        error=PlanError,
    )
    _check_placer(job)
    tokens = microbatch_of(job) * job.seq_len // p.cp // p.tp
    require(
        max(p.expert_chunks) == 1 or (p.folded and max(p.expert_chunks) <= tokens),
        "parallel.expert_chunks",
        p.expert_chunks,
        expected=f"1 to {tokens}, the tokens of a rank, forward and backward"
        if p.folded
        else "1 without experts on a grid of their own; give parallel.ep",
        error=PlanError,
    )
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
            expected=f"a divisor of {what}: {divisors(number)}",
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
    require(
        job.shard.name in ("replicated", "zero1") and job.offload is None,
        "shard",
        job.shard.name,
        expected="replicated or zero1, without offload, where experts have a grid of their own",
        error=PlanError,
    )
    require(
        not job.compile,
        "compile",
        job.compile,
        expected="false where experts have a grid of their own: their tokens travel",
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

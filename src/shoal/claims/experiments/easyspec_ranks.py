"""What the claim of EasySpec times on two ranks: layers by groups, beside tensor parallelism."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.claims.frame import paired
from shoal.claims.protocols import PairedSamples
from shoal.claims.ranks import on_ranks
from shoal.core.measure import interleave
from shoal.core.random import generator
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from shoal.claims.bench.decode import Bench, DecodeBatchResult
    from shoal.parallel.protocols import Comm
    from shoal.parallel.tensor.layer import Share
    from shoal.serve.decode.draft.net import DraftNet

__all__ = ["PASSES", "answers_in_turn", "passes", "ranked_passes", "repeated"]

PASSES = 100
_RANKS = 2


def repeated(net: DraftNet) -> None:
    """A hundred passes of one row that sees two hundred tokens."""
    import numpy as np
    import torch

    from shoal.serve.decode.captured import TreeRows

    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    row = TreeRows([7], list(range(16)), 200, 200, zero, one)
    with torch.inference_mode():
        for _ in range(PASSES):
            net.rows([row])


def passes(
    comm: Comm, *, path: str, job: ServeJob, groups: list[int], full: bool, pairs: int, seed: int
) -> dict[str, Any]:
    """Seconds of draft passes on one rank, in turn; what each process of the ranks does.

    Args:
        comm: the ranks.
        path: of the draft.
        job: of the target.
        groups: of the draft's layers; each layer alone times the baseline twice.
        full: feed-forward layers read stale input, too.
        pairs: rounds.
        seed: of their order.
    """
    import torch

    from shoal.serve.decode.draft.ranked import part_of, ranked

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})
    nets, limit = {}, 512
    for name, grouped in (("method", max(groups) > 1), ("baseline", False)):
        share: Share = "layers" if grouped else "heads"
        part = part_of(path, job, limit, torch.bfloat16, comm.rank, comm.world, share)
        chosen = tuple(groups) if grouped else None
        nets[name] = ranked(part, comm, limit, share, chosen, full=full and grouped)
    timed = interleave(
        {name: functools.partial(repeated, net) for name, net in nets.items()},
        pairs,
        warmup=3,
        seed=seed,
    )
    reasons = {
        name: list(net.recorded.reasons.values()) if net.recorded is not None else ["no kernel"]
        for name, net in nets.items()
    }
    return {"seconds": timed.seconds, "not_recorded": reasons}


def ranked_passes(
    draft: Path, target: Path, groups: Sequence[int], full: bool, pairs: int, seed: int
) -> tuple[PairedSamples, dict[str, Any]]:
    """The same of two ranks, one core each, as the first of them sees it."""
    job = {"model": str(target), "threads": 1, "kv_tokens": 512, "max_running": 1}
    job["speculative"] = {"name": "draft_model", "path": str(draft)}  # trees are read
    ranks = on_ranks(
        f"{__name__}:passes", _RANKS, path=str(draft), job=ServeJob.model_validate(job),
        groups=list(groups), full=full, pairs=pairs, seed=seed,
    )  # fmt: skip
    seconds = ranks[0]["seconds"]
    fields = {"not_recorded": ranks[0]["not_recorded"], "ranks": _RANKS}
    return paired(seconds["method"], seconds["baseline"]), fields


def answers_in_turn(
    bench: Bench,
    name: str,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    rounds: int,
    seed: int,
) -> dict[str, list[list[DecodeBatchResult]]]:
    """Answers with the draft by groups and with the same draft layer by layer, in turn.

    One engine gives both, so that both have the same ranks: its drafter is exchanged.

    Args:
        bench: its engines.
        name: of one whose draft guesses by groups.
        prompts: to answer.
        new_tokens: of each answer.
        rounds: times that all are answered.
        seed: of the order.

    Returns:
        ``method`` and ``baseline`` -> round -> answers.
    """
    from shoal.serve.decode.draft.part import DraftModelDrafter

    engine: Any = bench.engines[name]
    runner, decides = engine.runner, engine.scheduler.drafting
    grouped = runner.drafter
    plain = DraftModelDrafter(
        grouped.net, depth=grouped.depth, breadth=1, nodes=grouped.depth, limit=grouped.limit
    )
    drafters = {
        "method": (grouped, copy.deepcopy(decides)),
        "baseline": (plain, copy.deepcopy(decides)),
    }

    def answer(which: str, prompt: Sequence[int]) -> DecodeBatchResult:
        runner.drafter, engine.scheduler.drafting = drafters[which]
        return bench.answer(name, [prompt], new_tokens)

    result: dict[str, list[list[DecodeBatchResult]]] = {which: [] for which in drafters}
    try:
        for which in drafters:  # kernels are prepared and passes recorded before anything is timed
            for prompt in prompts[:3]:
                answer(which, prompt)
        for turn in range(rounds):
            for answers in result.values():
                answers.append([])
            for number, prompt in enumerate(prompts):
                draws = generator(seed, purpose="bench order", step=turn * len(prompts) + number)
                for place in draws.permutation(2).tolist():
                    which = list(drafters)[place]
                    result[which][turn].append(answer(which, prompt))
    finally:
        runner.drafter, engine.scheduler.drafting = grouped, decides
    return result

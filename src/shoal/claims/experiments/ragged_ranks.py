"""What two real ranks of the claims about ragged lengths do, and steps beside one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.claims.lab.same_as_one import SeededWeights, same_as_one
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.ir import TrainJob
from shoal.model.config import ModelConfig
from shoal.parallel.engine import ParallelEngine
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

__all__ = ["config", "errors", "time_plans"]


def config(longest: int) -> ModelConfig:
    """A byte model of four layers."""
    return ModelConfig(
        family="llama",
        vocab_size=256,
        hidden=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        ffn_hidden=384,
        max_position=longest,
    )


def errors(batching: Mapping[str, Any], seeds: Sequence[int]) -> tuple[float, ...]:
    """The largest relative difference from one process, in float64, of each seed."""
    errors = []
    for seed in seeds:
        job = TrainJob.model_validate(
            {
                "model": "shoal-0.3m",
                "seq_len": 32,
                "global_batch": 8,
                "precision": "fp32",
                "parallel": {"dp": 4},
                "shard": "zero1" if seed % 2 else "replicated",
                "batching": batching,
                "grad_clip": 0.05,
                "seed": seed,
            }
        )
        small = config(64).model_copy(update={"hidden": 32, "head_dim": 8, "num_layers": 2})
        apart = same_as_one(job, small, steps=2, documents=True)
        errors.append(max(apart.loss, apart.norm, apart.gradient, apart.parameter))
    return tuple(errors)


def time_plans(
    comm: Comm,
    *,
    lengths: Sequence[int],
    assigners: Mapping[str, Mapping[str, Any]],
    turns: int,
    flops_per_s: float,
) -> dict[str, list[float]]:
    """Time steps of one batch by several plans in turn, on this rank.

    Args:
        comm: all ranks.
        lengths: of the sequences.
        assigners: name -> choice of a part; ``alone`` in the place of a name of a part gives every
            sequence to all ranks by itself, in the exchange that it names.
        turns: how often each is timed.
        flops_per_s: of a rank, by which sequences are distributed.

    Returns:
        Seconds of a step by name; the update is not in them.
    """
    keep_freed_memory()
    longest = max(lengths)
    model = config(longest)
    job = TrainJob.model_validate(
        {
            "model": "shoal-1m",
            "seq_len": longest,
            "global_batch": len(lengths) + len(lengths) % comm.world,
            "precision": "fp32",
            "parallel": {"dp": comm.world},
            "batching": {"name": "bytescale", "capacity_tokens": longest},
        }
    )
    engine = ParallelEngine(job, check_split(job, model.shape()), SeededWeights(model, 0), comm)
    cost = SequenceCost.of(model.shape(), flops_per_s, [(comm.world, 2e9)], itemsize=4)
    source = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (len(lengths), longest + 1), generator=source)
    documents = torch.full((len(lengths), longest), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        documents[row, :length] = 0
    targets = ids[:, 1:].masked_fill(documents < 0, -100)
    plans = {
        name: _assigned(choice, lengths, comm.world, cost) for name, choice in assigners.items()
    }
    times: dict[str, list[float]] = {name: [] for name in plans}
    for turn in range(turns + 1):
        names = list(plans) if turn % 2 else list(plans)[::-1]
        for name in names:
            rows = ReplicaSequences(ids[:, :-1], targets, documents, 0, turn, plan=plans[name])
            comm.barrier()
            begin = time.perf_counter()
            engine.backward(rows, 1, float(sum(lengths)))
            engine.finish()
            if turn:  # the first one warms up
                times[name].append(time.perf_counter() - begin)
    return times


def _assigned(
    choice: Mapping[str, Any], lengths: Sequence[int], ranks: int, cost: SequenceCost
) -> Assignment:
    if choice["name"] == "alone":
        every = tuple(range(ranks))
        steps = tuple(MicroStep((number,), every) for number in range(len(lengths)))
        return Assignment(tuple(lengths), ranks, steps, choice["exchange"])
    plan: Assignment = table("assigner").build(choice).assign(lengths, ranks, cost)
    return plan

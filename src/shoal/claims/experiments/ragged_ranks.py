"""What two real ranks of the claims about ragged lengths do, and steps beside one process."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.claims.experiments.tiny import llama, train_job
from shoal.claims.lab.same_as_one import SeededWeights, same_as_one
from shoal.claims.lab.session import RankSession
from shoal.claims.ranks import in_turn
from shoal.core.parts import table
from shoal.cost.training.sequences import SequenceCost
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.balance.sequences.assignment import Assignment, MicroStep
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import Comm


def config(longest: int) -> ModelConfig:
    """A byte model of four layers."""
    return llama(128, 4, 4, length=longest)


def errors(batching: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[float]:
    """The largest relative difference from one process, in float64, of each seed."""
    for seed in seeds:
        job = train_job(
            seq_len=32,
            global_batch=8,
            parallel={"dp": 4},
            shard="zero1" if seed % 2 else "replicated",
            batching=batching,
            grad_clip=0.05,
            seed=seed,
        )
        small = config(64).model_copy(update={"hidden": 32, "head_dim": 8, "num_layers": 2})
        yield same_as_one(job, small, steps=2, documents=True).largest


def time_plans(
    comm: Comm,
    *,
    lengths: Sequence[int],
    assigners: Mapping[str, Mapping[str, Any]],
    turns: int,
    flops_per_s: float,
) -> dict[str, list[float]]:
    """Seconds of a step of one batch, without the update, by several plans in turn.

    ``alone`` for an assigner's name gives every sequence to all ranks by itself, in its exchange.
    """
    keep_freed_memory()
    longest = max(lengths)
    model = config(longest)
    job = train_job(
        seq_len=longest,
        global_batch=len(lengths) + len(lengths) % comm.world,
        parallel={"dp": comm.world},
        batching={"name": "bytescale", "capacity_tokens": longest},
    )
    session = RankSession(comm, job, model, SeededWeights(model, 0))
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

    def step(plan: Assignment) -> None:
        rows = ReplicaSequences(ids[:, :-1], targets, documents, 0, 0, plan=plan)
        session.engine.backward(rows, 1, float(sum(lengths)))
        session.engine.finish()

    arms = {name: functools.partial(step, plan) for name, plan in plans.items()}
    return in_turn(comm, arms, turns, together=False)


def _assigned(
    choice: Mapping[str, Any], lengths: Sequence[int], ranks: int, cost: SequenceCost
) -> Assignment:
    if choice["name"] == "alone":
        every = tuple(range(ranks))
        steps = tuple(MicroStep((number,), every) for number in range(len(lengths)))
        return Assignment(tuple(lengths), ranks, steps, choice["exchange"])
    plan: Assignment = table("assigner").build(choice).assign(lengths, ranks, cost)
    return plan

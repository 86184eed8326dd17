"""One process that does what ranks with routes do: of each micro-batch only some of the layers.

Skipping stages changes what is computed, so a split that skips is compared with this instead
of with the plain transformer: every micro-batch goes through the layers of its route, in their
order, and the gradient of a layer is the mean over the tokens that visited it.

Source: Blagoev et al., SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs
in Heterogeneous Networks, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from shoal.claims.lab.same_as_one import (
    Comparison,
    SeededWeights,
    TrainingOutcome,
    compare,
    on_rank,
    one_process,
)
from shoal.parallel.legal import check_split
from shoal.parallel.tensor.rows import ReplicaSequences
from shoal.plan.partition import cells_for

if TYPE_CHECKING:
    from shoal.ir import Schedule, TrainJob
    from shoal.ir.shape import ModelShape
    from shoal.model.config import ModelConfig
    from shoal.model.dropout import Dropout
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import Comm


@contextmanager
def visiting(model: Transformer, layers: Sequence[int]) -> Iterator[None]:
    """Let the model consist of these layers, in this order, and of nothing between them."""
    whole = model.blocks
    model.blocks = nn.ModuleList(whole[layer] for layer in layers)
    try:
        yield
    finally:
        model.blocks = whole


def layer_routes(shape: ModelShape, schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Numbers of the layers that each micro-batch of a schedule visits, in order."""
    cells = cells_for(shape, schedule, vocab_split="none")
    return tuple(
        tuple(layer for stage in schedule.route(mb) for layer in cells[schedule.cell_of[stage]])
        for mb in range(schedule.microbatches)
    )


def masked_backward(
    model: Transformer,
    rows: ReplicaSequences,
    routes: Sequence[Sequence[int]],
    *,
    replicas: int = 1,
    dropout: Dropout | None = None,
) -> float:
    """Forward and backward passes of one step; adds to the gradients, which begin as nothing.

    ``rows`` of every replica are cut evenly into micro-batches, one for each of ``routes``. Returns
    the mean loss of the counted tokens, each by the layers of its own route.
    """
    size = len(rows.inputs) // (replicas * len(routes))
    count = int((rows.targets != -100).sum())
    visited = [0] * len(model.blocks)
    total = 0.0
    for layers, parts in _together(len(rows.inputs), size, routes, apart=dropout is not None):
        targets = rows.targets[parts]
        for layer in layers:
            visited[layer] += int((targets != -100).sum())
        with visiting(model, layers):
            loss = model.loss_sum(
                rows.inputs[parts],
                targets,
                documents_BT=None if rows.documents is None else rows.documents[parts],
                dropout=None if dropout is None else dropout.at(rows.step, parts[0]),
            )
        (loss / count).backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    for block, seen in zip(model.blocks, visited, strict=True):
        for parameter in block.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(count / max(1, seen))
    return total / count


def _together(
    count: int, size: int, routes: Sequence[Sequence[int]], *, apart: bool
) -> Iterator[tuple[Sequence[int], list[int]]]:
    """(layers, rows) of micro-batches, those of one route as one; dropout keeps them apart."""
    rows: dict[object, list[int]] = {}
    layers: dict[object, Sequence[int]] = {}
    for number, start in enumerate(range(0, count, size)):
        route = routes[number % len(routes)]
        key = number if apart else tuple(route)
        layers[key] = route
        rows.setdefault(key, []).extend(range(start, start + size))
    return ((layers[key], found) for key, found in rows.items())


def one_process_masked(
    job: TrainJob, weights: SeededWeights, *, steps: int = 3, documents: bool = False
) -> TrainingOutcome:
    """The reference of :func:`same_as_masked`."""
    schedule = check_split(job, weights.config.shape())
    routes = layer_routes(weights.config.shape(), schedule)

    def backward(model: Transformer, rows: ReplicaSequences, dropout: Dropout | None) -> float:
        return masked_backward(model, rows, routes, replicas=job.parallel.dp, dropout=dropout)

    return one_process(job, weights, steps=steps, documents=documents, backward=backward)


def same_as_masked(
    job: TrainJob,
    config: ModelConfig,
    *,
    steps: int = 3,
    documents: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Comparison:
    """Train with the routes of ``job`` on threads and with the masked model, and compare.

    Args:
        job: its batch, split, sharding, clipping and dropout count.
        config: the model.
        steps: optimizer steps.
        documents: with a document mask.
        dtype: of weights and computation.

    Raises:
        PlanError: the split cannot run.
    """
    from shoal.claims.lab.thread_ranks import run_ranks

    weights = SeededWeights(config, job.seed, dtype)
    one = one_process_masked(job, weights, steps=steps, documents=documents)

    def on(comm: Comm) -> TrainingOutcome:
        return on_rank(job, weights, comm, steps=steps, documents=documents, dtype=dtype)

    return compare(one, run_ranks(job.parallel.world, on)[0], dtype)

"""Counts that the analytic models share: operations, weights and traffic of one rank."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.gpu.device import Accelerator
from shoal.cost.gpu.spec import block_weights
from shoal.cost.published.runs import PublishedRun


@dataclass(frozen=True)
class BaselineCounts:
    """Of one rank: FLOP for one micro-batch's forward pass, weights, bytes.

    Args:
        linear: FLOP of linear layers, the output layer shared by the stages.
        attention: FLOP of attention over the whole square.
        weights: on this rank.
        tokens: of a micro-batch.
        layers: blocks on this rank.
        again: additional forward passes per step, for recomputation.
        passes: micro-batches.
        sparse: share of blocks with experts.
    """

    linear: float
    attention: float
    weights: float
    tokens: float
    layers: float
    again: float
    passes: float
    sparse: float


def counts(run: PublishedRun) -> BaselineCounts:
    """The counts of a run."""
    shape = run.shape
    dense, rest, experts = block_weights(shape)
    sparse = mixture_layers(shape)
    active = shape.top_k / shape.num_experts if sparse else 0.0
    ends = shape.vocab_size * shape.hidden
    met = (shape.num_layers - sparse) * dense + sparse * (rest + active * experts) + ends
    common = ((shape.num_layers - sparse) * dense + sparse * rest) / run.pp + ends
    tokens = run.micro_batch * run.seq_len / run.cp
    ranks = run.tp * run.pp
    width = shape.num_heads * shape.head_dim
    return BaselineCounts(
        linear=2.0 * met * tokens / ranks,
        attention=4.0 * shape.num_layers * width * run.seq_len * tokens / ranks,
        weights=common / run.tp + sparse * experts / run.pp / run.ep,
        tokens=tokens,
        layers=shape.num_layers / run.pp,
        again=1.0 if run.recompute == "full" else 0.0,
        passes=run.passes,
        sparse=sparse / shape.num_layers,
    )


def link(gpu: Accelerator, ranks: int, stride: int) -> float:
    """Byte/s of one rank in a ring, before any efficiency."""
    inside = ranks * stride <= gpu.domain
    local = max(1, min(ranks, gpu.domain // max(1, stride)))
    return gpu.inside if inside else min(gpu.inside, local * gpu.outside)

"""How often a drafter's guesses are right, level by level and rank by rank.

The truth is what the target itself says, greedily, behind prompts that nothing was trained on.

Shapes: K levels, P judged places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.train.drafters.features import Features
from shoal.train.drafters.protocols import Learner

__all__ = ["RANKS", "calibrate", "judged", "table"]

# Guesses of a level that are counted.
RANKS = 16

_ROWS = 8


def judged(tokens_BT: Tensor, first: int, levels: int) -> Tensor:
    """The truth [K, P] of guesses at the places from ``first`` on, row by row.

    Level k at place t is judged by token t + 2 + k.
    """
    places = tokens_BT.shape[1] - levels - 1 - first
    return torch.stack(
        [tokens_BT[:, first + 2 + k : first + 2 + k + places].reshape(-1) for k in range(levels)]
    )


@torch.no_grad()
def calibrate(
    learner: Learner,
    features: Features,
    dtype: torch.dtype,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """The table a[k][i]: the share of judged places at which guess i of level k is right.

    Args:
        learner: the drafter.
        features: whose judged sequences are read.
        dtype: of the computation.
        progress: called with sequences done, sequences in all and what is being done.
    """
    first = features.index.prompt - 1  # there the target chooses the first token of its own
    counts: Tensor | None = None
    places = 0
    for start in range(0, features.index.judged, _ROWS):
        stop = min(start + _ROWS, features.index.judged)
        rows = features.rows("judged", range(start, stop), dtype)
        found, number = table(learner.guesses(rows, first), rows.tokens, first)
        counts = found if counts is None else counts + found
        places += number
        if progress is not None:
            progress(stop, features.index.judged, "judging guesses")
    assert counts is not None
    shares: Sequence[Sequence[float]] = (counts / places).tolist()
    return tuple(tuple(level) for level in shares)


def table(logits_KPV: Tensor, tokens_BT: Tensor, first: int) -> tuple[Tensor, int]:
    """How often each rank of each level is right [K, R], and at how many places that was seen."""
    levels, places, vocab = logits_KPV.shape
    truth = judged(tokens_BT, first, levels)
    ranks = min(RANKS, vocab)
    best = logits_KPV.float().topk(ranks, -1).indices
    return (best == truth.unsqueeze(-1)).sum(1).double(), places

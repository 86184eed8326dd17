"""How often a drafter's guesses are right, level by level and rank by rank.

The truth is what the target itself says, greedily, behind prompts that nothing was trained on.

Shapes: K levels, P judged places, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.train.drafters.features import Features
from shoal.train.drafters.protocols import DrafterLearner

# Guesses of a level that are counted.
RANKS = 16

_ROWS = 8
# Places of a sequence that are judged.
PLACES = 48


def judged(tokens_BT: Tensor, places: Sequence[int], levels: int) -> Tensor:
    """The truth [K, B P] of guesses at some places, row by row.

    Level k at place t is judged by token t + 2 + k.
    """
    at = torch.tensor(places)
    return torch.stack([tokens_BT[:, at + 2 + k].reshape(-1) for k in range(levels)])


def places_of(seq_len: int, prompt: int, levels: int, most: int = PLACES) -> list[int]:
    """Places of a sequence that are judged: where the target itself chose all that follows.

    Args:
        seq_len: tokens of the sequence.
        prompt: of them, those that were given.
        levels: guesses one after the other.
        most: so many places, evenly spread, are enough.
    """
    first, last = prompt - 1, seq_len - levels - 2
    count = min(most, last - first + 1)
    return [first + number * (last - first) // max(1, count - 1) for number in range(count)]


@torch.no_grad()
def calibrate(
    learner: DrafterLearner,
    features: Features,
    dtype: torch.dtype,
    levels: int,
    progress: Callable[[int, int, str], None] | None = None,
) -> tuple[tuple[float, ...], ...]:
    """The table a[k][i]: the share of judged places at which guess i of level k is right.

    Args:
        learner: the drafter.
        features: whose judged sequences are read.
        dtype: of the computation.
        levels: K.
        progress: called with sequences done, sequences in all and what is being done.
    """
    index = features.index
    places = places_of(index.seq_len, index.prompt, levels)
    counts = torch.zeros(())
    for start in range(0, index.judged, _ROWS):
        stop = min(start + _ROWS, index.judged)
        rows = features.rows("judged", range(start, stop), dtype)
        counts = counts + right(learner.guesses(rows, places), judged(rows.tokens, places, levels))
        if progress is not None:
            progress(stop, index.judged, "judging guesses")
    shares: Sequence[Sequence[float]] = (counts / (index.judged * len(places))).tolist()
    return tuple(tuple(level) for level in shares)


def right(logits_KPV: Tensor, truth_KP: Tensor) -> Tensor:
    """At how many places each rank of each level is right, [K, R]."""
    ranks = min(RANKS, logits_KPV.shape[-1])
    best = logits_KPV.float().topk(ranks, -1).indices
    return (best == truth_KP.unsqueeze(-1)).sum(1).double()

"""Training on texts of workers who write at once and see what the others have written so far.

A batch has a prompt and W streams in columns of their own. What a token sees, and how far behind
the first token of each block it stands, follows from the step in which every token was written:
the view of :class:`~shoal.serve.decode.hogwild.contiguous.ContiguousLayout` at that time. The model
is the one transformer; queries are turned for each block, as they are when such workers are served.

Shapes: B texts, T columns, N = B T tokens, G = W + 1 blocks, H query heads, K key/value heads,
d head_dim.

Source: Rodionov et al., Hogwild! Inference, 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import DataError, require
from shoal.model.rope import rotate, tables_at
from shoal.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class ConcurrentText:
    """What workers wrote on one prompt: tokens of each, and when each of these was written."""

    prompt: Sequence[int]
    tokens: Sequence[Sequence[int]]
    steps: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of texts.

    Args:
        tokens: [B, T], columns of the prompt, then those of each worker.
        targets: [B, T], the next token of the same worker; -100 for none.
        places: [B, T], place of each token in its own block.
        back: [B, T, G], places from the first token of each block to that of the token's own.
        hidden: [B, T, T], what a token does not see.
        widths: [G], columns of each block.
    """

    tokens: Tensor
    targets: Tensor
    places: Tensor
    back: Tensor
    hidden: Tensor
    widths: tuple[int, ...]


def batch_of(texts: Sequence[ConcurrentText]) -> TextBatch:
    """Texts side by side.

    Raises:
        DataError: they have different numbers of workers, or steps that do not rise.
    """
    workers = len(texts[0].tokens)
    for text in texts:
        rises = all(
            len(tokens) == len(steps) and all(a < b for a, b in pairwise(steps))
            for tokens, steps in zip(text.tokens, text.steps, strict=True)
        )
        require(
            len(text.tokens) == workers and rises,
            "texts",
            (len(text.tokens), text.steps),
            expected=f"{workers} workers, and a later step for each token of one",
            error=DataError,
        )
    widths = (
        max(len(text.prompt) for text in texts),
        *(max(1, *(len(text.tokens[w]) for text in texts)) for w in range(workers)),
    )
    first = np.cumsum((0, *widths))
    size, columns = len(texts), int(first[-1])
    tokens = np.zeros((size, columns), dtype=np.int64)
    targets = np.full((size, columns), -100)
    places = np.concatenate([np.arange(width) for width in widths])
    back = np.zeros((size, columns, workers + 1), dtype=np.int64)
    # Padding is written never, and sees what stands before it in its block.
    steps = np.full((size, columns), np.iinfo(np.int64).max)
    for row, text in enumerate(texts):
        length = len(text.prompt)
        tokens[row, :length], steps[row, :length] = text.prompt, -1
        for worker, (stream, when) in enumerate(zip(text.tokens, text.steps, strict=True), 1):
            start, stop = first[worker], first[worker] + len(stream)
            tokens[row, start:stop], steps[row, start:stop] = stream, when
            targets[row, start : stop - 1] = stream[1:]
        for worker in range(1, workers + 1):
            start, stop = first[worker], first[worker + 1]
            now = steps[row, start:stop]
            # Places from the end of the view backwards: own block, then the others, the last first.
            distance = np.zeros(len(now), dtype=np.int64)
            for other in range(workers, 0, -1):
                if other == worker:
                    continue
                theirs = steps[row, first[other] : first[other + 1]]
                written = theirs < np.iinfo(np.int64).max
                distance += (written & (theirs <= now[:, None])).sum(1)
                back[row, start:stop, other] = distance
            back[row, start:stop, 0] = distance + length
    block = np.repeat(np.arange(workers + 1), widths)
    same = block[:, None] == block
    causal = np.arange(columns)[:, None] >= np.arange(columns)
    written = steps < np.iinfo(np.int64).max
    others = written[:, None, :] & (steps[:, None, :] <= steps[:, :, None])
    seen = np.where(same, causal, others & (block[:, None] > 0))
    return TextBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        torch.from_numpy(np.broadcast_to(places, (size, columns)).copy()),
        torch.from_numpy(back),
        torch.from_numpy(~seen),
        widths,
    )


class _Mixer:
    """A :class:`~shoal.model.attention.Mixer` of a batch, with gradients."""

    def __init__(self, model: Transformer, batch: TextBatch, dtype: torch.dtype) -> None:
        self._batch = batch
        frequencies, _ = model.unstretched
        self._turns = []
        for back_BT in batch.back.unbind(-1):
            tables = tables_at(back_BT.reshape(-1), frequencies, 1.0, dtype)
            self._turns.append(tuple(table.view(*back_BT.shape, 1, -1) for table in tables))
        hidden = batch.hidden.unsqueeze(1)
        self._mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """What the queries see [N, H, d]; nothing is kept."""
        size, columns = self._batch.tokens.shape
        q, k, v = (x.reshape(size, columns, *x.shape[1:]) for x in (q_NHd, k_NKd, v_NKd))
        group = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
        scores = []
        for (cos, sin), keys in zip(
            self._turns, torch.split(k, [*self._batch.widths], 2), strict=True
        ):
            turned = rotate(q, cos.to(q.dtype), sin.to(q.dtype)).transpose(1, 2)
            scores.append(turned @ keys.transpose(2, 3))
        weights = torch.cat(scores, -1) * q.shape[-1] ** -0.5 + self._mask.to(q.dtype)
        out: Tensor = weights.softmax(-1) @ v
        return out.transpose(1, 2).reshape(q_NHd.shape)


def scores_of(model: Transformer, batch: TextBatch) -> Tensor:
    """Scores behind every token [B, T, V]."""
    dtype = model.weight.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    x_ND = model.embed(batch.tokens.reshape(-1)).to(dtype)
    mixer = _Mixer(model, batch, dtype)
    hidden = model.finished(*model.through(x_ND, batch.places.reshape(-1), mixer))
    return model.logits(hidden).view(*batch.tokens.shape, -1)


def loss_of(model: Transformer, batch: TextBatch) -> Tensor:
    """Mean cross-entropy of what the workers write, nats."""
    scores = scores_of(model, batch).flatten(0, 1).float()
    return F.cross_entropy(scores, batch.targets.reshape(-1))

"""Desynchronised residual: of n sums over ranks one is kept, and the ranks differ in between.

Every rank r has a residual stream of its own. Sub-layer i (attention and feed-forward in turn,
from 1) gives it the rank's share y_i^r of the output, of its heads or its part of the width::

    x^r <- x^r + y_i^r                               in between
    x^r <- sum over ranks q of (x^q / R + y_i^q)     every n-th sub-layer, and the last

so a sum there brings the mean of the streams and all shares of the output; with n = 1 it is the
standard residual. The number R of ranks is a part of the model: with tensor parallelism over R
ranks each has its stream, and one device computes all R of them, side by side on the batch axis.

Shapes: R ranks, B sequences, N tokens, D hidden.

Source: Zhang et al., Ladder-Residual: Parallelism-Aware Architecture for Accelerating Large Model
Inference with Communication Overlapping, 2025, desync residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.model.attention import Mixer
    from shoal.model.transformer import Transformer, TransformerBlock

Join = Callable[[Tensor, Tensor, bool], Tensor]
"""Streams and outputs that were added up over the ranks; whether it is the last time."""


def apart(x: Tensor, ranks: int) -> Tensor:
    """Every rank's stream, equal at first, along the first axis."""
    return x.repeat(ranks, *[1] * (x.dim() - 1)) if ranks > 1 else x


def together(x: Tensor, ranks: int) -> Tensor:
    """The stream behind the last sum, which all ranks have."""
    if ranks == 1:
        return x
    return x[: len(x) // ranks]


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    return x.reshape(ranks, len(x) // ranks, *x.shape[1:])


def own(x: Tensor, ranks: int, groups: Sequence[int]) -> Tensor:
    """Of each rank's projection [R * B, ..., rows] its own rows of every group, [B, ..., rows]."""
    if ranks == 1:
        return x
    streams = torch.split(_by_rank(x, ranks), list(groups), -1)
    parts = [group[rank].chunk(ranks, -1)[rank] for group in streams for rank in range(ranks)]
    return torch.cat(parts, -1)


def shared(x: Tensor, ranks: int) -> Tensor:
    """Of [B, ..., columns] what each rank has, and zeros for the rest: [R * B, ..., columns]."""
    if ranks == 1:
        return x
    width = x.shape[-1] // ranks
    owner = torch.arange(x.shape[-1], device=x.device) // width
    mine = owner == torch.arange(ranks, device=x.device).view(-1, *[1] * x.dim())
    return (x * mine.to(x.dtype)).flatten(0, 1)


def averaged(ranks: int) -> Join:
    """The sum on one device, which has all streams."""

    def join(x: Tensor, output: Tensor, last: bool) -> Tensor:
        return apart(_by_rank(x / ranks + output, ranks).sum(0), ranks)

    return join


def wired(
    block: TransformerBlock,
    x: Tensor,
    attend: Callable[[Tensor], Tensor],
    feed: Callable[[Tensor], Tensor],
) -> Tensor:
    """One block.

    Args:
        block: its norms, and when and how it sums.
        x: streams.
        attend: the ranks' shares of attention, of normalised streams.
        feed: the same of the feed-forward layer.
    """
    x = _added(block, 0, x, attend(block.attention_norm(x)), block.join)
    return _added(block, 1, x, feed(block.mlp_norm(x)), block.join)


def _added(block: TransformerBlock, place: int, x: Tensor, output: Tensor, join: Join) -> Tensor:
    if not block.sums[place]:
        return x + output
    return join(x, output, block.last and place == 1)


def through(
    model: Transformer,
    x_ND: Tensor,
    position_N: Tensor,
    mixer: Mixer,
    rows_R: Tensor | None = None,
    join: Join | None = None,
) -> tuple[Tensor, Tensor]:
    """As :meth:`~shoal.model.transformer.Transformer.through`; what is left to add is zero.

    Args:
        model: with desynchronised residual.
        x_ND: the embedding.
        position_N: place of each token in its sequence.
        mixer: keeps the keys and values, and knows what each token sees.
        rows_R: tokens that are needed behind the blocks; all, if not given.
        join: sums over ranks, where these share the model.
    """
    turn = model.turn(position_N, x_ND.dtype)
    ranks = model.config.architecture.residual.apart
    x = apart(x_ND, ranks)
    blocks: list[TransformerBlock] = list(model.blocks)  # type: ignore[arg-type]
    for block in blocks:
        add = join or block.join
        seen = block.attention.flat(block.attention_norm(x), turn, mixer)
        if block is blocks[-1] and rows_R is not None:
            seen = seen[rows_R]
            x = _by_rank(x, ranks)[:, rows_R].flatten(0, 1)
            if not len(rows_R):
                return x, x
        x = _added(block, 0, x, block.attention.o_proj(shared(seen, ranks)), add)
        x = _added(block, 1, x, block.mlp(block.mlp_norm(x)), add)
    x = together(x, ranks)
    return x, torch.zeros_like(x)

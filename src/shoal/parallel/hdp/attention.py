"""Attention of one rank's tokens of a micro-step over all that its ranks have of the sequences.

One rank alone goes through its sequences one after another, so a packed buffer costs the squares
of their lengths and not that of its own. Ranks that share a buffer go round a ring or swap heads
for sequence, by messages of the world's communicator: no group is made. Messages are as long as
the largest share; what is padding in them is never looked at.

Source: Ge et al., ByteScale, 2025, section 4; Liu et al., Ring Attention, 2023; Jacobs et al.,
DeepSpeed-Ulysses, 2023.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.cost.training.sequences import Exchange
from shoal.ir.mask import Mask
from shoal.model.attention import attend
from shoal.parallel.context.pieces import AttentionPiece
from shoal.parallel.context.run.peers import ContextPeers, PeerView
from shoal.parallel.context.run.ring import ring_attention
from shoal.parallel.context.run.ulysses import ulysses_attention
from shoal.parallel.hdp.slices import cuts, shares
from shoal.parallel.protocols import Comm
from shoal.parallel.tensor.block import Mix


class _Shares(PeerView):
    """A view of members that may have no tokens."""

    def pieces(self, queries: int, keys: int) -> tuple[AttentionPiece, ...]:
        if not (len(self.positions[queries]) and len(self.positions[keys])):
            return ()
        return super().pieces(queries, keys)


def mix_of(lengths: Sequence[int], ranks: Sequence[int], exchange: Exchange, world: Comm) -> Mix:
    """Attention for this rank's tokens of a micro-step."""
    if len(ranks) == 1:
        return _alone(cuts(lengths))
    total = sum(lengths)
    mask = Mask.document(np.repeat(np.arange(len(lengths)), lengths))
    positions = shares(total, len(ranks), exchange)
    peers = ContextPeers(world, ranks)
    own, largest = len(positions[peers.rank]), max(map(len, positions))

    def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        view = _Shares((mask,), 1, positions)
        return ring_attention(q, padded(k), padded(v), view, peers)

    def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Shorter pieces come last, so padding lies behind all tokens.
        view = _Shares((mask,), 1, [np.concatenate(positions)])
        inner, outer = peers, ContextPeers(world, [world.rank])
        return ulysses_attention(padded(q), padded(k), padded(v), view, inner, outer)[:, :, :own]

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, largest - own)) if own < largest else x

    chosen = ring if exchange == "ring" else ulysses

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Statistics stay in their wide type whatever the caller's autocast says.
        with torch.autocast(q.device.type, enabled=False):
            return chosen(q, k, v)

    return mix


def _alone(ends: list[int]) -> Mix:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(ends) == 2:
            return attend(q, k, v, None, causal=ends[1] > 1)
        parts = [
            attend(
                q[:, :, start:stop],
                k[:, :, start:stop],
                v[:, :, start:stop],
                None,
                causal=stop - start > 1,
            )
            for start, stop in itertools.pairwise(ends)
        ]
        return torch.cat(parts, 2)

    return mix

"""Two rings: keys go round and fill whole rows of scores, then values go round.

Shapes: S [B, H, n, T], rows of scores in the order of the members.

Source: Li et al., Sequence Parallelism: Long Sequence Training from System Perspective, 2021.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.pieces import AttentionPiece
from shoal.parallel.context.run.block import block_scores, grouped, summed, wide
from shoal.parallel.context.run.peers import ContextPeers, PeerView, TravelingSums, circulate


class _RSA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers
    ) -> Tensor:
        batch, heads, tokens, _ = q.shape
        kind = wide(q.dtype)
        size = (batch, heads, tokens, tokens * peers.world)
        scores = torch.full(size, -math.inf, dtype=kind, device=q.device)
        for source, key in circulate(k.contiguous(), peers, "k"):
            for piece in view.pieces(peers.rank, source):
                rows, queries, keys = piece.rows, piece.q, piece.k
                _part(scores, piece, source).copy_(
                    block_scores(q[rows, :, queries], key[rows, :, keys], piece)
                )
        blind = scores.amax(-1, keepdim=True) == -math.inf
        weights = torch.softmax(scores, -1).masked_fill_(blind, 0.0).to(q.dtype)
        del scores
        out = torch.zeros(q.shape, dtype=kind, device=q.device)
        for source, value in circulate(v.contiguous(), peers, "v"):
            for piece in view.pieces(peers.rank, source):
                rows, queries, keys = piece.rows, piece.q, piece.k
                out[rows, :, queries] += grouped(
                    _part(weights, piece, source), value[rows, :, keys]
                )
        ctx.save_for_backward(q, k, v, weights)
        ctx.view, ctx.peers = view, peers
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        view, peers = ctx.view, ctx.peers
        kind, kv_heads = wide(q.dtype), k.shape[1]
        scores_grad = torch.zeros(weights.shape, dtype=kind, device=q.device)
        homing = TravelingSums(peers, "v_grad")
        for source, value in circulate(v.contiguous(), peers, "v"):
            homing.start()
            share = torch.zeros(value.shape, dtype=kind, device=q.device)
            for piece in view.pieces(peers.rank, source):
                rows, queries, keys = piece.rows, piece.q, piece.k
                out_grad = grad[rows, :, queries]
                _part(scores_grad, piece, source).copy_(
                    grouped(out_grad, value[rows, :, keys].transpose(-1, -2))
                )
                share[rows, :, keys] += summed(_part(weights, piece, source), out_grad, kv_heads)
            homing.add(share)
        v_grad = homing.finish()
        # Backward of the softmax over whole rows, which lie here.
        scores_grad.mul_(weights)
        scores_grad.sub_(weights * scores_grad.sum(-1, keepdim=True))
        scores_grad.mul_(q.shape[-1] ** -0.5)
        q_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        homing = TravelingSums(peers, "k_grad")
        for source, key in circulate(k.contiguous(), peers, "k"):
            homing.start()
            share = torch.zeros(key.shape, dtype=kind, device=q.device)
            for piece in view.pieces(peers.rank, source):
                rows, queries, keys = piece.rows, piece.q, piece.k
                part = _part(scores_grad, piece, source)
                q_grad[rows, :, queries] += grouped(part, key[rows, :, keys].to(kind))
                share[rows, :, keys] += summed(part, q[rows, :, queries].to(kind), kv_heads)
            homing.add(share)
        k_grad = homing.finish()
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None


def _part(whole: Tensor, piece: AttentionPiece, source: int) -> Tensor:
    """The cells of a piece in rows [B, H, n, T], whose columns are ordered by member."""
    start = source * whole.shape[2]
    columns = slice(start + piece.k.start, start + piece.k.stop)
    return whole[piece.rows, :, piece.q, columns]


def rsa_attention(q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers) -> Tensor:
    """Attention of this member's queries [B, H, n, d] over the keys of all members."""
    out: Tensor = _RSA.apply(q, k, v, view, peers)  # type: ignore[no-untyped-call]
    return out

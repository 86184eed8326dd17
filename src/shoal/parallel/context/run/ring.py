"""Keys and values go round a ring; outputs are put together by online softmax.

Source: Liu et al., Ring Attention with Blockwise Transformers, 2023; Li et al., Sequence
Parallelism, 2021 (the ring).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.run.block import AttentionTotal, backward_block, row_sums, wide
from shoal.parallel.context.run.peers import ContextPeers, PeerView, TravelingSums, circulate


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers
    ) -> Tensor:
        total = AttentionTotal(q)
        for source, kv in circulate(torch.stack([k, v]), peers, "kv"):
            total.attend(kv[0], kv[1], view.pieces(peers.rank, source))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.view, ctx.peers = view, peers
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        view, peers = ctx.view, ctx.peers
        kind, delta = wide(q.dtype), row_sums(grad, out)
        q_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        homing = TravelingSums(peers, "kv_grad")
        for source, kv in circulate(torch.stack([k, v]), peers, "kv"):
            homing.start()
            kv_grad = torch.zeros(kv.shape, dtype=kind, device=q.device)
            pieces = view.pieces(peers.rank, source)
            backward_block(grad, q, kv, lse, delta, pieces, q_grad, kv_grad)
            homing.add(kv_grad)
        k_grad, v_grad = homing.finish()
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None


def ring_attention(q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers) -> Tensor:
    """Attention of this member's queries [B, H, n, d] over the keys of all members."""
    out: Tensor = _Ring.apply(q, k, v, view, peers)  # type: ignore[no-untyped-call]
    return out

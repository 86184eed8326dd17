"""Rings inside a ring: chunks go round the inner ring while the next set comes from outside.

An outer message has a whole inner round to arrive.

Source: Gu et al., LoongTrain, 2024 (double-ring attention).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.run.block import AttentionTotal, backward_block, row_sums, wide
from shoal.parallel.context.run.peers import ContextPeers, PeerView, TravelingSums, circulate


class _DoubleRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        view: PeerView,
        inner: ContextPeers,
        outer: ContextPeers,
    ) -> Tensor:
        total = AttentionTotal(q)
        own = outer.rank * inner.world + inner.rank
        for group, start in circulate(torch.stack([k, v]), outer, "outer_kv"):
            for member, kv in circulate(start, inner, "kv"):
                total.attend(kv[0], kv[1], view.pieces(own, group * inner.world + member))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.view, ctx.inner, ctx.outer = view, inner, outer
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        view, inner, outer = ctx.view, ctx.inner, ctx.outer
        kind, delta = wide(q.dtype), row_sums(grad, out)
        own = outer.rank * inner.world + inner.rank
        q_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        outward = TravelingSums(outer, "outer_kv_grad")
        for group, start in circulate(torch.stack([k, v]), outer, "outer_kv"):
            outward.start()
            inward = TravelingSums(inner, "kv_grad")
            for member, kv in circulate(start, inner, "kv"):
                inward.start()
                share = torch.zeros(kv.shape, dtype=kind, device=q.device)
                pieces = view.pieces(own, group * inner.world + member)
                backward_block(grad, q, kv, lse, delta, pieces, q_grad, share)
                inward.add(share)
            outward.add(inward.finish())
        k_grad, v_grad = outward.finish()
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype), None, None, None


def double_ring_attention(
    q: Tensor, k: Tensor, v: Tensor, view: PeerView, inner: ContextPeers, outer: ContextPeers
) -> Tensor:
    """Attention of this rank's queries [B, H, n, d]; ``view`` is by rank, inner fastest."""
    out: Tensor = _DoubleRing.apply(q, k, v, view, inner, outer)  # type: ignore[no-untyped-call]
    return out

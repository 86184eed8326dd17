"""Every rank gathers all keys and values; their gradients are reduce-scattered.

The gather travels while the own block is computed. Backward gathers again rather than keep
whole sequences of keys and values.

Source: Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.run.block import AttentionTotal, backward_block, row_sums, wide
from shoal.parallel.context.run.peers import PeerView
from shoal.parallel.protocols import Comm, Pending


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        total = AttentionTotal(q)
        own, whole, pending = _gather(k, v, comm)
        total.attend(own[0], own[1], view.pieces(comm.rank, comm.rank))
        pending.wait()
        for source in range(comm.world):
            if source != comm.rank:
                key, value = whole[source]
                total.attend(key, value, view.pieces(comm.rank, source))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.view, ctx.comm = view, comm
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        view, comm = ctx.view, ctx.comm
        kind, delta = wide(q.dtype), row_sums(grad, out)
        own, whole, pending = _gather(k, v, comm)
        q_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        grads = torch.zeros(whole.shape, dtype=kind, device=q.device)
        for step in range(comm.world):
            source = (comm.rank + step) % comm.world
            if step == 1:
                pending.wait()
            backward_block(
                grad,
                q,
                whole[source] if step else own,
                lse,
                delta,
                view.pieces(comm.rank, source),
                q_grad,
                grads[source],
            )
        if comm.world == 1:
            pending.wait()
        kv_grad = torch.empty(own.shape, dtype=kind, device=q.device)
        comm.reduce_scatter(kv_grad, grads, tag="context.kv_grad").wait()
        return q_grad.to(q.dtype), kv_grad[0].to(k.dtype), kv_grad[1].to(v.dtype), None, None


def _gather(k: Tensor, v: Tensor, comm: Comm) -> tuple[Tensor, Tensor, Pending]:
    """Own [2, B, K, n, d] and, once it has come, that of all ranks [N, 2, B, K, n, d]."""
    own = torch.stack([k, v])
    whole = own.new_empty((comm.world, *own.shape))
    return own, whole, comm.all_gather(whole, own, tag="context.kv")


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
    """Attention of this rank's queries [B, H, n, d] over the keys of all ranks."""
    out: Tensor = _AllGather.apply(q, k, v, view, comm)  # type: ignore[no-untyped-call]
    return out

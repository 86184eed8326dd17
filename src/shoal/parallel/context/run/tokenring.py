"""Queries go forward, partial outputs come straight back; keys and values stay.

At step i a rank has the queries of the rank i behind. It passes them on while it computes,
then sends the result to its owner, which travels while step i + 1 computes. What a rank sees
nothing of is not sent back; both ends know that from the masks.

Backward, by the same stillness: queries, gradients of outputs and both statistics go
forward, gradients of queries come back, those of keys and values add up where they stay.

Source: Wang et al., TokenRing, 2024; the backward pass is our own design.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.run.block import AttentionTotal, backward_block, row_sums, wide
from shoal.parallel.context.run.peers import ContextPeers, PeerView, circulate


class _Returns:
    """Results on their way to their owners, one step at a time.

    Args:
        peers: the ring.
        view: says which results are empty and do not travel.
        like: tensors as large as one result.
        merge: takes in a result of this rank's own queries.
    """

    def __init__(
        self,
        peers: ContextPeers,
        view: PeerView,
        like: list[Tensor],
        merge: Callable[..., object],
        tag: str,
    ) -> None:
        self.peers, self.view, self.like, self.merge, self.tag = peers, view, like, merge, tag
        self._wait: Callable[[], None] | None = None
        self._arriving: list[Tensor] = []

    def start(self, step: int, result: list[Tensor]) -> None:
        """Send ``result``, empty if nothing is seen, so far back; expect one from as far ahead.

        The last one may still travel: results of two steps have links of their own.
        """
        peers = self.peers
        target, source = (peers.rank - step) % peers.world, (peers.rank + step) % peers.world
        seen = self.view.pieces(peers.rank, source)
        arriving = [torch.empty_like(x) for x in self.like] if seen else []
        wait = peers.swap(target, result, source, arriving, self.tag)
        self.finish()
        self._wait, self._arriving = wait, arriving

    def finish(self) -> None:
        """Merge what was expected last."""
        if self._wait is not None:
            self._wait()
            self._wait = None
            if self._arriving:
                self.merge(*self._arriving)


class _TokenRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers
    ) -> Tensor:
        total = AttentionTotal(q)
        returns = _Returns(
            peers, view, [torch.empty_like(q).contiguous(), total.lse], total.add, "out"
        )
        for step, (owner, queries) in enumerate(circulate(q.contiguous(), peers, "q")):
            pieces = view.pieces(owner, peers.rank)
            if step == 0:
                total.attend(k, v, pieces)
            else:
                result = []
                if pieces:
                    other = AttentionTotal(queries)
                    other.attend(k, v, pieces)
                    result = [other.out.to(q.dtype), other.lse]
                returns.start(step, result)
        returns.finish()
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.view, ctx.peers = view, peers
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        view, peers = ctx.view, ctx.peers
        kind = wide(q.dtype)
        own_grad = torch.zeros(q.shape, dtype=kind, device=q.device)
        kv = torch.stack([k, v])
        kv_grad = torch.zeros(kv.shape, dtype=kind, device=q.device)
        returns = _Returns(peers, view, [torch.empty_like(q).contiguous()], own_grad.add_, "q_grad")
        moving = circulate(torch.stack([q, grad]), peers, "q")
        statistics = circulate(torch.stack([lse, row_sums(grad, out)]), peers, "statistics")
        for step, ((owner, pair), (_, sums)) in enumerate(zip(moving, statistics, strict=True)):
            pieces = view.pieces(owner, peers.rank)
            q_grad = own_grad if step == 0 else torch.zeros_like(own_grad)
            backward_block(pair[1], pair[0], kv, sums[0], sums[1], pieces, q_grad, kv_grad)
            if step:
                returns.start(step, [q_grad.to(q.dtype)] if pieces else [])
        returns.finish()
        return own_grad.to(q.dtype), kv_grad[0].to(k.dtype), kv_grad[1].to(v.dtype), None, None


def tokenring_attention(
    q: Tensor, k: Tensor, v: Tensor, view: PeerView, peers: ContextPeers
) -> Tensor:
    """Attention of this member's queries [B, H, n, d] over the keys of all members."""
    out: Tensor = _TokenRing.apply(q, k, v, view, peers)  # type: ignore[no-untyped-call]
    return out

"""All-to-all between heads and sequence: then attention is over whole rows of fewer heads.

With more members than key/value heads, each such head goes to several members, whose
gradients add up.

Source: Jacobs et al., DeepSpeed-Ulysses, 2023; Fang and Zhao, USP, 2024 (ring outside).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.parallel.context.run.block import wide
from shoal.parallel.context.run.peers import ContextPeers, PeerView
from shoal.parallel.context.run.ring import ring_attention


class _ToHeads(torch.autograd.Function):
    """[B, H, n, d] and twice [B, K, n, d] to [B, H / U + 2 K', n U, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, peers: ContextPeers) -> Tensor:
        ctx.sizes, ctx.peers = (q.shape[1], k.shape[1]), peers
        shares = zip(*(_by_member(x, peers.world) for x in (q, k, v)), strict=True)
        packed = [torch.cat(share, 1) for share in shares]
        return torch.cat(peers.exchange(packed, "heads"), 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (heads, kv_heads), peers = ctx.sizes, ctx.peers
        members = peers.world
        shares = [x.contiguous() for x in grad.chunk(members, 2)]
        result = peers.exchange(shares, "heads_grad")
        kv_each = max(1, kv_heads // members)
        sizes = [heads // members, kv_each, kv_each]
        q_parts, k_parts, v_parts = zip(*(x.split(sizes, 1) for x in result), strict=True)
        return (
            torch.cat(q_parts, 1),
            _summed_heads(torch.cat(k_parts, 1), kv_heads),
            _summed_heads(torch.cat(v_parts, 1), kv_heads),
            None,
        )


class _ToSequence(torch.autograd.Function):
    """[B, H / U, n U, d] to [B, H, n, d]."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, peers: ContextPeers) -> Tensor:
        ctx.peers = peers
        shares = [x.contiguous() for x in out.chunk(peers.world, 2)]
        return torch.cat(peers.exchange(shares, "out"), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        peers = ctx.peers
        shares = [x.contiguous() for x in grad.chunk(peers.world, 1)]
        return torch.cat(peers.exchange(shares, "out_grad"), 2), None


def _by_member(x: Tensor, members: int) -> list[Tensor]:
    """The heads of each member; one head goes to several if there are too few."""
    if x.shape[1] >= members:
        return list(x.chunk(members, 1))
    copies = members // x.shape[1]
    return [x[:, member // copies, None] for member in range(members)]


def _summed_heads(grads: Tensor, heads: int) -> Tensor:
    """[B, copies of heads, n, d] summed over the copies: [B, heads, n, d]."""
    copies = grads.shape[1] // heads
    if copies == 1:
        return grads
    batch, _, tokens, dim = grads.shape
    by_head = grads.to(wide(grads.dtype)).view(batch, heads, copies, tokens, dim)
    return by_head.sum(2).to(grads.dtype)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, view: PeerView, inner: ContextPeers, outer: ContextPeers
) -> Tensor:
    """Attention of this rank's queries [B, H, n, d] over the keys of all ranks.

    Args:
        q: [B, H, n, d].
        k: [B, K, n, d].
        v: [B, K, n, d].
        view: by members of ``outer``, with the positions of all of ``inner`` together.
        inner: ranks that swap heads for sequence.
        outer: the ring of the result.
    """
    heads = q.shape[1] // inner.world
    kv_heads = max(1, k.shape[1] // inner.world)
    packed: Tensor = _ToHeads.apply(q, k, v, inner)  # type: ignore[no-untyped-call]
    some_q, some_k, some_v = torch.split(packed, [heads, kv_heads, kv_heads], 1)
    mixed = ring_attention(some_q, some_k, some_v, view, outer)
    out: Tensor = _ToSequence.apply(mixed, inner)  # type: ignore[no-untyped-call]
    return out

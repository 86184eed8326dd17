"""What the ranks of claim [91] TokenRing do: attention over a sequence that they share, timed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.claims.ranks import in_turn
from shoal.core.parts import table
from shoal.ir.mask import Mask
from shoal.parallel.context.run.block import AttentionTotal
from shoal.parallel.context.run.peers import PeerView
from shoal.train.allocator import keep_freed_memory

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm


def _drawn(comm: Comm, tokens: int, heads: int, head_dim: int) -> Tensor:
    """Queries, keys, values and gradients of this rank, [4, 1, H, n, d]."""
    source = torch.Generator().manual_seed(comm.rank)
    return torch.randn(4, 1, heads, tokens, head_dim, generator=source)


def blocks_s(comm: Comm, *, tokens: int, heads: int, head_dim: int, turns: int) -> list[float]:
    """Seconds of attention between this rank's queries and the next rank's keys."""
    keep_freed_memory()
    q, k, v, _ = _drawn(comm, tokens, heads, head_dim)
    masks = (Mask.causal(tokens * comm.world),)
    positions = table("context").build("zigzag").positions(tokens * comm.world, comm.world)
    pieces = PeerView(masks, 1, positions).pieces(comm.rank, (comm.rank + 1) % comm.world)
    return in_turn(comm, {"block": lambda: AttentionTotal(q).attend(k, v, pieces)}, turns)["block"]


def attention_s(
    comm: Comm,
    *,
    parts: Mapping[str, str],
    tokens: int,
    heads: int,
    head_dim: int,
    turns: int,
) -> dict[str, list[float]]:
    """Seconds of the forward pass, and of both passes, by arm and turn."""
    keep_freed_memory()
    *inputs, grad = _drawn(comm, tokens, heads, head_dim)
    masks = [Mask.causal(tokens * comm.world)]
    built = {arm: table("context").build(name) for arm, name in parts.items()}

    def forward(arm: str) -> None:
        with torch.no_grad():
            built[arm].attend(*inputs, masks, comm)

    def both(arm: str) -> None:
        leaves = [x.detach().requires_grad_() for x in inputs]
        torch.autograd.backward(built[arm].attend(*leaves, masks, comm), grad)

    arms = {
        f"{arm} {passes.__name__}": lambda arm=arm, passes=passes: passes(arm)
        for passes in (forward, both)
        for arm in parts
    }
    return in_turn(comm, arms, turns)

"""Ring self-attention in two rings, keys and then values, which keeps whole rows of scores.

Each rank holds rows of [n, T] scores, B Z L^2 / N elements a layer in the paper's letters: no
online softmax, but memory that grows with the square of the length. ``ring`` computes the same
without them.

Source: Li et al., Sequence Parallelism: Long Sequence Training from System Perspective, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.cost.context.traffic import ContextTraffic, ring_traffic
from shoal.parallel.context.base import ContextAttention

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class RSA(ContextAttention):
    """Ring exchange of keys, then of values; every rank holds one contiguous chunk."""

    name: ClassVar[str] = "rsa"
    paired: ClassVar[bool] = False

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """Elements that one rank sends for one layer."""
        result = ring_traffic(tokens, heads, kv_heads, head_dim, world)
        return result._replace(messages=2 * result.messages)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.peers import ContextPeers
        from shoal.parallel.context.run.rsa import rsa_attention

        return rsa_attention(q, k, v, view, ContextPeers(comm))

"""TokenRing: queries travel forward, partial outputs straight back, keys and values stay.

Both directions of a link are used at once: of multi-head attention the busier one carries half
of what a ring of keys and values does. With grouped queries keys and values are the smaller
load, and ``zigzag`` is cheaper. A return over distance j takes j hops on a physical ring and
one where every pair of ranks has a link; on half-duplex links there is no gain.

Source: Wang et al., TokenRing, 2024; the backward pass is our own design.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from shoal.core.parts import part
from shoal.cost.context.traffic import ContextTraffic, tokenring_traffic
from shoal.ir import Machine, Work
from shoal.parallel.context.base import ContextAttention
from shoal.parallel.context.cost import waits

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class TokenRing(ContextAttention):
    """Ring exchange of queries; outputs return. Every rank holds an early and a late chunk."""

    name: ClassVar[str] = "tokenring"
    paired: ClassVar[bool] = True

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Where a ring of keys and values is waited for, and queries are no more than these."""
        if work.shape.num_kv_heads == work.shape.num_heads and waits(work, machine):
            yield cls()

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """Elements that one rank sends for one layer."""
        return tokenring_traffic(tokens, heads, kv_heads, head_dim, world)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.peers import ContextPeers
        from shoal.parallel.context.run.tokenring import tokenring_attention

        return tokenring_attention(q, k, v, view, ContextPeers(comm))

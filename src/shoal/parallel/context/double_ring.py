"""Double-ring attention: rings of neighbours inside a ring of groups.

As many bytes as one ring, but only 1 / ``inner`` of the hops leave a group, and each of those
has a whole inner round to arrive.

Source: Gu et al., LoongTrain, 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Ge

from shoal.core.parts import part
from shoal.cost.context.traffic import ContextTraffic, ring_traffic
from shoal.ir import Machine, Work
from shoal.parallel.context.base import ContextAttention, group_of, near_ranks
from shoal.parallel.context.cost import Route, waits

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class DoubleRing(ContextAttention):
    """Inner rings within groups and an outer ring across groups; zigzag positions.

    Args:
        inner: ranks of a group, a divisor of cp.
    """

    inner: Annotated[int, Ge(1)] = 2
    name: ClassVar[str] = "double_ring"
    paired: ClassVar[bool] = True

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Where a ring is waited for and nodes share sequences: groups are those of a node."""
        near = near_ranks(work, machine)
        if near > 1 and waits(work, machine):
            yield cls(inner=near)

    def positions(self, length: int, world: int) -> list[np.ndarray]:
        """Positions int64 [length / world] of each rank.

        Raises:
            ConfigError: a length or a number of ranks that cannot be shared.
        """
        self._group(world)
        return super().positions(length, world)

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """Elements that one rank sends for one layer."""
        self._group(world)
        return ring_traffic(tokens, heads, kv_heads, head_dim, world)

    def routes(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> list[Route]:
        """Of a ring's N - 1 hops those inside groups, and those from group to group."""
        group = self._group(world)
        outer = ring_traffic(tokens, heads, kv_heads, head_dim, world // group)
        hops = world // group * (group - 1)
        inner = ring_traffic(tokens, heads, kv_heads, head_dim, hops + 1)
        return [Route(inner, group), Route(outer, world)]

    def _group(self, world: int) -> int:
        return group_of(self.inner, world, where="context.double_ring.inner")

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.double_ring import double_ring_attention
        from shoal.parallel.context.run.peers import ContextPeers

        group = self._group(comm.world)
        mine = comm.rank // group * group
        return double_ring_attention(
            q,
            k,
            v,
            view,
            ContextPeers(comm, range(mine, mine + group)),
            ContextPeers(comm, range(comm.rank % group, comm.world, group)),
        )

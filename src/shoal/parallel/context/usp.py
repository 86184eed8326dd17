"""USP: heads are swapped for sequence in groups of neighbours, and groups form a ring.

Ulysses inside, where links are fast, reaches as far as there are heads; the ring outside goes
beyond.

Source: Fang and Zhao, USP: A Unified Sequence Parallelism Approach, 2024.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

import numpy as np
from annotated_types import Ge

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.context.traffic import ContextTraffic, ring_traffic, ulysses_traffic, usp_traffic
from shoal.ir import Machine, Work
from shoal.parallel.context.base import ContextAttention, group_of, near_ranks
from shoal.parallel.context.cost import Route, waits
from shoal.parallel.context.positions import zigzag
from shoal.parallel.context.ulysses import check_heads

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class USP(ContextAttention):
    """Ulysses within groups of neighbouring ranks, a zigzag ring across the groups.

    Args:
        ulysses: ranks of a group, a divisor of cp.
        replicate_kv: with more ranks in a group than key/value heads, replicate heads over ranks.
    """

    ulysses: Annotated[int, Ge(1)] = 2
    replicate_kv: bool = False
    name: ClassVar[str] = "usp"
    paired: ClassVar[bool] = True

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Where a ring is waited for: among as many ranks of a node as there are heads for."""
        split, shape = work.job.parallel, work.shape
        near = near_ranks(work, machine)
        if near == 1 or not waits(work, machine):
            return
        group = math.gcd(near, shape.num_heads // split.tp, shape.num_kv_heads // split.tp)
        unit = split.cp // group * math.lcm(2, group)
        if group > 1 and work.job.seq_len % unit == 0:
            yield cls(ulysses=group)

    def positions(self, length: int, world: int) -> list[np.ndarray]:
        """Positions int64 [length / world] of each rank; a group has a zigzag pair of chunks.

        Raises:
            ConfigError: a length or a number of ranks that cannot be shared.
        """
        group = self._group(world)
        unit = world if world == group else world // group * math.lcm(2, group)
        below = length // unit * unit
        require(
            length >= 1 and length % unit == 0,
            "context.usp: seq_len",
            length,
            expected=f"a multiple of {unit} for {world} ranks, such as "
            + (f"{below} or {below + unit}" if below else f"{unit}"),
            hint="choose such a length and pad, or another cp",
        )
        whole = zigzag(length, world // group, where="context.usp")
        return [piece for chunk in whole for piece in np.split(chunk, group)]

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Whether groups can share these heads.

        Raises:
            ConfigError: a head would have to be split.
        """
        check_heads(
            heads,
            kv_heads,
            self._group(world),
            where="context.usp.ulysses",
            replicate=self.replicate_kv,
        )

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """Elements that one rank sends for one layer."""
        group = self._group(world)
        return usp_traffic(tokens, heads, kv_heads, head_dim, world, group)

    def routes(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> list[Route]:
        """Heads are swapped inside groups, then keys and values go round these."""
        group = self._group(world)
        swap = ulysses_traffic(tokens, heads, kv_heads, head_dim, group)
        routes = [Route(swap, group)]
        if world > group:
            each = (heads // group, max(1, kv_heads // group))
            ring = ring_traffic(tokens * group, *each, head_dim, world // group)
            routes.append(Route(ring, world))
        return routes

    def _group(self, world: int) -> int:
        return group_of(self.ulysses, world, where="context.usp.ulysses")

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.peers import ContextPeers
        from shoal.parallel.context.run.ulysses import ulysses_attention

        group = self._group(comm.world)
        mine = comm.rank // group * group
        shared = [
            np.concatenate(view.positions[start : start + group])
            for start in range(0, comm.world, group)
        ]
        return ulysses_attention(
            q,
            k,
            v,
            view._replace(positions=shared),
            ContextPeers(comm, range(mine, mine + group)),
            ContextPeers(comm, range(comm.rank % group, comm.world, group)),
        )

"""DeepSpeed-Ulysses: an all-to-all gives every rank whole sequences of some heads.

A rank sends less as N grows, where a ring sends the same; but heads cannot be split, so N is
at most the number of key/value heads, or of query heads if key/value heads are copied.

Source: Jacobs et al., DeepSpeed-Ulysses, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.context.traffic import ContextTraffic, ulysses_traffic
from shoal.ir import Machine, Work
from shoal.parallel.context.base import ContextAttention
from shoal.parallel.context.cost import waits

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class Ulysses(ContextAttention):
    """All-to-all from sequence shards to head shards; every rank holds one contiguous chunk.

    Args:
        replicate_kv: with more ranks than key/value heads, replicate heads over ranks; otherwise
            this is an error.
    """

    replicate_kv: bool = False
    name: ClassVar[str] = "ulysses"
    paired: ClassVar[bool] = False

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Where a ring is waited for and there are heads for all ranks."""
        split, shape = work.job.parallel, work.shape
        own = (shape.num_heads // split.tp, shape.num_kv_heads // split.tp)
        if not any(heads % split.cp for heads in own) and waits(work, machine):
            yield cls()

    def check(self, heads: int, kv_heads: int, world: int) -> None:
        """Whether ``world`` ranks can share these heads.

        Raises:
            ConfigError: a head would have to be split.
        """
        check_heads(
            heads,
            kv_heads,
            world,
            where="context.ulysses: ranks",
            replicate=self.replicate_kv,
        )

    def traffic(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, world: int
    ) -> ContextTraffic:
        """Elements that one rank sends for one layer."""
        return ulysses_traffic(tokens, heads, kv_heads, head_dim, world)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.peers import ContextPeers
        from shoal.parallel.context.run.ulysses import ulysses_attention

        whole = view._replace(positions=[np.concatenate(view.positions)])
        return ulysses_attention(
            q, k, v, whole, ContextPeers(comm), ContextPeers(comm, [comm.rank])
        )


def check_heads(heads: int, kv_heads: int, world: int, *, where: str, replicate: bool) -> None:
    """Refuse what would split a head.

    Raises:
        ConfigError: says which numbers of ranks are possible.
    """
    shared = [
        n
        for n in range(1, heads + 1)
        if heads % n == 0 and (kv_heads % n == 0 or (replicate and n % kv_heads == 0))
    ]
    copied = not replicate and kv_heads < world and world % kv_heads == 0 == heads % world
    require(
        world in shared,
        where,
        world,
        expected=f"one of {', '.join(map(str, shared))}, for {heads} query heads and "
        f"{kv_heads} key/value heads",
        hint="set replicate_kv to give key/value heads to several ranks, or use zigzag"
        if copied
        else "use zigzag, which does not split heads",
    )

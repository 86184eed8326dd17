"""Ring attention over contiguous pieces: for masks that are not causal, or short windows.

Under a causal mask the last rank has (2N - 1) / N times the mean work; see ``zigzag``.

Source: Liu et al., Ring Attention with Blockwise Transformers, 2023; Li et al., Sequence
Parallelism, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.parallel.context.base import ContextAttention

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.context.run.peers import PeerView
    from shoal.parallel.protocols import Comm


@part
class RingAttention(ContextAttention):
    """Ring exchange of keys and values; every rank holds one contiguous chunk."""

    name: ClassVar[str] = "ring"
    paired: ClassVar[bool] = False

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.peers import ContextPeers
        from shoal.parallel.context.run.ring import ring_attention

        return ring_attention(q, k, v, view, ContextPeers(comm))

"""Context parallelism by gathering all keys and values, one collective a layer.

Every rank holds the keys and values of whole sequences for as long as a layer computes, so
memory does not fall with N; in turn there are few messages and any mask is simple.

Source: Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.2.
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
class AllGather(ContextAttention):
    """All-gather of keys and values; every rank holds an early and a late chunk."""

    name: ClassVar[str] = "all_gather"
    paired: ClassVar[bool] = True

    def _run(self, q: Tensor, k: Tensor, v: Tensor, view: PeerView, comm: Comm) -> Tensor:
        from shoal.parallel.context.run.all_gather import gathered_attention

        return gathered_attention(q, k, v, view, comm)

"""Attention of many tokens of a prompt over its pages, keys and values packed before."""

from __future__ import annotations

from typing import ClassVar

from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.paged.cpp import CppPagedAttention

# Fewer queries than these leave most of a block empty.
_FEWEST, _WIDEST = 8, 256


class BlockAttention(CppPagedAttention):
    """Base: keys and values laid out as panels once, then 32 queries over 128 keys at a time.

    A query's numbers are summed in one order, however a prompt is cut into chunks. They are not
    those of the kernel for single tokens, bit for bit: an engine in exact mode asks that for all.

    Source: Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention, 2022.
    """

    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    needs: ClassVar[frozenset[str]] = CppPagedAttention.needs | {"avx512_bf16"}
    memory_share: ClassVar[float] = 0.5
    compute_share: ClassVar[float] = 0.3

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        if call.format != "plain":
            return f"reads a plain cache, but the format is {call.format}"
        if call.tree:
            return "supports causal masks only, but these queries form a tree"
        if call.partial:
            return "returns whole results, but the call asks for a partial context"
        if call.head_dim % 32 or call.head_dim > _WIDEST:
            return f"takes head dimensions in multiples of 32 up to {_WIDEST}, not {call.head_dim}"
        if call.queries < _FEWEST:
            return f"takes at least {_FEWEST} queries per request"
        return super()._refuses(call)

    def _symbol(self, call: PagedAttentionCall) -> tuple[str, str]:
        return f"paged_{self.backend}", f"paged_attention_{self.backend}"

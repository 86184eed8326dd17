"""Attention of many tokens of a prompt over its pages, by the matrix tiles of a CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.native.tiles import TILES, has_tiles
from shoal.kernel.paged.cpp import CppPagedAttention

__all__ = ["AmxPagedAttention"]

# Fewer queries than these leave most of a tile empty.
_FEWEST, _WIDEST = 8, 256


@part
class AmxPagedAttention(CppPagedAttention):
    """Keys and values laid out as tiles once, then 32 queries at a time over 128 keys each.

    A query's numbers are summed in one order, however a prompt is cut into chunks. They are not
    those of the kernel for single tokens, bit for bit: an engine in exact mode asks that for all.

    Source: Dao et al., FlashAttention: Fast and Memory-Efficient Exact Attention, 2022.
    """

    backend: ClassVar[str] = "amx"
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    needs: ClassVar[frozenset[str]] = TILES | CppPagedAttention.needs | {"avx512_bf16"}
    memory_share: ClassVar[float] = 0.5
    compute_share: ClassVar[float] = 0.3

    def refuses(self, call: PagedAttentionCall) -> str | None:
        """Why it cannot compute that here, or None if it can."""
        reason = super().refuses(call)
        if reason is None and not has_tiles():
            return "needs matrix tiles, which the operating system does not grant"
        return reason

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        if call.format != "plain":
            return f"reads a plain cache, and this one is {call.format}"
        if call.tree:
            return "lets every query see all before it, and these see branches of a tree"
        if call.partial:
            return "gives whole results, and a part of a context is wanted"
        if call.head_dim % 32 or call.head_dim > _WIDEST:
            return f"takes heads of multiples of 32 up to {_WIDEST}, and these have {call.head_dim}"
        if call.queries < _FEWEST:
            return f"takes {_FEWEST} queries of a request or more"
        return super()._refuses(call)

    def _symbol(self, call: PagedAttentionCall) -> tuple[str, str]:
        return "paged_amx", "paged_attention_amx"

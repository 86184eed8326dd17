"""Attention of many tokens of a prompt over its pages, by the matrix tiles of a CPU."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.native.tiles import TILES, has_tiles
from shoal.kernel.paged.blocks import BlockAttention


@part
class AmxPagedAttention(BlockAttention):
    """Blocks of 32 x 32 numbers with AMX tiles."""

    backend: ClassVar[str] = "amx"
    needs: ClassVar[frozenset[str]] = TILES | BlockAttention.needs

    def refuses(self, call: PagedAttentionCall) -> str | None:
        reason = super().refuses(call)
        if reason is None and not has_tiles():
            return "needs AMX tiles, which the operating system does not permit"
        return reason

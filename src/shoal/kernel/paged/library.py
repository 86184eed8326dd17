"""PyTorch's attention over the pages, copied side by side first: the peer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv import kv_format
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.paged.common import Cached


@part
class LibraryPagedAttention(BaseKernel):
    """Gathers blocks, pads short contexts and calls ``scaled_dot_product_attention``."""

    op: ClassVar[str] = "paged_attention"
    backend: ClassVar[str] = "torch"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    # Pages are read, written and read again.
    memory_share: ClassVar[float] = 0.2
    compute_share: ClassVar[float] = 0.1
    call_s: ClassVar[float] = 5e-5

    def rounds(self, call: PagedAttentionCall) -> int:
        """On a GPU the host waits for the lengths, and launches a dozen kernels for single tokens.

        Many queries hide that.
        """
        return 3 if call.device == "cuda" and call.queries == 1 else 1

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        if call.partial:
            return "returns whole results, but the call asks for a partial context"
        reason = kv_format(call.format).refuses(call.head_dim)
        return None if reason is None else f"cannot read a cache that {reason}"

    def _prepare(self, call: PagedAttentionCall, *constants: object) -> Ready:
        import torch
        import torch.nn.functional as F

        from shoal.kernel.paged.common import beyond, checked, stored

        check = checked(call)
        form = kv_format(call.format)
        size, kv_heads, group = call.block_size, call.kv_heads, call.heads // call.kv_heads

        def gathered(side: Cached, blocks_NW: Tensor, dtype: torch.dtype) -> Tensor:
            rows, width = blocks_NW.shape
            results = [
                part.view(-1, size, *part.shape[1:])
                .index_select(0, blocks_NW.reshape(-1))
                .view(rows, width * size, kv_heads, -1)
                for part in stored(side)
            ]
            if call.format == "plain":
                return results[0].transpose(1, 2)
            return form.decode(*results).to(dtype).transpose(1, 2)

        def run(
            q_NHd: Tensor,
            keys: Cached,
            values: Cached,
            blocks_BW: Tensor,
            lengths_N: Tensor,
            requests_N: Tensor | None = None,
            tree_2N: Tensor | None = None,
        ) -> Tensor:
            check(q_NHd, keys, values, blocks_BW, lengths_N, requests_N, tree_2N)
            longest = int(lengths_N.max())
            width = -(-longest // size)
            blocks_NW = blocks_BW if requests_N is None else blocks_BW[requests_N]
            blocks_NW = blocks_NW[:, :width]
            mask = None
            if tree_2N is not None or int(lengths_N.min()) < width * size:
                token = torch.arange(width * size, device=q_NHd.device)
                hidden_NS = token >= lengths_N[:, None]
                # What a request does not hold may be anything: it gets no weight.
                blocks_NW = blocks_NW.masked_fill(hidden_NS[:, ::size], 0)
                if tree_2N is not None:
                    hidden_NS |= beyond(tree_2N, token)
                mask = torch.zeros(hidden_NS.shape, dtype=q_NHd.dtype, device=q_NHd.device)
                mask = mask.masked_fill_(hidden_NS, float("-inf"))[:, None, None]
            out = F.scaled_dot_product_attention(
                q_NHd.reshape(len(q_NHd), kv_heads, group, -1),
                gathered(keys, blocks_NW, q_NHd.dtype),
                gathered(values, blocks_NW, q_NHd.dtype),
                attn_mask=mask,
            )
            return out.reshape(q_NHd.shape)

        return run

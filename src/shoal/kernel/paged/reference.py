"""The meaning of ``paged_attention``: softmax attention of each query over its tokens.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv import kv_format
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.paged.common import Cached


@part
class ReferencePagedAttention(BaseKernel):
    """Plain torch, row by row, in fp32 (fp64 for fp64); slow."""

    op: ClassVar[str] = "paged_attention"
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    rate: ClassVar[str | None] = "fp32"
    memory_share: ClassVar[float] = 0.02
    compute_share: ClassVar[float] = 0.02
    call_s: ClassVar[float] = 2e-4

    def rounds(self, call: PagedAttentionCall) -> int:
        """A query at a time."""
        return call.batch * call.queries

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        reason = kv_format(call.format).refuses(call.head_dim)
        return None if reason is None else f"cannot read a cache that {reason}"

    def _prepare(self, call: PagedAttentionCall, *constants: object) -> Ready:
        import torch

        from shoal.kernel.paged.common import beyond, checked, places, stored
        from shoal.kernel.paged.partial import attend_part

        check = checked(call)
        form = kv_format(call.format)
        group = call.heads // call.kv_heads
        scale = call.head_dim**-0.5

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
            wide = torch.promote_types(q_NHd.dtype, torch.float32)
            room = blocks_BW.shape[1] * call.block_size
            num_blocks = len(stored(keys)[0]) // call.block_size
            out = torch.empty_like(q_NHd)
            if call.partial:
                out = q_NHd.new_empty((*q_NHd.shape[:2], call.head_dim + 2), dtype=wide)
            requests = range(len(lengths_N)) if requests_N is None else requests_N.tolist()
            lengths, rows_of = lengths_N.tolist(), dict[int, list[int]]()
            for row, (request, seen) in enumerate(zip(requests, lengths, strict=True)):
                if not 0 <= request < len(blocks_BW):
                    raise KernelError(
                        f"paged_attention requests[{row}] = {request}: expected a row of blocks, "
                        f"0 to {len(blocks_BW) - 1}"
                    )
                if not 1 <= seen <= room:
                    raise KernelError(
                        f"paged_attention lengths[{row}] = {seen}: expected 1 to {room}, the "
                        f"tokens that {blocks_BW.shape[1]} blocks of {call.block_size} hold"
                    )
                rows_of.setdefault(request, []).append(row)
            for request, own in rows_of.items():
                most = max(lengths[row] for row in own)
                used = blocks_BW[request, : -(-most // call.block_size)]
                bad = ((used < 0) | (used >= num_blocks)).nonzero()
                if len(bad):
                    at = int(bad[0])
                    raise KernelError(
                        f"paged_attention blocks[{request}, {at}] = {int(used[at])}: expected 0 "
                        f"to {num_blocks - 1}, the blocks of the cache"
                    )
                slots_S = places(blocks_BW[request], most, call.block_size)
                # Read once for all queries of a request: each sees the first of its tokens.
                sides = [
                    form.decode(*(part[slots_S] for part in stored(side))).to(wide)
                    for side in (keys, values)
                ]
                for row in own:
                    k_SKd, v_SKd = (side[: lengths[row]] for side in sides)
                    if tree_2N is not None:
                        token_S = torch.arange(lengths[row], device=slots_S.device)
                        kept_S = ~beyond(tree_2N[:, row : row + 1], token_S)[0]
                        k_SKd, v_SKd = k_SKd[kept_S], v_SKd[kept_S]
                    if call.partial:
                        out[row] = attend_part(q_NHd[row : row + 1], k_SKd, v_SKd)[0]
                        continue
                    q_KGd = q_NHd[row].to(wide).view(call.kv_heads, group, -1)
                    weights_KGS = torch.einsum("kgd,skd->kgs", q_KGd * scale, k_SKd).softmax(-1)
                    mixed_KGd = torch.einsum("kgs,skd->kgd", weights_KGS, v_SKd)
                    out[row] = mixed_KGd.reshape(call.heads, -1)
            return out

        return run

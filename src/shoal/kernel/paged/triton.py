"""The same attention on a GPU, in Triton: pages are read where they lie.

Chunks of tokens are computed side by side and folded in their order, so that a result does not
depend on what else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv import kv_format
from shoal.kernel.kv.bfp import BfpKVFormat
from shoal.kernel.kv.int8 import Int8
from shoal.kernel.kv.plain import Plain
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.paged.common import Cached


@part
class TritonPagedAttention(TritonKernel):
    """One program per row, key/value head and chunk; a second kernel combines the chunks.

    Args:
        chunk: tokens per program.
        step: tokens whose keys are in registers at once.
    """

    op: ClassVar[str] = "paged_attention"
    invariant: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.5
    compute_share: ClassVar[float] = 0.1
    call_s: ClassVar[float] = 6e-5

    chunk: int = 512
    step: int = 64

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        if call.partial:
            return "returns whole results, but the call asks for a partial context"
        form = kv_format(call.format)
        reason = form.refuses(call.head_dim)
        if reason is not None:
            return f"cannot read a cache that {reason}"
        if not isinstance(form, Plain | Int8 | BfpKVFormat):
            return f"does not support the cache format {form}"
        return None

    def _prepare(self, call: PagedAttentionCall, *constants: object) -> Ready:
        import torch

        from shoal.kernel.paged.common import checked, stored
        from shoal.kernel.paged.triton_code import chunks, fold

        check = checked(call)
        form = kv_format(call.format)
        kind, block = 0, 1
        if isinstance(form, Int8):
            kind = 1
        elif isinstance(form, BfpKVFormat):
            kind, block = (2 if form.bits == 12 else 3), form.block
        kv_heads, group, d = call.kv_heads, call.heads // call.kv_heads, call.head_dim
        # Products of matrices want 16 rows at least.
        rows_of_group = max(16, 1 << (group - 1).bit_length())
        columns = max(16, 1 << (d - 1).bit_length())
        scale = d**-0.5 * 1.4426950408889634
        chunk, step = self.chunk, self.step

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
            rows, device = len(q_NHd), q_NHd.device
            q, blocks = q_NHd.contiguous(), blocks_BW.contiguous()
            requests = torch.arange(rows, device=device) if requests_N is None else requests_N
            tree = lengths_N if tree_2N is None else tree_2N.contiguous()
            sides = [
                tuple(part if part.stride(2) == 1 else part.contiguous() for part in stored(side))
                for side in (keys, values)
            ]
            (k, *ks), (v, *vs) = sides
            k_scales, v_scales = (ks or [k])[0], (vs or [v])[0]
            most = blocks.shape[1] * call.block_size // chunk + 1
            sums = torch.empty(
                (rows, kv_heads, most, rows_of_group, columns), dtype=torch.float32, device=device
            )
            tops, totals = (torch.empty_like(sums[..., 0]) for _ in range(2))
            out = torch.empty_like(q)
            chunks[(rows, kv_heads, most)](
                q, k, v, k_scales, v_scales, blocks, lengths_N, requests, tree, sums, tops, totals,
                scale, most, blocks.shape[1], q.stride(0), q.stride(1),
                k.stride(0), k.stride(1), v.stride(0), v.stride(1),
                k_scales.stride(0), k_scales.stride(1), v_scales.stride(0), v_scales.stride(1),
                group, rows_of_group, d, columns, call.block_size, chunk, step, kind, block,
                tree_2N is not None,
            )  # fmt: skip
            fold[(rows, kv_heads)](
                out, lengths_N, sums, tops, totals, most,
                group, rows_of_group, d, columns, chunk,
            )  # fmt: skip
            return out

        return run

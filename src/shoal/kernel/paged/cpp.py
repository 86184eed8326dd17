"""Attention that reads the pages where they lie, once, and in the format they are in."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import KernelError
from shoal.core.native import cpu_flags
from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv import kv_format
from shoal.kernel.kv.bfp import BfpKVFormat
from shoal.kernel.kv.int8 import Int8
from shoal.kernel.kv.plain import Plain
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.paged.common import Cached

_KIND = 1 << 40


@part
class CppPagedAttention(BaseKernel):
    """One pass over the tokens in steps of 64; chunks of 256 are divided evenly among threads.

    The order of summation of a query is fixed: its bits depend neither on the rest of the batch,
    nor on the chunks of a prompt, nor on the number of threads.
    """

    op: ClassVar[str] = "paged_attention"
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"})
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.7
    compute_share: ClassVar[float] = 0.2
    call_s: ClassVar[float] = 1e-5

    def _refuses(self, call: PagedAttentionCall) -> str | None:
        form = kv_format(call.format)
        reason = form.refuses(call.head_dim)
        if reason is not None:
            return f"cannot read a cache that {reason}"
        if call.kv_heads < 1 or call.heads % call.kv_heads:
            return f"needs a multiple of the {call.kv_heads} key/value heads as query heads"
        if isinstance(form, BfpKVFormat):
            least = 32 if form.bits == 12 else 16
            if form.block < least or call.head_dim > 16 * form.block:
                return (
                    f"takes blocks of at least {max(least, -(-call.head_dim // 16))} here, and "
                    f"{form} has {form.block}"
                )
        elif not isinstance(form, Plain | Int8):
            return f"does not support the cache format {form}"
        if call.dtype != "bf16" and isinstance(form, Plain):
            return None
        missing = sorted({"avx512_bf16", "avx512_vnni"} - cpu_flags())
        if missing:
            return f"needs a CPU with {', '.join(missing)} for bf16 and for codes"
        return None

    def _symbol(self, call: PagedAttentionCall) -> tuple[str, str]:
        """Library and function."""
        plain = isinstance(kv_format(call.format), Plain)
        return "paged" if plain else "paged_codes", "paged_attention"

    def _prepare(self, call: PagedAttentionCall, *constants: object) -> Ready:
        import torch

        from shoal.kernel.native import function
        from shoal.kernel.paged.common import checked, stored

        form = kv_format(call.format)
        check = checked(call)
        library, symbol = self._symbol(call)
        attention = function(library, symbol, "a", "l")
        half = int(call.dtype == "bf16")
        kind, block = 0, 1
        if isinstance(form, Int8):
            kind = 1
        elif isinstance(form, BfpKVFormat):
            kind, block = (2 if form.bits == 12 else 3), form.block
        heads, kv_heads, d, size = call.heads, call.kv_heads, call.head_dim, call.block_size

        def side(name: str, cached: Cached) -> tuple[int, ...]:
            """Addresses of codes and scales, and their strides in bytes."""
            numbers: list[int] = []
            strides: list[int] = []
            for tensor in stored(cached):
                slot, head, number = tensor.stride()
                if number != 1 and tensor.shape[2] > 1:
                    raise KernelError(
                        f"paged_attention {name}: strides {list(tensor.stride())}, expected a "
                        "last stride of 1"
                    )
                width = tensor.element_size()
                numbers.append(tensor.data_ptr())
                strides += [slot * width, head * width]
            if len(numbers) == 1:
                numbers, strides = [*numbers, 0], [*strides, 0, 0]
            return *numbers, *strides

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
            q = q_NHd if q_NHd.stride(2) == 1 or d == 1 else q_NHd.contiguous()
            blocks, lengths = blocks_BW.contiguous(), lengths_N.contiguous()
            requests = None if requests_N is None else requests_N.contiguous()
            tree = None if tree_2N is None else tree_2N.contiguous()
            number = q.element_size()
            out = q.new_empty(q.shape)
            if call.partial:
                out = q.new_empty((len(q), heads, d + 2), dtype=torch.float32)
            arguments = array(
                "q",
                (
                    kind, half, q.data_ptr(), out.data_ptr(), q.stride(0) * number,
                    q.stride(1) * number, *side("keys", keys), *side("values", values),
                    blocks.data_ptr(), blocks.element_size(), lengths.data_ptr(),
                    0 if requests is None else requests.data_ptr(),
                    len(q), len(blocks), heads, kv_heads, d, blocks.shape[1], size,
                    len(stored(keys)[0]), block, int(call.partial),
                    0 if tree is None else tree.data_ptr(),
                ),
            )  # fmt: skip
            problem = attention(arguments)
            if problem >= 0:
                slots = len(stored(keys)[0])
                raise _wrong(problem, blocks, lengths, requests, tree, size, slots // size)
            return out

        return run


def _wrong(
    problem: int,
    blocks_BW: Tensor,
    lengths_N: Tensor,
    requests_N: Tensor | None,
    tree_2N: Tensor | None,
    size: int,
    num_blocks: int,
) -> KernelError:
    kind, at = divmod(problem, _KIND)
    width = blocks_BW.shape[1]
    if kind == 1:
        given = at if requests_N is None else int(requests_N[at])
        return KernelError(
            f"paged_attention requests[{at}] = {given}: expected a row of blocks, 0 to "
            f"{len(blocks_BW) - 1}"
        )
    if kind == 2:
        return KernelError(
            f"paged_attention lengths[{at}] = {int(lengths_N[at])}: expected 1 to {width * size}, "
            f"the tokens that {width} blocks of {size} hold"
        )
    if kind == 4 and tree_2N is not None:
        return KernelError(
            f"paged_attention tree[0, {at}] = {int(tree_2N[0, at])}: expected a position less "
            f"than 64 tokens before lengths[{at}] = {int(lengths_N[at])}"
        )
    request, place = divmod(at, width)
    return KernelError(
        f"paged_attention blocks[{request}, {place}] = {int(blocks_BW[request, place])}: expected "
        f"0 to {num_blocks - 1}, the blocks of the cache"
    )

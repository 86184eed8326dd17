"""What all kernels of ``paged_attention`` are given, and what of it is looked at first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv import kv_format

Cached = Tensor | Sequence[Tensor]
"""Keys or values as the cache keeps them: [slots, K, d], or the tensors of their format."""

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def stored(cached: Cached) -> tuple[Tensor, ...]:
    """The tensors of one side of the cache."""
    return (cached,) if isinstance(cached, Tensor) else tuple(cached)


def places(blocks_W: Tensor, seen: int, block_size: int) -> Tensor:
    """Slots of the first ``seen`` tokens of a request."""
    token = torch.arange(seen, device=blocks_W.device)
    return blocks_W[token // block_size].long() * block_size + token % block_size


def beyond(tree_2N: Tensor, token_S: Tensor) -> Tensor:
    """Tokens by place, bool [N, S], that lie in the tree of a query and that it does not see."""
    place_NS = token_S - tree_2N[0][:, None]
    seen_NS = (tree_2N[1][:, None] >> place_NS.clamp(0, 63)) & 1
    return (place_NS >= 0) & (seen_NS == 0)


def checked(
    call: PagedAttentionCall,
) -> Callable[[Tensor, Cached, Cached, Tensor, Tensor, Tensor | None, Tensor | None], None]:
    """A check of the arguments of one call.

    Raises:
        KernelError: the format cannot hold such heads.
    """
    layout = kv_format(call.format).layout(call.head_dim, call.dtype)
    dtype = _DTYPES[call.dtype]
    heads = (call.heads, call.head_dim)
    sides = [((call.kv_heads, width), _DTYPES[kind]) for width, kind in layout]

    def check(
        q: Tensor,
        keys: Cached,
        values: Cached,
        blocks: Tensor,
        lengths: Tensor,
        requests: Tensor | None,
        tree: Tensor | None = None,
    ) -> None:
        if q.dim() != 3 or q.shape[1:] != heads or q.dtype != dtype:
            raise _wrong("queries", q, f"{dtype} [N, {call.heads}, {call.head_dim}]")
        for name, side in (("keys", stored(keys)), ("values", stored(values))):
            if len(side) != len(sides):
                raise KernelError(
                    f"paged_attention {name}: {len(side)} tensors, expected the {len(sides)} of "
                    f"format {call.format}"
                )
            for tensor, (tail, kind) in zip(side, sides, strict=True):
                if tensor.dim() != 3 or tensor.shape[1:] != tail or tensor.dtype != kind:
                    raise _wrong(name, tensor, f"{kind} [slots, {tail[0]}, {tail[1]}]")
        whole = (torch.int32, torch.int64)
        if blocks.dim() != 2 or blocks.dtype not in whole:
            raise _wrong("blocks", blocks, "int32 or int64 [B, W]")
        rows = len(q)
        if lengths.shape != (rows,) or lengths.dtype != torch.int64:
            raise _wrong(
                "lengths",
                lengths,
                f"int64 [{rows}], the number of tokens that each query attends to",
            )
        if requests is None:
            if rows != len(blocks):
                raise KernelError(
                    f"paged_attention: {rows} queries and {len(blocks)} rows of blocks; expected "
                    "equally many, or `requests` with the row of blocks of each query"
                )
        elif requests.shape != (rows,) or requests.dtype != torch.int64:
            raise _wrong("requests", requests, f"int64 [{rows}]")
        if tree is not None and (tree.shape != (2, rows) or tree.dtype != torch.int64):
            raise _wrong("tree", tree, f"int64 [2, {rows}], root positions and bit masks")

    return check


def _wrong(name: str, tensor: Tensor, expected: str) -> KernelError:
    return KernelError(
        f"paged_attention {name}: {tensor.dtype} {list(tensor.shape)}, expected {expected}"
    )

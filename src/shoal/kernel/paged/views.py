"""Queries over contexts made of blocks that have positions of their own.

The keys of such a block are rotated as if its first token stood at position 0. A query that stands
i positions behind that token sees the block by its rotation to i: it is turned once for each block
(:func:`turned`), attention gives a record for each pair of query and block, and :func:`merged` puts
the records of a query together as one softmax.

Shapes: N queries, P pairs of a query and a block, M most blocks of a query, H query heads,
d head_dim, C = d / 2. A record is [H, d + 2] as in :mod:`shoal.kernel.paged.partial`.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.kv.common import fast
from shoal.kernel.paged.partial import merge
from shoal.kernel.tensors import name_of

__all__ = ["merged", "turned"]


def turned(x_NHd: Tensor, row_P: Tensor, places_P: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The rows ``x[row]``, each turned on by so many places [P, H, d].

    Args:
        x_NHd: rotated queries, or keys.
        row_P: int64, the row of each pair.
        places_P: int64, by how much; 0 leaves a row as it is.
        tables: cosine and sine [places, C], fp32 (fp64 for fp64).
    """
    _, heads, d = x_NHd.shape
    cos, sin = tables
    if not fast(x_NHd):
        x_PHd = x_NHd[row_P]
        first, second = x_PHd.chunk(2, -1)
        c, s = (table[places_P].unsqueeze(1).to(x_NHd.dtype) for table in tables)
        return torch.cat((first * c - second * s, second * c + first * s), -1)
    from shoal.kernel.native import function

    if x_NHd.stride(1) != d or x_NHd.stride(2) != 1:
        raise KernelError(f"turned rows: strides {x_NHd.stride()}, expected heads side by side")
    out = x_NHd.new_empty(len(row_P), heads, d)
    run = function("views", f"view_turn_{name_of(x_NHd.dtype)}", "pppppp" + "llll")
    run(
        x_NHd.data_ptr(), out.data_ptr(), row_P.data_ptr(), places_P.data_ptr(),
        cos.data_ptr(), sin.data_ptr(), len(row_P), x_NHd.stride(0), heads, d,
    )  # fmt: skip
    return out


def merged(records_PHr: Tensor, parts_NM: Tensor, dtype: torch.dtype) -> Tensor:
    """What each query sees in all of its blocks together [N, H, d].

    Args:
        records_PHr: of all pairs.
        parts_NM: int64, the pairs of each query; -1 where it has fewer than others.
        dtype: of the result.
    """
    rows, most = parts_NM.shape
    _, heads, width = records_PHr.shape
    if dtype not in (torch.float32, torch.bfloat16) or not fast(records_PHr):
        nothing = records_PHr.new_zeros(1, heads, width)
        nothing[..., -2] = float("-inf")
        found_MNHr = torch.cat((records_PHr, nothing))[parts_NM.t()]
        return merge(list(found_MNHr), dtype)
    from shoal.kernel.native import function

    out = records_PHr.new_empty((rows, heads, width - 2), dtype=dtype)
    run = function("views", f"view_merge_{name_of(dtype)}", "pppllll")
    run(
        records_PHr.data_ptr(), parts_NM.data_ptr(), out.data_ptr(),
        rows, most, heads, width - 2,
    )  # fmt: skip
    return out

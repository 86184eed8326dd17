"""Queries over contexts made of blocks that have positions of their own.

The keys of such a block are rotated as if its first token stood at position 0. A query that stands
i positions behind that token sees the block by its rotation to i: it is turned once for each block
(:func:`turned`), and its scores over all blocks are one softmax. :func:`view_attention` does all of
it at once; :func:`merged` puts records of single blocks together where it cannot.

Shapes: N queries, P pairs of a query and a block, M most blocks of a query, H query heads,
K key/value heads, d head_dim, C = d / 2, S slots of one token. A record is [H, d + 2] as in
:mod:`shoal.kernel.paged.partial`.

Source: Rodionov et al., Hogwild! Inference, 2025, section 3.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.calls import PagedAttentionCall
from shoal.kernel.kv.common import fast
from shoal.kernel.paged.cpp import CppPagedAttention
from shoal.kernel.paged.partial import merge
from shoal.kernel.tensors import name_of

# queries [N, H, d], keys, values [S, K, d], slots [blocks, longest], pairs [4, P], parts [N, M]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

_KIND = 1 << 40


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
        raise KernelError(f"rotated rows: strides {x_NHd.stride()}, expected contiguous heads")
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
    nothing = records_PHr.new_zeros(1, *records_PHr.shape[1:])
    nothing[..., -2] = float("-inf")
    found_MNHr = torch.cat((records_PHr, nothing))[parts_NM.t()]
    return merge(list(found_MNHr), dtype)


def view_attention(
    heads: int, kv_heads: int, head_dim: int, weight: Tensor, tables: tuple[Tensor, Tensor]
) -> Attend | None:
    """The kernel for these heads; None where this machine has none for the type of the weights.

    It takes queries [N, H, d], keys and values [S, K, d], the slots of the blocks' tokens
    [blocks, longest] in int32, the pairs [4, P] (row, block, how many of its tokens are seen, how
    many places the query is to be turned on) and the pairs of each query [N, M], -1 behind the
    last; it gives what the queries see [N, H, d]. It raises a KernelError for a pair that there
    cannot be.

    Args:
        heads: of a query.
        kv_heads: of a key; divide ``heads``.
        head_dim: numbers of a head.
        weight: of the type and on the device of queries, keys and values.
        tables: as :func:`turned` has them.
    """
    if not fast(weight):
        return None
    call = PagedAttentionCall(
        batch=8,
        context=512,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=1,
        dtype=name_of(weight.dtype),
    )
    if (
        CppPagedAttention().refuses(call) is not None
    ):  # the same steps, over blocks whose queries need no turning
        return None
    from shoal.kernel.native import function

    attention = function("paged_views", "view_attention", "a", "l")
    cos, sin = tables
    half = int(weight.dtype == torch.bfloat16)
    size = weight.element_size()

    def run(
        q_NHd: Tensor, keys: Tensor, values: Tensor, slots: Tensor, pairs: Tensor, parts_NM: Tensor
    ) -> Tensor:
        out = q_NHd.new_empty(q_NHd.shape)
        if not (pairs.is_contiguous() and parts_NM.is_contiguous() and slots.is_contiguous()):
            raise KernelError("view_attention: slots, pairs or parts are not contiguous")
        if not q_NHd.stride(2) == keys.stride(2) == values.stride(2) == 1:
            raise KernelError("view_attention: the elements of a head are not contiguous")
        arguments = array(
            "q",
            (
                half, q_NHd.data_ptr(), out.data_ptr(), q_NHd.stride(0) * size,
                q_NHd.stride(1) * size, keys.data_ptr(), keys.stride(0) * size,
                keys.stride(1) * size, values.data_ptr(), values.stride(0) * size,
                values.stride(1) * size, slots.data_ptr(), len(q_NHd), heads, kv_heads, head_dim,
                slots.shape[1], pairs.data_ptr(), pairs.shape[1], parts_NM.data_ptr(),
                parts_NM.shape[1], len(slots), len(keys), cos.data_ptr(), sin.data_ptr(), len(cos),
            ),
        )  # fmt: skip
        problem = attention(arguments)
        if problem >= 0:
            raise _wrong(problem, pairs, slots, len(keys), len(cos))
        return out

    return run


def _wrong(problem: int, pairs: Tensor, slots: Tensor, num_slots: int, places: int) -> KernelError:
    kind, at = divmod(problem, _KIND)
    blocks, longest = slots.shape
    if kind == 4:
        return KernelError(
            f"view_attention parts[{at}]: expected pairs, 0 to {pairs.shape[1] - 1}, one or more"
        )
    if kind == 5:
        block, place = divmod(at, longest)
        return KernelError(
            f"view_attention slots[{block}, {place}] = {int(slots[block, place])}: expected 0 to "
            f"{num_slots - 1}, the slots of the cache"
        )
    what, expected = {
        1: ("block", f"0 to {blocks - 1}"),
        2: ("seen", f"1 to {longest}, the largest number of tokens of a block"),
        3: ("places", f"0 to {places - 1}"),
    }[kind]
    return KernelError(f"view_attention {what}[{at}] = {int(pairs[kind, at])}: expected {expected}")

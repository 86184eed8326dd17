"""Attention of queries over a part of what they see, and how parts are put together: exactly.

A part with scores s (in powers of two: times log2 e) is the record ``o, m, l``: the largest score
m, the sum of weights ``l = sum 2^(s - m)`` and the sum ``o = sum 2^(s - m) v``. Parts lie anywhere
and come in any order: with m the largest m_j, the whole is ``sum 2^(m_j - m) o_j`` over
``sum 2^(m_j - m) l_j``. Nothing is averaged. A part of which nothing is seen weighs nothing.

Shapes: N queries, S tokens of a part, H query heads, K key/value heads, d head_dim. A record is
``[N, H, d + 2]`` in fp32 (fp64 for fp64), o first, then m and l.

Source: Lin et al., Infinite-LLM, 2024, section 4.1 (DistAttention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend_part(
    q_NHd: Tensor, k_SKd: Tensor, v_SKd: Tensor, hidden_NS: Tensor | None = None
) -> Tensor:
    """The record of queries over the tokens of one part; S may be 0.

    Args:
        q_NHd: queries.
        k_SKd: keys; each is for H / K query heads.
        v_SKd: values.
        hidden_NS: bool, what a query does not see; None if it sees all.
    """
    wide = torch.promote_types(q_NHd.dtype, torch.float32)
    rows, heads, d = q_NHd.shape
    kv_heads = k_SKd.shape[1]
    scale = math.log2(math.e) / math.sqrt(d)
    q_KMd = (
        (q_NHd.to(wide) * scale)
        .view(rows, kv_heads, -1, d)
        .transpose(0, 1)
        .reshape(kv_heads, -1, d)
    )
    score_KNGS = (q_KMd @ k_SKd.to(wide).permute(1, 2, 0)).view(
        kv_heads, rows, heads // kv_heads, -1
    )
    if hidden_NS is not None:
        score_KNGS = score_KNGS.masked_fill(hidden_NS[None, :, None], -math.inf)
    none = score_KNGS.new_full((*score_KNGS.shape[:3], 1), -math.inf)
    top_KNG1 = torch.cat((score_KNGS, none), -1).amax(-1, keepdim=True)
    # Where nothing is seen the weights are 2^-inf = 0, not 2^(inf - inf).
    weight_KNGS = torch.exp2(score_KNGS - top_KNG1.masked_fill(top_KNG1 == -math.inf, 0.0))
    sum_KNGd = (weight_KNGS.flatten(1, 2) @ v_SKd.to(wide).transpose(0, 1)).view(
        *weight_KNGS.shape[:3], d
    )
    record = torch.cat((sum_KNGd, top_KNG1, weight_KNGS.sum(-1, keepdim=True)), -1)
    return record.transpose(0, 1).reshape(rows, heads, d + 2)


def merge(parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """What queries see in all parts together [N, H, d]; 0 where they see nothing.

    Args:
        parts: records of the same queries, in any order; at least one.
        dtype: of the result; that of the records if not given.
    """
    record_PNHr = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(tuple(parts))
    top_PNH = record_PNHr[..., -2]
    best_NH = top_PNH.amax(0)
    worth_PNH = torch.exp2(top_PNH - best_NH.masked_fill(best_NH == -math.inf, 0.0))
    whole_NHd = (record_PNHr[..., :-2] * worth_PNH.unsqueeze(-1)).sum(0)
    weight_NH = (record_PNHr[..., -1] * worth_PNH).sum(0)
    whole_NHd /= weight_NH.masked_fill(weight_NH == 0, 1.0).unsqueeze(-1)
    return whole_NHd if dtype is None else whole_NHd.to(dtype)

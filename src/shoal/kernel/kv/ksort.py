"""The order of a key's channels in which large ones share blocks.

Channels whose numbers are large in every token cost the other channels of their block their
low bits. Sorted by size, large ones are in blocks of their own. Queries are sorted alike, so no
score changes, and the sorting is done once, to the rows of the projections.

Shapes: K key/value heads, d head_dim, C = d / 2 rotary pairs (channel c with c + C), S tokens,
H query heads.

Source: Accurate Block Quantization in LLMs with Outliers, 2024.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shoal.core.errors import KernelError, require
from shoal.kernel.protocols import KVFormat

Mode = Literal["pairs", "free"]


def channel_order(size_Kd: Tensor, mode: Mode = "pairs") -> Tensor:
    """Which channel comes to each place, largest first, of each head by itself.

    Args:
        size_Kd: size of every channel, not negative.
        mode: pairs: both channels of a rotary pair by their joint size, side by side. (Left where
            the halves of a head put them, the two would be in different blocks.) free: each by
            its own size.

    Returns:
        int64 [K, d], a permutation in each row.

    Raises:
        KernelError: a size is negative, NaN or infinite, the number of channels is odd, or there
            is no such mode.
    """
    dim = size_Kd.shape[-1]
    require(mode in ("pairs", "free"), "ksort.mode", mode, expected="pairs or free",
            error=KernelError)  # fmt: skip
    require(dim % 2 == 0, "ksort channels", dim, expected="an even number", error=KernelError)
    if not bool((torch.isfinite(size_Kd) & (size_Kd >= 0)).all()):
        raise KernelError("ksort: sizes of channels must be finite and not negative")
    if mode == "free":
        return size_Kd.argsort(dim=-1, descending=True, stable=True)
    first, second = size_Kd.double().chunk(2, -1)
    pair_KC = torch.hypot(first, second).argsort(dim=-1, descending=True, stable=True)
    return torch.stack([pair_KC, pair_KC + dim // 2], -1).flatten(-2)


def rotary(channel_Kd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """How sorted channels are rotated: ``y[i] = x[i] cos + sign[i] x[partner[i]] sin``.

    Args:
        channel_Kd: of :func:`channel_order`.

    Returns:
        partner int64 [K, d]: place of the other channel of the pair; pair int64 [K, d]: whose
        angle it is; sign [K, d] in fp32.
    """
    half = channel_Kd.shape[-1] // 2
    place_Kd = channel_Kd.argsort(-1)
    other_Kd = (channel_Kd + half) % (2 * half)
    sign_Kd = torch.where(channel_Kd < half, -1.0, 1.0)
    return place_Kd.gather(-1, other_Kd), channel_Kd % half, sign_Kd


def score_error(
    form: KVFormat, q_SHd: Tensor, k_SKd: Tensor, channel_Kd: Tensor | None = None
) -> float:
    """Root mean square error of the scores, as a share of the scores' own.

    Every query meets the keys of its group's head; what softmax would not see, a change of all
    scores of a query alike, does not count.

    Args:
        form: how keys are stored.
        q_SHd: queries, rotated.
        k_SKd: keys, rotated.
        channel_Kd: order of the channels when they are stored; their own if not given.
    """
    kv_heads = k_SKd.shape[1]
    group = q_SHd.shape[1] // kv_heads
    k = k_SKd.float()
    sorted_ = k if channel_Kd is None else k.gather(-1, channel_Kd.expand_as(k))
    stored = form.decode(*form.encode(sorted_))
    if channel_Kd is not None:
        stored = stored.gather(-1, channel_Kd.argsort(-1).expand_as(stored))
    q = q_SHd.float().reshape(len(q_SHd), kv_heads, group, -1)
    wrong, right = (torch.einsum("tkgd,skd->kgts", q, keys) for keys in (stored - k, k))
    total = [(x - x.mean(-1, keepdim=True)).square().mean() for x in (wrong, right)]
    return float((total[0] / total[1]).sqrt())

"""Linformer attention over a shared sequence: keys and values projected to k rows.

Each rank projects its own piece by its own columns of the projections; the k rows are
all-reduced, so what is sent and the scores' memory do not depend on how long the other pieces
are. This is other mathematics than full attention (its reference is :func:`linformer`), and
not causal: it is no part of kind ``context``.

Source: Wang et al., Linformer, 2020; Li et al., Sequence Parallelism, 2021, section 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.errors import require

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm


def projected_attention(
    q: Tensor, k: Tensor, v: Tensor, key_map: Tensor, value_map: Tensor, comm: Comm
) -> Tensor:
    """Attention of this rank's queries over k projected keys of all ranks; has a gradient.

    Args:
        q: [B, H, n, d].
        k: [B, K, n, d].
        v: [B, K, n, d].
        key_map: [k, n], this rank's columns of the projection [k, T].
        value_map: [k, n].
        comm: the ranks that share the sequence.

    Returns:
        [B, H, n, d].

    Raises:
        ConfigError: shapes that do not fit.
    """
    import torch

    from shoal.claims.lab.projected_run import projected

    _check(q, k, v, key_map, value_map)
    with torch.autocast(q.device.type, enabled=False):
        return projected(q, k, v, key_map, value_map, comm)


def linformer(q: Tensor, k: Tensor, v: Tensor, key_map: Tensor, value_map: Tensor) -> Tensor:
    """The same on one process: q [B, H, T, d], k and v [B, K, T, d], maps [k, T].

    Raises:
        ConfigError: shapes that do not fit.
    """
    import torch.nn.functional as F

    _check(q, k, v, key_map, value_map)
    keys, values = key_map @ k, value_map @ v
    return F.scaled_dot_product_attention(q, keys, values, enable_gqa=q.shape[1] != k.shape[1])


def _check(q: Tensor, k: Tensor, v: Tensor, key_map: Tensor, value_map: Tensor) -> None:
    require(
        q.ndim == 4 and k.shape == v.shape and q.shape[1] % k.shape[1] == 0,
        "projected: shapes of q, k, v",
        [list(x.shape) for x in (q, k, v)],
        expected="[B, H, n, d] and twice [B, K, n, d] with K a divisor of H",
    )
    require(
        key_map.shape == value_map.shape and key_map.ndim == 2 and key_map.shape[1] == k.shape[2],
        "projected: shapes of the projections",
        [list(key_map.shape), list(value_map.shape)],
        expected=f"twice [k, {k.shape[2]}], this rank's positions",
    )

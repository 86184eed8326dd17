"""Attention in float64 by its definition, some queries at a time; and how far others are off."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.claims.lab.attention_kernels.base import DTYPES
from shoal.ir.mask import Mask

NAMES = ("out", "q_grad", "k_grad", "v_grad")

# Scores that are held at a time.
_MAX_SCORES = 2**20


def inputs(
    batch: int, heads: int, kv_heads: int, length: int, head_dim: int, dtype: str, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries [B, H, T, d], keys and values [B, K, T, d], and a gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    kind = getattr(torch, DTYPES[dtype])
    q, grad = (
        torch.randn(batch, heads, length, head_dim, generator=random).to(kind) for _ in range(2)
    )
    k, v = (
        torch.randn(batch, kv_heads, length, head_dim, generator=random).to(kind) for _ in range(2)
    )
    return q, k, v, grad


def reference(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, mask: Mask
) -> dict[str, Tensor]:
    """Output and, with ``grad``, the gradients of q, k and v, all in float64."""
    q, k, v = (x.detach().double().requires_grad_(grad is not None) for x in (q, k, v))
    batch, heads, length, dim = q.shape
    repeats = heads // k.shape[1]
    cells = torch.from_numpy(mask.dense())
    out = torch.zeros(q.shape, dtype=torch.float64)
    step = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        used = cells[rows].any(0).nonzero().flatten()
        if len(used) == 0:
            continue
        keys = slice(int(used[0]), int(used[-1]) + 1)
        key, value = (x[:, :, keys].repeat_interleave(repeats, 1) for x in (k, v))
        scores = q[:, :, rows] @ key.transpose(-1, -2) / dim**0.5
        seen = cells[rows, keys]
        some = seen.any(1, keepdim=True)
        # A query that sees nothing has no softmax; its output is zero.
        weights = torch.softmax(scores.masked_fill(~seen & some, -torch.inf), -1)
        part = (weights @ value) * some
        out[:, :, rows] = part.detach()
        if grad is not None:
            torch.autograd.backward(part, grad[:, :, rows].double())
    result = {"out": out}
    if grad is not None:
        for name, x in zip(NAMES[1:], (q, k, v), strict=True):
            result[name] = torch.zeros_like(x) if x.grad is None else x.grad
    return result


def worst(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[float, str]:
    """Largest |found - wanted| over largest |wanted|, and of what; infinite if not a number."""
    largest = (0.0, "out")
    for name, x in found.items():
        scale = float(wanted[name].abs().max()) or 1.0
        error = float((x.double().cpu() - wanted[name]).abs().max()) / scale
        if not error < float("inf"):
            return float("inf"), name
        largest = max(largest, (error, name))
    return largest

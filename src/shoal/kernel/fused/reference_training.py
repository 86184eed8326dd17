"""What the fused operators mean in training: plain torch in fp32 or wider inside, by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernel.protocols import Ready


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _norm(wide: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * scale * weight_N.to(wide.dtype)


def rms_norm(eps: float) -> Ready:
    """``x / sqrt(mean(x^2) + eps) * weight``."""

    def run(x: Tensor, weight_N: Tensor) -> Tensor:
        return _norm(_wide(x), weight_N, eps).to(x.dtype)

    return run


def swiglu() -> Ready:
    """``silu(gate) * up`` of both halves."""

    def run(x: Tensor) -> Tensor:
        gate, up = _wide(x).chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    return run


def rope(heads: int, kv_heads: int, eps: float) -> Ready:
    """Norms where weights are given, rotation and split."""

    def turned(x: Tensor, norm_d: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        wide = _wide(x)
        if norm_d is not None:
            wide = _norm(wide, norm_d, eps)
        cos, sin = (table.to(wide.dtype).unsqueeze(1) for table in (cos, sin))
        first, second = wide.chunk(2, -1)
        pairs = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(pairs, -1).to(x.dtype)

    def run(
        qkv: Tensor,
        cos_TC: Tensor,
        sin_TC: Tensor,
        q_norm_d: Tensor | None = None,
        k_norm_d: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], 2)
        return turned(q, q_norm_d, cos_TC, sin_TC), turned(k, k_norm_d, cos_TC, sin_TC), v

    return run

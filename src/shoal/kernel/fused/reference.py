"""The meaning of the fused operators, in plain torch, in fp32 or wider inside.

Shapes: M rows, N numbers of a row, F ffn_hidden, V vocabulary, H query heads, K key/value
heads, d head_dim, C = d / 2 pairs, P positions.

Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Su et al., RoFormer,
2021; Shazeer, GLU Variants Improve Transformer, 2020; Holtzman et al., The Curious Case of
Neural Text Degeneration, 2020 (top-p).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.fused.trains import TrainableKernel
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


class _Reference(BaseKernel):
    backend: ClassVar[str] = "reference"
    invariant: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    memory_share: ClassVar[float] = 0.1
    compute_share: ClassVar[float] = 0.05
    call_s: ClassVar[float] = 5e-5


@part
class ReferenceRmsNorm(TrainableKernel, _Reference):
    """``y = x / sqrt(mean(x^2) + eps) * weight`` after ``x += delta``.

    Constants: weight [N], eps. ``ready(x[M, N], delta[M, N] or None) -> y[M, N]``; x changes
    where delta is given.
    """

    op: ClassVar[str] = "rms_norm"

    def _prepare(self, call: PointwiseCall, weight_N: Tensor, eps: float) -> Ready:
        from shoal.kernel.fused.reference_training import rms_norm

        norm = rms_norm(eps)

        def run(x_MN: Tensor, delta_MN: Tensor | None = None) -> Tensor:
            if delta_MN is not None:
                x_MN += delta_MN
            normed: Tensor = norm(x_MN, weight_N)
            return normed

        return run


@part
class ReferenceRope(TrainableKernel, _Reference):
    """Rotary embedding of queries and keys, after their norms if the model has them.

    Constants: cos and sin [P, C] in fp32, weights of the norms of queries and keys [d] or None, H,
    K, eps. ``ready(qkv[M, (H + 2K) d], position[M]) -> q[M, H, d], k, v[M, K, d]``; qkv is
    overwritten, and the results may be views of it.
    """

    op: ClassVar[str] = "rope"

    def _prepare(
        self,
        call: PointwiseCall,
        cos_PC: Tensor,
        sin_PC: Tensor,
        q_norm_d: Tensor | None,
        k_norm_d: Tensor | None,
        heads: int,
        kv_heads: int,
        eps: float,
    ) -> Ready:
        from shoal.kernel.fused.reference_training import rope

        split, every = rope(heads, kv_heads, eps), heads + 2 * kv_heads

        def run(qkv_MR: Tensor, position_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            rows_1MNd = qkv_MR.view(1, -1, every, 2 * cos_PC.shape[1])
            cos_MC, sin_MC = cos_PC[position_M], sin_PC[position_M]
            q, k, v = split(rows_1MNd, cos_MC, sin_MC, q_norm_d, k_norm_d)
            return q[0], k[0], v[0]

        return run


@part
class ReferenceSwiglu(TrainableKernel, _Reference):
    """``silu(x[:, :F]) * x[:, F:]``. No constants. ``ready(x[M, 2F]) -> y[M, F]``."""

    op: ClassVar[str] = "swiglu"

    def _prepare(self, call: PointwiseCall) -> Ready:
        from shoal.kernel.fused.reference_training import swiglu

        return swiglu()


@part
class ReferenceSample(_Reference):
    """Samples the next token of every row with temperature, top-k and top-p, in double precision.

    No constants. ``ready(logits[M, V], temperature[M], top_k[M], top_p[M], uniform[M]) ->
    tokens[M]``; the settings in fp64, top_k in int64 with 0 for all.
    """

    op: ClassVar[str] = "sample"

    def _prepare(self, call: PointwiseCall) -> Ready:
        import torch

        def one(logits_V: Tensor, hot: float, top_k: int, top_p: float, uniform: float) -> int:
            if hot == 0:
                return int(logits_V.argmax())
            scores, order = (logits_V.double() / hot).sort(descending=True, stable=True)
            p = torch.softmax(scores[: top_k or None], -1)
            if top_p < 1:
                p = p[: int((p.cumsum(-1) - p < top_p).sum())]
            sums = p.cumsum(-1)
            place = int(torch.searchsorted(sums, uniform * sums[-1], right=True))
            return int(order[min(place, len(p) - 1)])

        def run(
            logits_MV: Tensor, hot_M: Tensor, top_k_M: Tensor, top_p_M: Tensor, uniform_M: Tensor
        ) -> Tensor:
            settings = zip(
                hot_M.tolist(), top_k_M.tolist(), top_p_M.tolist(), uniform_M.tolist(), strict=True
            )
            tokens = [one(row, *each) for row, each in zip(logits_MV, settings, strict=True)]
            return torch.tensor(tokens, dtype=torch.int64, device=logits_MV.device)

        return run

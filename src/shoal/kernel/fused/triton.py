"""Norm, rotation and activation on a GPU, in Triton: a program a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.fused.trains import TrainableKernel
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


def power(n: int) -> int:
    """The least power of two that is no less than ``n``."""
    return 1 << max(0, n - 1).bit_length()


@part
class TritonRmsNorm(TrainableKernel, TritonKernel):
    """Adds, reduces and scales a row in registers."""

    op: ClassVar[str] = "rms_norm"
    invariant: ClassVar[bool] = True

    def _prepare(self, call: PointwiseCall, weight_N: Tensor, eps: float) -> Ready:
        from shoal.kernel.fused.triton_code import rms_norm
        from shoal.kernel.tensors import constant, dtype_of

        width = call.n
        weight = constant("weight", weight_N, (width,), dtype_of(call.dtype))

        def run(x: Tensor, delta: Tensor | None = None) -> Tensor:
            out = x.new_empty(x.shape)
            if delta is not None and not x.is_contiguous():
                x += delta
                delta = None
            x = x.contiguous()
            added = x if delta is None else delta.contiguous()
            rms_norm[(x.numel() // width,)](
                x, added, weight, out, width, eps, delta is not None, power(width)
            )
            return out

        return run


@part
class TritonRope(TrainableKernel, TritonKernel):
    """In place, with the queries and keys of a token per program."""

    op: ClassVar[str] = "rope"
    invariant: ClassVar[bool] = True

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
        from shoal.kernel.fused.triton_code import rope

        half = cos_PC.shape[1]
        cos, sin = cos_PC.contiguous(), sin_PC.contiguous()
        every, turned = heads + 2 * kv_heads, heads + kv_heads

        def run(qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            qkv = qkv.contiguous()
            rows = qkv.numel() // (every * 2 * half)
            # Where there is no norm its weight is never read.
            q_norm = cos if q_norm_d is None else q_norm_d
            k_norm = cos if k_norm_d is None else k_norm_d
            rope[(rows, turned)](
                qkv, cos, sin, position, q_norm, k_norm, every, heads, half, eps,
                q_norm_d is not None, k_norm_d is not None, power(half),
            )  # fmt: skip
            one = qkv.view(rows, every, 2 * half)
            return one[:, :heads], one[:, heads:turned], one[:, turned:]

        return run


@part
class TritonSwiglu(TrainableKernel, TritonKernel):
    """Fused activation and product of a segment of a row."""

    op: ClassVar[str] = "swiglu"
    invariant: ClassVar[bool] = True

    def _prepare(self, call: PointwiseCall) -> Ready:
        from shoal.kernel.fused.triton_code import swiglu

        width = call.out
        block = min(1024, power(width))

        def run(x: Tensor) -> Tensor:
            out = x.new_empty(*x.shape[:-1], width)
            rows = out.numel() // width
            swiglu[(rows, -(-width // block))](x.contiguous(), out, width, block)
            return out

        return run


@part
class TritonSample(TritonKernel):
    """One program per row for requests without top-k and top-p.

    Rows with top-k or top-p use the reference, because they need a sorted vocabulary.
    """

    op: ClassVar[str] = "sample"

    def _prepare(self, call: PointwiseCall) -> Ready:
        import torch

        from shoal.kernel.fused.reference import ReferenceSample as Reference
        from shoal.kernel.fused.triton_code import sample

        width = call.n
        reference = Reference().prepare(call)

        def run(
            logits: Tensor, hot: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
        ) -> Tensor:
            limited = ((top_k > 0) & (top_k < width)) | (top_p < 1) | (hot == 0)
            if bool(limited.any()):
                chosen: Tensor = reference(logits, hot, top_k, top_p, uniform)
                return chosen
            out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            # By falling score, as the reference counts.
            scores, order = logits.double().sort(descending=True, stable=True)
            sample[(len(logits),)](scores, hot, uniform, out, width, min(1024, power(width)))
            return order.gather(1, out[:, None])[:, 0]

        return run

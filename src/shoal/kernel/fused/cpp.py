"""The fused operators in C++ with AVX-512: one pass, one call, no intermediate tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.fused.trains import TrainableKernel
from shoal.kernel.native import function
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


class _Cpp(BaseKernel):
    backend: ClassVar[str] = "cpp"
    invariant: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.6
    compute_share: ClassVar[float] = 0.1
    call_s: ClassVar[float] = 3e-6


@part
class CppRmsNorm(TrainableKernel, _Cpp):
    """Computes and scales a row while it is in the L1 cache."""

    op: ClassVar[str] = "rms_norm"

    def _prepare(self, call: PointwiseCall, weight_N: Tensor, eps: float) -> Ready:
        from shoal.kernel.tensors import constant, dtype_of

        width = call.n
        weight = constant("weight", weight_N, (width,), dtype_of(call.dtype))
        run, at = function("fused", f"rms_norm_{call.dtype}", "pppplllf"), weight.data_ptr()

        def norm(x: Tensor, delta: Tensor | None = None) -> Tensor:
            if delta is None:
                x, added = x.contiguous(), 0
            else:
                # x changes in its place: only rows that lie behind each other are taken.
                delta = delta.contiguous()
                added = delta.data_ptr()
                if not x.is_contiguous():
                    x += delta
                    x, added = x.contiguous(), 0
            out = x.new_empty(x.shape)
            run(x.data_ptr(), added, at, out.data_ptr(), x.numel() // width, width, width, eps)
            return out

        norm.constants = weight  # type: ignore[attr-defined]
        return norm


@part
class CppRope(TrainableKernel, _Cpp):
    """In place, fused with the norms of queries and keys."""

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
        import torch

        from shoal.kernel.tensors import constant, dtype_of

        dim, dtype = 2 * cos_PC.shape[1], dtype_of(call.dtype)
        cos, sin = (
            constant(name, table, tuple(cos_PC.shape), torch.float32)
            for name, table in (("cos", cos_PC), ("sin", sin_PC))
        )
        norms = [
            None if norm is None else constant("norm", norm, (dim,), dtype)
            for norm in (q_norm_d, k_norm_d)
        ]
        tables = [cos.data_ptr(), sin.data_ptr()]
        q_at, k_at = (0 if norm is None else norm.data_ptr() for norm in norms)
        every, turned = heads + 2 * kv_heads, heads + kv_heads
        run = function("fused", f"rope_{call.dtype}", "ppppp" + "p" + "lllllf")

        def rotate(qkv: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            qkv = qkv.contiguous()
            rows = qkv.numel() // (every * dim)
            run(
                qkv.data_ptr(), *tables, position.data_ptr(), q_at, k_at,
                rows, every, heads, turned, dim, eps,
            )  # fmt: skip
            heads_first = qkv.view(rows, every, dim)
            return heads_first[:, :heads], heads_first[:, heads:turned], heads_first[:, turned:]

        rotate.constants = (cos, sin, norms)  # type: ignore[attr-defined]
        return rotate


@part
class CppSwiglu(TrainableKernel, _Cpp):
    """Fused activation and product, sixteen numbers at a time."""

    op: ClassVar[str] = "swiglu"

    def _prepare(self, call: PointwiseCall) -> Ready:
        width = call.out
        run = function("fused", f"swiglu_{call.dtype}", "ppll")

        def gate(x: Tensor) -> Tensor:
            x = x.contiguous()
            out = x.new_empty(*x.shape[:-1], width)
            run(x.data_ptr(), out.data_ptr(), out.numel() // width, width)
            return out

        return gate


@part
class CppSample(_Cpp):
    """Whole rows in double precision; sorts only the candidates that top-k and top-p need."""

    op: ClassVar[str] = "sample"
    memory_share: ClassVar[float] = 0.05

    def _prepare(self, call: PointwiseCall) -> Ready:
        import torch

        width = call.n
        run = function("fused", f"sample_{call.dtype}", "ppppppll")

        def pick(
            logits: Tensor, hot: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
        ) -> Tensor:
            logits = logits.contiguous()
            out = torch.empty(len(logits), dtype=torch.int64)
            run(
                logits.data_ptr(), out.data_ptr(), hot.data_ptr(), top_k.data_ptr(),
                top_p.data_ptr(), uniform.data_ptr(), len(logits), width,
            )  # fmt: skip
            return out

        return pick

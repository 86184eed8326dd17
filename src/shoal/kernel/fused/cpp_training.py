"""Training's passes in C++ with AVX-512: nothing between them, the same sums for any threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.core.native import compiler, cpu_flags
from shoal.kernel.fused import autograd
from shoal.kernel.fused.protocols import OperatorPasses
from shoal.kernel.native import function
from shoal.kernel.protocols import Ready

IGNORE = -100
"""A target with this value counts nothing."""

NEEDS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_bf16"})
"""Flags of a CPU that runs these."""

# Rows whose shares of a weight's gradient are one sum, as in native/fused.cpp.
_ROWS = 32
_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

_Functions = dict[torch.dtype, Callable[..., Any]]


def _functions(symbol: str, arguments: str) -> _Functions:
    return {
        dtype: function("fused", f"{symbol}_{name}", arguments) for dtype, name in _TYPES.items()
    }


def _of(functions: _Functions, x: Tensor) -> Callable[..., Any]:
    run = functions.get(x.dtype)
    if run is None:
        raise KernelError(
            f"kernel: rows in {x.dtype}: cpp takes {' and '.join(_TYPES.values())}; take torch"
        )
    return run


def _partial(x: Tensor, rows: int, width: int) -> Tensor:
    return x.new_empty(-(-rows // _ROWS), width, dtype=torch.float32)


def _weight(weight: Tensor) -> Tensor:
    return weight.detach().to(torch.float32).contiguous()


def rms_norm(eps: float) -> Ready:
    """Passes of the norm: each row is read while it is in the first cache."""
    ahead, back = _functions("rms_norm_forward", "pppllf"), _functions("rms_norm_grad", "ppppppllf")

    def forward(x: Tensor, weight_N: Tensor) -> Tensor:
        run, x, weight = _of(ahead, x), x.contiguous(), _weight(weight_N)
        out, width = torch.empty_like(x), x.shape[-1]
        run(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps)
        return out

    def backward(grad: Tensor, x: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
        grad, x, weight = grad.to(x.dtype).contiguous(), x.contiguous(), _weight(weight_N)
        width = x.shape[-1]
        rows = x.numel() // width
        grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
        partial = _partial(x, rows, width)
        _of(back, x)(
            grad.data_ptr(), x.data_ptr(), weight.data_ptr(), grad_x.data_ptr(),
            grad_weight.data_ptr(), partial.data_ptr(), rows, width, eps,
        )  # fmt: skip
        return grad_x, grad_weight

    return functools.partial(autograd.rms_norm, OperatorPasses(forward, backward))


def swiglu() -> Ready:
    """Passes of the activation, whose exponential is computed again on the way back."""
    ahead, back = _functions("swiglu", "ppll"), _functions("swiglu_grad", "pppll")

    def forward(x: Tensor) -> Tensor:
        run, x, width = _of(ahead, x), x.contiguous(), x.shape[-1] // 2
        out = x.new_empty(*x.shape[:-1], width)
        run(x.data_ptr(), out.data_ptr(), out.numel() // max(1, width), width)
        return out

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        grad, x, width = grad.to(x.dtype).contiguous(), x.contiguous(), x.shape[-1] // 2
        out = torch.empty_like(x)
        _of(back, x)(
            grad.data_ptr(), x.data_ptr(), out.data_ptr(), grad.numel() // max(1, width), width
        )
        return out

    return functools.partial(autograd.swiglu, OperatorPasses(forward, backward))


def rope(heads: int, kv_heads: int, eps: float) -> Ready:
    """Passes of norm, rotation and split: one buffer each way."""
    ahead = _functions("rope_split", "pppppp" + "llllll" + "f")
    back = _functions("rope_split_grad", "ppp" + "ppp" + "pp" + "pp" + "pp" + "llllll" + "f")
    turned = heads + kv_heads

    def at(weight: Tensor | None) -> int:
        return 0 if weight is None else weight.data_ptr()

    def forward(
        qkv: Tensor, cos: Tensor, sin: Tensor, q_norm_d: Tensor | None, k_norm_d: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        run, qkv = _of(ahead, qkv), qkv.contiguous()
        batch, length, every, dim = qkv.shape
        cos, sin = _weight(cos), _weight(sin)
        q_norm, k_norm = (None if w is None else _weight(w) for w in (q_norm_d, k_norm_d))
        out = torch.empty_like(qkv)
        run(
            qkv.data_ptr(), out.data_ptr(), cos.data_ptr(), sin.data_ptr(), at(q_norm), at(k_norm),
            batch * length, length, every, heads, turned, dim, eps,
        )  # fmt: skip
        return out[:, :, :heads], out[:, :, heads:turned], out[:, :, turned:]

    def backward(
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        qkv: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        q_norm_d: Tensor | None,
        k_norm_d: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        grads = [x if x.stride(-1) == 1 else x.contiguous() for x in (grad_q, grad_k, grad_v)]
        batch, length, _, dim = grad_q.shape
        every = turned + kv_heads
        cos, sin = _weight(cos), _weight(sin)
        q_norm, k_norm = (None if w is None else _weight(w) for w in (q_norm_d, k_norm_d))
        out = grad_q.new_empty(batch, length, every, dim)
        strides = (ctypes.c_int64 * 9)(*(step for x in grads for step in x.stride()[:3]))
        rows, norms, partial = batch * length, None, None
        if qkv is not None:
            qkv = qkv.contiguous()
            norms, partial = cos.new_empty(2, dim), _partial(out, rows, 2 * dim)
        _of(back, out)(
            *(x.data_ptr() for x in grads), ctypes.addressof(strides), at(qkv), out.data_ptr(),
            cos.data_ptr(), sin.data_ptr(), at(q_norm), at(k_norm), at(norms), at(partial),
            rows, length, every, heads, turned, dim, eps,
        )  # fmt: skip
        if norms is None:
            return out, None, None
        return out, norms[0], norms[1]

    return functools.partial(autograd.rope, OperatorPasses(forward, backward))


@functools.cache
def runs_here() -> bool:
    """Whether this host can build and run the passes of this module."""
    return compiler() is not None and cpu_flags() >= NEEDS


def loss_gradient(logits_RV: Tensor, targets_R: Tensor, weights_R: Tensor | None) -> Tensor:
    """Cross-entropies of rows [R] in fp32; the logits become the gradient of their sum.

    Args:
        logits_RV: in bf16, contiguous.
        targets_R: int64; those equal to -100 count nothing.
        weights_R: how much each row counts; 1 if not given.

    Raises:
        KernelError: a target is no column.
    """
    rows, width = logits_RV.shape
    targets = targets_R.contiguous()
    # They are addresses in what follows.
    wrong = targets[((targets < 0) & (targets != IGNORE)) | (targets >= width)]
    if len(wrong):
        raise KernelError(f"target {int(wrong[0])}: expected 0 to {width - 1}, or {IGNORE}")
    weights = None if weights_R is None else _weight(weights_R)
    losses = logits_RV.new_empty(rows, dtype=torch.float32)
    function("fused", "loss_gradient_bf16", "ppppll")(
        logits_RV.data_ptr(), targets.data_ptr(), 0 if weights is None else weights.data_ptr(),
        losses.data_ptr(), rows, width,
    )  # fmt: skip
    return losses

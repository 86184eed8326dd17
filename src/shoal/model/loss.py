"""Cross-entropy of next tokens without fp32 copies of the logits.

Shapes: N tokens, D hidden, V vocabulary.

The gradient of the loss by the logits is ``softmax - onehot``; it is computed while the
logits are at hand and turned into the gradients of hidden states and output matrix at
once, so that nothing of size [N, V] outlives the forward pass. Softmax and loss are
taken in fp32 (or fp64), a few rows at a time.

Source: the idea of Cut Your Losses, Wijmans et al., 2024, and of Liger Kernel, Hsu et
al., 2024, with plain operators.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernel.fused.cpp_training import IGNORE as IGNORE
from shoal.kernel.fused.cpp_training import loss_gradient, runs_here

# Logits held at a time, and those of them in fp32 at a time: what fits a cache of a CPU, and what
# keeps an accelerator busy for the launch of the next operator.
_CHUNK_ELEMENTS = 2**24
_EXACT_ELEMENTS, _EXACT_ACCELERATED = 2**18, 2**22


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor | None, total: Tensor
) -> None:
    """Add the loss to ``total`` and turn ``logits`` into their gradient, in place."""
    exact = total.dtype
    on_cpu = logits.device.type == "cpu"
    if on_cpu and logits.dtype == torch.bfloat16 and runs_here():
        total += loss_gradient(logits, targets, weights).sum()
        return
    rows = max(1, (_EXACT_ELEMENTS if on_cpu else _EXACT_ACCELERATED) // logits.shape[1])
    for first in range(0, len(logits), rows):
        part = logits[first : first + rows]
        target = targets[first : first + rows].unsqueeze(1)
        counted = target != IGNORE
        target = target.where(counted, 0)
        p = part.to(exact)  # the logits themselves where they are exact already
        hit = p.gather(1, target)
        top = p.amax(-1, keepdim=True)
        p.sub_(top).exp_()
        scale = p.sum(-1, keepdim=True)
        # Of two large numbers first the difference: it is exact.
        loss = scale.log() + (top - hit)
        if weights is not None:
            weight = weights[first : first + rows, None].to(exact)
            loss = loss * weight
        total += loss.where(counted, 0.0).sum()
        p.div_(scale)
        p.scatter_add_(1, target, p.new_full((1, 1), -1.0).expand(len(p), 1))
        if weights is not None:
            p.mul_(weight * counted)
        elif not on_cpu or not bool(counted.all()):  # an accelerator is not waited for
            p.mul_(counted)
        if p.dtype != part.dtype:
            part.copy_(p)


def _all(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, and its gradients by hidden states and output matrix."""
    exact = torch.promote_types(hidden_ND.dtype, torch.float32)
    weight = weight_VD.to(hidden_ND.dtype)
    total = torch.zeros((), dtype=exact, device=hidden_ND.device)
    grad_hidden = torch.empty_like(hidden_ND)
    grad_weight: Tensor | None = None
    rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    for first in range(0, len(hidden_ND), rows):
        part = hidden_ND[first : first + rows]
        logits = part @ weight.T
        weights = None if weights_N is None else weights_N[first : first + rows]
        _loss_and_gradient(logits, targets_N[first : first + rows], weights, total)
        torch.mm(logits, weight, out=grad_hidden[first : first + rows])
        step = (logits.T @ part).to(weight_VD.dtype)
        grad_weight = step if grad_weight is None else grad_weight.add_(step)
    return total, grad_hidden, torch.zeros_like(weight_VD) if grad_weight is None else grad_weight


class _LinearLoss(torch.autograd.Function):
    """Output matrix, softmax and loss in one, gradients included."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        weights_N: Tensor | None,
    ) -> Tensor:
        total, *gradients = _all(hidden_ND, weight_VD, targets_N, weights_N)
        # Scaled in place and handed on without a copy by the first backward pass; a second one
        # through the same graph, which is rare, computes them again.
        ctx.gradients = gradients
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, weights_N)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.gradients or _all(*ctx.saved_tensors)[1:]
        ctx.gradients = None
        return grad_hidden.mul_(grad.to(grad_hidden.dtype)), grad_weight.mul_(grad), None, None


def token_loss_sum(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, weights_N: Tensor | None = None
) -> Tensor:
    """Sum over tokens of the cross-entropy of ``hidden @ weight.T``, in nats.

    Args:
        hidden_ND: final hidden states [N, D] in the dtype to compute in.
        weight_VD: output matrix [V, D], in that dtype or a wider one.
        targets_N: next tokens [N], int64; those equal to -100 count nothing.
        weights_N: how much each counts [N]; 1 if not given.

    Returns:
        A scalar in fp32 (fp64 for fp64 input).
    """
    hidden_ND, targets_N = hidden_ND.reshape(-1, hidden_ND.shape[-1]), targets_N.reshape(-1)
    weights_N = None if weights_N is None else weights_N.reshape(-1)
    # What follows makes the matrix's gradient in any case; where it is frozen and logits are cheap,
    # they are left to autograd.
    apart = hidden_ND.device.type != "cpu" and not weight_VD.requires_grad
    plain = torch.compiler.is_compiling() or apart
    if plain or not torch.is_grad_enabled():
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = weight_VD.to(hidden_ND.dtype)
        rows = len(hidden_ND) if plain else max(1, _CHUNK_ELEMENTS // 16 // len(weight))
        total = torch.zeros((), dtype=exact, device=hidden_ND.device)
        for first in range(0, len(hidden_ND), rows):
            at = slice(first, first + rows)
            logits = (hidden_ND[at] @ weight.T).to(exact)
            loss = F.cross_entropy(logits, targets_N[at], reduction="none", ignore_index=IGNORE)
            total = total + (loss if weights_N is None else loss * weights_N[at]).sum()
        return total
    out: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N, weights_N
    )
    return out

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

__all__ = ["IGNORE", "token_loss_sum"]

# Targets with this value count nothing.
IGNORE = -100

# Logits held at a time, and those of them in fp32 at a time (which should fit a cache).
_CHUNK_ELEMENTS = 2**24
_EXACT_ELEMENTS = 2**18


def _loss_and_gradient(logits: Tensor, targets: Tensor, total: Tensor) -> None:
    """Add the loss to ``total`` and turn ``logits`` into their gradient, in place."""
    exact = total.dtype
    rows = max(1, _EXACT_ELEMENTS // logits.shape[1])
    scratch = torch.empty(min(rows, len(logits)), logits.shape[1], dtype=exact)
    softmax = torch.empty_like(scratch)
    for first in range(0, len(logits), rows):
        part = logits[first : first + rows]
        target = targets[first : first + rows].unsqueeze(1)
        counted = target != IGNORE
        target = target.where(counted, 0)
        exact_part, p = scratch[: len(part)], softmax[: len(part)]
        exact_part.copy_(part)
        torch.softmax(exact_part, -1, out=p)
        hit = p.gather(1, target)
        if bool((hit < 1e-30).any()):  # the logarithm would lose digits or be infinite
            loss = exact_part.logsumexp(-1, keepdim=True) - exact_part.gather(1, target)
        else:
            loss = hit.log().neg_()
        total += loss.where(counted, 0.0).sum()
        p.scatter_(1, target, hit - 1)
        if not bool(counted.all()):
            p.mul_(counted)
        part.copy_(p)


class _LinearLoss(torch.autograd.Function):
    """Output matrix, softmax and loss in one, gradients included."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = weight_VD.to(hidden_ND.dtype)
        total = torch.zeros((), dtype=exact)
        grad_hidden = torch.empty_like(hidden_ND)
        grad_weight: Tensor | None = None
        rows = max(1, _CHUNK_ELEMENTS // weight.shape[0])
        for first in range(0, len(hidden_ND), rows):
            part = hidden_ND[first : first + rows]
            logits = part @ weight.T
            _loss_and_gradient(logits, targets_N[first : first + rows], total)
            torch.mm(logits, weight, out=grad_hidden[first : first + rows])
            step = (logits.T @ part).to(weight_VD.dtype)
            grad_weight = step if grad_weight is None else grad_weight.add_(step)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad, None


def token_loss_sum(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy of ``hidden @ weight.T``, in nats.

    Args:
        hidden_ND: final hidden states [N, D] in the dtype to compute in.
        weight_VD: output matrix [V, D], in that dtype or a wider one.
        targets_N: next tokens [N], int64; those equal to -100 count nothing.

    Returns:
        A scalar in fp32 (fp64 for fp64 input).
    """
    hidden_ND, targets_N = hidden_ND.reshape(-1, hidden_ND.shape[-1]), targets_N.reshape(-1)
    plain = torch.compiler.is_compiling() or hidden_ND.device.type != "cpu"
    if plain or not torch.is_grad_enabled():
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight = weight_VD.to(hidden_ND.dtype)
        rows = len(hidden_ND) if plain else max(1, _CHUNK_ELEMENTS // 16 // len(weight))
        total = torch.zeros((), dtype=exact, device=hidden_ND.device)
        for part, target in zip(
            torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True
        ):
            logits = (part @ weight.T).to(exact)
            total = total + F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORE)
        return total
    out: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, targets_N
    )
    return out

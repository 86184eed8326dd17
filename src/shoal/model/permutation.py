"""Tokens go to their experts' places, a row for each choice, and what is made of them comes back.

Rows lie by expert, so that one expert's are behind each other, and by token within. A token's sum
over its choices is gathered (:func:`torch.embedding_bag`), not scattered: the forward pass of
coming back and the backward pass of going there read each row once and write each token once.

Shapes: N tokens, D hidden, E experts, K choices of a token, M rows, of choices that hold.

Source: Gale et al., MegaBlocks, 2023, section 5.2 (permutation); Liu et al., MoE Parallel Folding,
2025, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RoutingPermutation:
    """Which row is which choice.

    Args:
        expert_NK: the experts that tokens go to.
        keep_NK: choices that hold; all, if not given.

    Attributes:
        counts_E: rows of every expert.
    """

    def __init__(self, expert_NK: Tensor, experts: int, keep_NK: Tensor | None = None) -> None:
        self.tokens, self.choices = expert_NK.shape
        expert_M = expert_NK.reshape(-1)
        if keep_NK is None:
            self._choice_M = torch.argsort(expert_M, stable=True)
        else:
            held = keep_NK.reshape(-1).nonzero().squeeze(1)
            expert_M = expert_M[held]
            self._choice_M = held[torch.argsort(expert_M, stable=True)]
        self.counts_E = torch.bincount(expert_M, minlength=experts)
        self._token_M = self._choice_M // self.choices
        self._whole = keep_NK is None
        self._bags: tuple[Tensor, Tensor, Tensor] | None = None

    def permute(self, x_ND: Tensor) -> Tensor:
        """The rows [M, D]."""
        if not (torch.is_grad_enabled() and x_ND.requires_grad):
            return self._rows(x_ND)
        out: Tensor = _There.apply(x_ND, self)  # type: ignore[no-untyped-call]
        return out

    def unpermute(self, rows_MD: Tensor, weight_NK: Tensor) -> Tensor:
        """Each token's weighted sum [N, D] of its rows; zero, if none of its choices holds."""
        if not torch.is_grad_enabled():
            return self._sums(rows_MD, weight_NK)
        out: Tensor = _Back.apply(rows_MD, weight_NK, self)  # type: ignore[no-untyped-call]
        return out

    def _rows(self, x_ND: Tensor) -> Tensor:
        return x_ND.index_select(0, self._token_M)

    def _sums(self, rows_MD: Tensor, weight_NK: Tensor | None = None) -> Tensor:
        if not len(rows_MD):
            return rows_MD.new_zeros(self.tokens, rows_MD.shape[1])
        row_M, start_N, choice_M = self._by_token()
        weight_M = None
        if weight_NK is not None:
            weight_M = weight_NK.reshape(-1).to(rows_MD.dtype)
            weight_M = weight_M if self._whole else weight_M.index_select(0, choice_M)
        out: Tensor = torch.embedding_bag(rows_MD, row_M, start_N, per_sample_weights=weight_M)[0]
        return out

    def _by_token(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows by token, where each token's begin, and which choices they are."""
        if self._bags is None:
            order_M, count = self._choice_M, len(self._choice_M)
            every = torch.arange(count, device=order_M.device)
            if self._whole:
                row_M = torch.empty_like(order_M).scatter_(0, order_M, every)
                start_N, choice_M = every[:: self.choices], every
            else:
                choice_M, row_M = order_M.sort()
                held_N = torch.bincount(self._token_M, minlength=self.tokens)
                start_N = held_N.cumsum(0) - held_N
            self._bags = row_M, start_N, choice_M
        return self._bags


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, at: RoutingPermutation) -> Tensor:
        ctx.at = at
        return at._rows(x_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        return ctx.at._sums(grad_MD.contiguous()), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weight_NK: Tensor, at: RoutingPermutation) -> Tensor:
        ctx.save_for_backward(rows_MD, weight_NK)
        ctx.at = at
        return at._sums(rows_MD, weight_NK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_MD, weight_NK = ctx.saved_tensors
        at = ctx.at
        grad_MD = at._rows(grad_ND)
        of_weight = of_rows = None
        if ctx.needs_input_grad[1]:
            exact = torch.promote_types(grad_MD.dtype, torch.float32)
            dot_M = (grad_MD * rows_MD).sum(-1, dtype=exact).to(weight_NK.dtype)
            of_weight = weight_NK.new_zeros(math.prod(weight_NK.shape))
            of_weight = of_weight.index_copy_(0, at._choice_M, dot_M).view_as(weight_NK)
        if ctx.needs_input_grad[0]:
            weight_M = weight_NK.reshape(-1).index_select(0, at._choice_M)
            of_rows = grad_MD.mul_(weight_M.to(grad_MD.dtype).unsqueeze(1))
        return of_rows, of_weight, None

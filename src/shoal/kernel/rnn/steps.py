"""An LSTM over a sequence by products for few rows and one call a step; with gradients.

For a large state and few sequences at a time: its matrix does not stay in the caches, as the
kernels of ``recurrence`` want it, and goes through the units for matrices in its own precision.

Shapes: B sequences, T places, D units. Gates lie side by side: in, forget, out, cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.kernel.native import function
from shoal.kernel.tensors import name_of

Multiplier = Callable[[Tensor], Callable[[Tensor], Tensor]]
"""A matrix [N, K] -> the product of rows [B, K] with it, as a linear layer has it."""


def lstm_steps(gates_BTG: Tensor, onto_GD: Tensor, multiplier: Multiplier) -> Tensor:
    """What an LSTM gives from a state of zeros [B, T, D]; differentiable once.

    Args:
        gates_BTG: what comes from the input, with the biases.
        onto_GD: the recurrent matrix.
        multiplier: makes the products.
    """
    out: Tensor = _Steps.apply(gates_BTG, onto_GD, multiplier)  # type: ignore[no-untyped-call]
    return out


class _Steps(torch.autograd.Function):
    """Forward and backward, a step at a time."""

    @staticmethod
    def forward(ctx: Any, gates_BTG: Tensor, onto_GD: Tensor, multiplier: Multiplier) -> Tensor:
        gates_BTG = gates_BTG.contiguous()
        batch, places, across = gates_BTG.shape
        width = across // 4
        run = function("lstm", f"lstm_cell_{name_of(gates_BTG.dtype)}", "plppppplpll")
        product = multiplier(onto_GD.detach())
        out = gates_BTG.new_empty(batch, places, width)
        kept = torch.empty_like(gates_BTG) if any(ctx.needs_input_grad) else None
        cells = gates_BTG.new_zeros(places + 1, batch, width, dtype=torch.float32)
        h = gates_BTG.new_zeros(batch, width)
        size, wide = across * gates_BTG.element_size(), width * out.element_size()
        far, at = 4 * batch * width, cells.data_ptr()
        for place in range(places):
            onto = product(h)
            run(
                gates_BTG.data_ptr() + place * size, places * across, onto.data_ptr(),
                at + place * far, at + (place + 1) * far, h.data_ptr(),
                out.data_ptr() + place * wide, places * width,
                0 if kept is None else kept.data_ptr() + place * size, batch, width,
            )  # fmt: skip
        if kept is not None:
            ctx.save_for_backward(kept, cells, out, onto_GD)
            ctx.multiplier = multiplier
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, Tensor, None]:
        kept, cells, out, onto_GD = ctx.saved_tensors
        grad_BTD = grad_BTD.to(out.dtype).contiguous()
        batch, places, width = out.shape
        across = 4 * width
        run = function("lstm", f"lstm_back_{name_of(out.dtype)}", "plppplppppll")
        product = ctx.multiplier(onto_GD.t().contiguous())
        dgates = torch.empty_like(kept)
        side = out.new_empty(batch, across)
        dcell = torch.zeros_like(cells[0])
        size, wide = across * out.element_size(), width * out.element_size()
        far, at = 4 * batch * width, cells.data_ptr()
        behind: Tensor | None = None
        for place in reversed(range(places)):
            run(
                kept.data_ptr() + place * size, places * across, at + place * far,
                at + (place + 1) * far, grad_BTD.data_ptr() + place * wide, places * width,
                0 if behind is None else behind.data_ptr(), dcell.data_ptr(),
                dgates.data_ptr() + place * size, side.data_ptr(), batch, width,
            )  # fmt: skip
            behind = product(side)
        # The first step's state is zero.
        later = dgates[:, 1:].reshape(-1, across)
        donto = later.t() @ out[:, :-1].reshape(-1, width)
        return dgates, donto, None

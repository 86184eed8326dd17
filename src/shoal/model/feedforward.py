"""Feed-forward layers: SwiGLU, dense and as a mixture of experts.

Shapes: N tokens, D hidden, F ffn_hidden, E experts.

Source: Shazeer, GLU Variants Improve Transformer, 2020; Jiang et al., Mixtral of
Experts, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.fused.torch_training import gate
from shoal.kernel.protocols import Ready
from shoal.model.config import ModelConfig
from shoal.model.desync import own, shared

__all__ = ["Experts", "SwiGLU", "gate"]


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; rows of ``gate_up_proj``: F of gate, F of up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.ffn_hidden, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.ffn_hidden, config.hidden, bias=config.ffn_bias)
        self.width, self.apart = config.ffn_hidden, config.architecture.residual.apart
        self.kernel: Ready | None = None  # see shoal.model.accelerate and shoal.model.trained

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each token by itself."""
        gates = own(self.gate_up_proj(x_BTD), self.apart, (self.width, self.width))
        out: Tensor = self.down_proj(shared((self.kernel or gate)(gates), self.apart))
        return out


class Experts(nn.Module):
    """SwiGLU experts, of which each token visits ``top_k``.

    No token is dropped. Tokens are sorted by expert, so that every expert is two matrix
    products; the sums are taken in a fixed order, so that a pass can be repeated exactly.
    """

    kernel: Ready | None = None  # see shoal.model.accelerate and shoal.model.trained
    # By parameter: who multiplies with each expert's part of it, where that is not the library.
    multiply: Mapping[nn.Parameter, Sequence[Callable[[Tensor], Tensor]]] = {}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.normalise = config.norm_topk_prob
        self.router = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.ffn_hidden, config.hidden)
        )
        self.down_proj = nn.Parameter(
            torch.empty(config.num_experts, config.hidden, config.ffn_hidden)
        )

    def use(self, linear: Callable[[Tensor], Callable[[Tensor], Tensor]], *, release: bool) -> None:
        """Multiply with the matrix [O, I] of every expert by what ``linear`` makes of it.

        Args:
            linear: may keep the matrix, or something else in its place.
            release: the parameters themselves are not needed any more.
        """
        found: dict[nn.Parameter, Sequence[Callable[[Tensor], Tensor]]] = {}
        for weight_EOI in (self.gate_up_proj, self.down_proj):
            if isinstance(weight_EOI, nn.Parameter):
                found[weight_EOI] = [linear(weight) for weight in weight_EOI.unbind(0)]
                if release:
                    weight_EOI.data = weight_EOI.new_empty(0)
        self.multiply = found

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Weighted sum of the chosen experts, token by token."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        logits_NE = self.router(x_ND)
        exact = torch.promote_types(logits_NE.dtype, torch.float32)
        probability_NE = torch.softmax(logits_NE.to(exact), -1)
        weight_NK, expert_NK = torch.topk(probability_NE, self.top_k, dim=-1)
        if self.normalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        expert = expert_NK.reshape(-1)
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert, minlength=self.num_experts).tolist()
        token = order // self.top_k
        gated = (self.kernel or gate)(self.product(x_ND[token], self.gate_up_proj, counts))
        rows = self.product(gated, self.down_proj, counts)
        weighted = rows * weight_NK.reshape(-1, 1)[order].to(rows.dtype)
        out_ND = torch.zeros_like(x_ND).index_add(0, token, weighted.to(x_ND.dtype))
        return out_ND.view_as(x_BTD)

    def product(self, rows_MI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        """Each expert's matrix with its own rows, which lie behind each other; [M, O]."""
        every = self.multiply.get(weight_EOI) if isinstance(weight_EOI, nn.Parameter) else None
        if every is None:
            # Unbound in one piece: the gradient of an index is a whole tensor of zeros but for it.
            every = [partial(F.linear, weight=weight) for weight in weight_EOI.unbind(0)]
        return torch.cat(
            [
                multiply(rows)
                for rows, multiply in zip(torch.split(rows_MI, counts), every, strict=True)
                if len(rows)
            ]
        )

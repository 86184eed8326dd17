"""Experts that live on ranks of their own grid: tokens go to them, and their outputs come back.

The ranks of a stage are a grid ``dp x cp x tp`` to attention and ``edp x ep x etp`` to experts. No
data moves between the two views: a rank owns some tokens, whatever its place is called. Of an
expert's matrices it holds a slice of the width, 1 / etp of it, and of the experts 1 / ep.

1. Route this rank's tokens; sort their (token, choice) pairs by expert.
2. Tell the ranks of the ep group how many rows come to them, and send the rows.
3. Gather the rows of the etp group, whose ranks have the other slices of the same experts.
4. Sort by expert, and multiply each expert's matrices with its rows.
5. Back: sum over the etp group, send home, weigh and add up the choices of each token.

No token is dropped, and no expert must have one.

Shapes: N tokens of this rank, E experts, X of this rank, K choices of a token, M rows, D hidden, F
width of this rank's slices.

Source: Liu et al., MoE Parallel Folding, 2025, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.model.feedforward import Experts, gate
from shoal.parallel.expert.chunked import chunked
from shoal.parallel.expert.exchange import combined, counts_of, exchanged, spread
from shoal.parallel.linear import Linear, grouped

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import ExpertRanks

__all__ = ["DispatchedExperts", "permute", "unpermute"]


def permute(x_ND: Tensor, expert_NK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows by expert.

    Args:
        x_ND: tokens.
        expert_NK: the experts that each goes to.
        experts: how many there are, E.

    Returns:
        A row [M, D] for each choice of each token; which choice [M] each is; and how many rows
        every expert has [E].
    """
    expert = expert_NK.reshape(-1)
    order_M = torch.argsort(expert, stable=True)
    rows_MD = x_ND[order_M // expert_NK.shape[1]]
    return rows_MD, order_M, torch.bincount(expert, minlength=experts)


def unpermute(rows_MD: Tensor, weight_NK: Tensor, order_M: Tensor) -> Tensor:
    """The weighted sum [N, D] of each token's rows, which lie in the order of :func:`permute`."""
    count, choices = weight_NK.shape
    weighted = rows_MD * weight_NK.reshape(-1, 1)[order_M].to(rows_MD.dtype)
    out_ND = rows_MD.new_zeros(count, rows_MD.shape[-1])
    return out_ND.index_add(0, order_M // choices, weighted)


class DispatchedExperts(Experts):
    """A mixture of experts of which this rank has some, in slices.

    Args:
        config: of the whole layer.
        ranks: the expert grid, as this rank sees it.
        layer: number of the block, for errors.
    """

    # Parts in which rows travel, forward and backward; see shoal.parallel.expert.chunked.
    chunks: tuple[int, int] = (1, 1)

    def __init__(self, config: ModelConfig, ranks: ExpertRanks, layer: int) -> None:
        own = {
            "num_experts": config.num_experts // ranks.ep.world,
            "ffn_hidden": config.ffn_hidden // ranks.etp.world,
        }
        super().__init__(config.model_copy(update=own))
        self.router = Linear.of(
            torch.nn.Linear(config.hidden, config.num_experts, bias=False), ranks.etp
        )
        self.ranks, self.layer = ranks, layer
        self.num_experts = config.num_experts

    def forward(self, x: Tensor, total: int = 0) -> Tensor:
        """Weighted sum of the chosen experts of this rank's tokens [N, D] or [B, T, D].

        Raises:
            ModelError: the router's scores are not numbers; names the block.
        """
        x_ND = x.reshape(-1, x.shape[-1])
        weight_NK, expert_NK = self.route(x_ND)
        rows_MD, order_M, counts_E = permute(x_ND, expert_NK, self.num_experts)
        made_MD = self._there_and_back(rows_MD, counts_E)
        return unpermute(made_MD, weight_NK, order_M).to(x.dtype).view_as(x)

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers [N, K] of the experts of each token."""
        logits_NE = self.router(x_ND)
        exact = torch.promote_types(logits_NE.dtype, torch.float32)
        probability_NE = torch.softmax(logits_NE.to(exact), -1)
        if not bool(torch.isfinite(probability_NE).all()):
            raise ModelError(
                f"blocks.{self.layer}.mlp.router: scores that are not numbers; lower the learning "
                "rate, or go back to a checkpoint before they came up"
            )
        weight_NK, expert_NK = torch.topk(probability_NE, self.top_k, dim=-1)
        if self.normalise:
            weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True)
        return weight_NK, expert_NK

    def _there_and_back(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """What the experts make of rows that are sorted by expert, in the same order."""
        ep, etp = self.ranks.ep, self.ranks.etp
        to_RX = counts_E.view(ep.world, -1)
        from_RX = counts_of(to_RX, ep, per_rank=True)
        # [etp, ep, X] rows of every expert, by who sent them over which rank.
        every = counts_of(from_RX.view(-1), etp, per_rank=False).view(etp.world, *from_RX.shape)
        if max(self.chunks) > 1:
            return chunked(rows_MD, to_RX.cpu(), every, self)
        sent, received = to_RX.sum(-1).tolist(), from_RX.sum(-1).tolist()
        here = exchanged(rows_MD, sent, received, ep)
        each = every.sum((1, 2)).tolist()
        gathered = spread(here, each, etp)
        experts = torch.arange(every.shape[-1]).repeat(etp.world * ep.world)
        order = torch.argsort(experts.repeat_interleave(every.view(-1)), stable=True)
        order = order.to(gathered.device)
        made = self._made(gathered[order], every.sum((0, 1)).tolist())
        unsorted = torch.empty_like(made).index_copy(0, order, made)
        return exchanged(combined(unsorted, each, etp), received, sent, ep)

    def _made(self, rows_MD: Tensor, counts: list[int]) -> Tensor:
        """What this rank's slices of its experts make of their rows, which lie by expert."""
        gated = (self.kernel or gate)(grouped(rows_MD, self.gate_up_proj, counts))
        return grouped(gated, self.down_proj, counts)

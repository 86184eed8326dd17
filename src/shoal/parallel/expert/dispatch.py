"""Experts that live on ranks of their own grid: tokens go to them, and their outputs come back.

The ranks of a stage are a grid ``dp x cp x tp`` to attention and ``edp x ep x etp`` to experts. No
data moves between the two views: a rank owns some tokens, whatever its place is called. Of an
expert's matrices it holds a slice of the width, 1 / etp of it, and of the experts 1 / ep.

1. Route this rank's tokens; sort their (token, choice) pairs by expert. Where an expert has a
   capacity, ranks that share a sequence exchange their scores, and what there is no room
   for is left out.
2. Inform the ranks of the ep group how many rows follow, and send the rows, straight or node by
   node (:mod:`~shoal.parallel.expert.hierarchy`).
3. Gather the rows of the etp group, whose ranks have the other slices of the same experts.
4. Sort by expert, and multiply each expert's matrices with its rows.
5. Back: sum over the etp group, send home, weigh and add up the choices of each token.

Without a capacity no token is dropped; nothing is ever padded to it, and no expert must have a
token.

Shapes: N tokens of this rank, E experts, X of this rank, K choices of a token, M rows, D hidden, F
width of this rank's slices.

Source: Liu et al., MoE Parallel Folding, 2025, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.model.feedforward import Experts, gate
from shoal.model.permutation import RoutingPermutation
from shoal.parallel.expert.chunked import chunked
from shoal.parallel.expert.exchange import combined, counts_of, exchanged, spread
from shoal.parallel.expert.hierarchy import travelled
from shoal.parallel.tensor.linear import WholeLinear, grouped

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.model.config import ModelConfig
    from shoal.model.routing import RoutingResult, Tokens
    from shoal.parallel.protocols import ExpertRanks


class DispatchedExperts(Experts):
    """A mixture of experts of which this rank has some, in slices.

    Args:
        config: of the whole layer.
        ranks: the expert grid, as this rank sees it.
        layer: number of the block, for errors.
    """

    checked = True
    # Parts in which rows travel, forward and backward; see shoal.parallel.expert.chunked.
    chunks: tuple[int, int] = (1, 1)
    # Called in backward passes with the number of a hole; see shoal.parallel.expert.gradients.
    holes: Callable[[int], None] | None = None

    def __init__(self, config: ModelConfig, ranks: ExpertRanks, layer: int) -> None:
        super().__init__(
            config,
            layer,
            held=config.num_experts // ranks.ep.world,
            width=config.ffn_hidden // ranks.etp.world,
        )
        self.router = WholeLinear.of(self.router, ranks.etp)
        self.ranks = ranks

    def forward(self, x: Tensor, total: int = 0, *, tokens: Tokens | None = None) -> Tensor:
        """Weighted sum of the chosen experts of this rank's tokens [N, D] or [B, T, D]."""
        return super().forward(x, tokens=tokens)

    def mixed(self, x_ND: Tensor, routed: RoutingResult) -> Tensor:
        """The same of tokens [N, D] of which it is known where they go."""
        at = RoutingPermutation(routed.experts, self.num_experts, routed.keep)
        made_MD = self._there_and_back(at.permute(x_ND), at.counts_E)
        return at.unpermute(made_MD, routed.weights).to(x_ND.dtype)

    def _there_and_back(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        """What the experts make of rows that are sorted by expert, in the same order."""
        ep, etp = self.ranks.ep, self.ranks.etp
        to_RX = counts_E.view(ep.world, -1)
        # A rank that passes rows on has to know how many all others exchange.
        all_RRX: Tensor | None = None
        if self.ranks.nodes is None:
            from_RX = counts_of(to_RX, ep, per_rank=True)
        else:
            all_RRX = counts_of(counts_E, ep, per_rank=False).view(ep.world, *to_RX.shape)
            from_RX = all_RRX[:, ep.rank].contiguous()
        # [etp, ep, X] rows of every expert, by source and by forwarding rank.
        every = counts_of(from_RX.view(-1), etp, per_rank=False).view(etp.world, *from_RX.shape)
        if max(self.chunks) > 1 or self.holes is not None:
            return chunked(rows_MD, to_RX.cpu(), every, all_RRX, self)
        rows_RR = None if all_RRX is None else all_RRX.sum(-1).numpy()
        sent, received = to_RX.sum(-1).tolist(), from_RX.sum(-1).tolist()
        here = self._across(rows_MD, sent, received, rows_RR)
        each = every.sum((1, 2)).tolist()
        gathered = spread(here, each, etp)
        experts = torch.arange(every.shape[-1]).repeat(etp.world * ep.world)
        order = torch.argsort(experts.repeat_interleave(every.view(-1)), stable=True)
        order = order.to(gathered.device)
        made = self._made(gathered[order], every.sum((0, 1)).tolist())
        unsorted = torch.empty_like(made).index_copy(0, order, made)
        back = None if rows_RR is None else rows_RR.T
        return self._across(combined(unsorted, each, etp), received, sent, back)

    def _across(
        self,
        rows_MD: Tensor,
        sent: list[int],
        received: list[int],
        rows_RR: NDArray[np.int64] | None,
    ) -> Tensor:
        """Rows to the ranks of ep, straight or by node, and theirs, by source."""
        ep, nodes = self.ranks.ep, self.ranks.nodes
        if nodes is None or rows_RR is None:
            return exchanged(rows_MD, sent, received, ep)
        return travelled(rows_MD, rows_RR, nodes, ep.rank)

    def _made(self, rows_MD: Tensor, counts: list[int]) -> Tensor:
        """What this rank's slices of its experts make of their rows, which lie by expert."""
        gated = self._gated(grouped(rows_MD, self.gate_up_proj, counts, self.grouped))
        return grouped(gated, self.down_proj, counts, self.grouped)

    def _gated(self, up_MF: Tensor) -> Tensor:
        """The activation; some kernels cannot be started for no rows."""
        return (self.kernel or gate)(up_MF) if len(up_MF) else gate(up_MF)

"""Experts of which copies are made for a step, where they are expected to be popular.

What :class:`~shoal.parallel.expert.dispatch.DispatchedExperts` does, with another table of who
computes what: before a layer the popular experts are gathered where there is little to do, and a
token goes to the nearest copy of its expert that has room. The table of copies is made of earlier
steps alone; the table of tokens of the counts that all ranks tell each other. A wrong guess costs
time and nothing else: owners serve whatever has no copy.

Shapes: as in ``dispatch``; and H experts that this rank has in a step, its own and copies.

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data
Parallelism, 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.core.parts import table
from shoal.model.feedforward import gate
from shoal.parallel.expert.copies import copies_of, gathered
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.expert.exchange import counts_of, exchanged
from shoal.parallel.linear import grouped
from shoal.plan.placement.owners import in_order
from shoal.plan.placement.protocols import Devices, Expected
from shoal.plan.placement.routing import routed

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.model.config import ModelConfig
    from shoal.parallel.protocols import ExpertRanks
    from shoal.plan.placement.protocols import ExpertPlacer, Flags, Ints

__all__ = ["CopiedExperts", "dispatched"]


def dispatched(
    config: ModelConfig, ranks: ExpertRanks, layer: int, placer: Choice | None = None
) -> DispatchedExperts:
    """Experts on ranks of their own, with copies or without.

    Args:
        config: of the whole layer.
        ranks: the expert grid, as this rank sees it.
        layer: number of the block, for errors.
        placer: of copies; None for experts on their owners alone.
    """
    if placer is None or placer.name == "owners":
        return DispatchedExperts(config, ranks, layer)
    part: ExpertPlacer = table("placer").build(placer, where="parallel.placer")
    return CopiedExperts(config, ranks, layer, part)


class CopiedExperts(DispatchedExperts):
    """A mixture of experts of which this rank owns some, and borrows some.

    Args:
        config: of the whole layer.
        ranks: the expert grid, as this rank sees it; its etp is 1.
        layer: number of the block, for errors.
        placer: decides who borrows what.
    """

    def __init__(
        self, config: ModelConfig, ranks: ExpertRanks, layer: int, placer: ExpertPlacer
    ) -> None:
        super().__init__(config, ranks, layer)
        per_node = ranks.ep.ranks_per_node
        world = ranks.ep.world
        self.devices = Devices(world, per_node if per_node and world % per_node == 0 else world)
        self.owner_E = in_order(self.num_experts, self.devices)
        self.placer = placer
        self.expected = Expected(self.num_experts)
        self._held: Flags | None = None

    @property
    def held(self) -> Flags:
        """Who has which expert in this step."""
        if self._held is None:
            self._held = self.placer.place(self.expected.loads_E, self.owner_E, self.devices)
        return self._held

    def settle(self, load_E: Tensor) -> None:
        """A step is over: the next one has copies of what was popular, on all ranks alike."""
        super().settle(load_E)
        self.expected.see(load_E.cpu().numpy())
        self._held = None

    def moved(self, owner_E: Ints) -> None:
        """Experts have moved: these are their owners now."""
        self.owner_E, self._held = owner_E, None

    def _there_and_back(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        ep = self.ranks.ep
        counts_DE = counts_of(counts_E, ep, per_rank=False).numpy()
        held_EN = self.held
        copies = copies_of(self.owner_E, held_EN, self.devices, ep.rank)
        weights = gathered((self.gate_up_proj, self.down_proj), copies, ep)
        table_DEN = routed(counts_DE, held_EN, self.devices)
        mine_EN, here_DE = table_DEN[ep.rank], table_DEN[:, :, ep.rank]
        sent, received = mine_EN.sum(0).tolist(), here_DE.sum(1).tolist()
        away = _order(mine_EN, rows_MD.device)
        here = exchanged(rows_MD[away], sent, received, ep)
        order = _order(here_DE, rows_MD.device)
        counts = here_DE.sum(0)[list(copies.experts)].tolist()
        rows = here[order]
        gated = (self.kernel or gate)(grouped(rows, weights[0], counts))
        made = grouped(gated, weights[1], counts)
        back = exchanged(torch.empty_like(made).index_copy(0, order, made), received, sent, ep)
        return torch.empty_like(back).index_copy(0, away, back)


def _order(sizes_AB: np.ndarray, device: torch.device) -> Tensor:
    """How rows that lie by A, and within it by B, come to lie by B, and within it by A."""
    of = np.repeat(np.tile(np.arange(sizes_AB.shape[1]), len(sizes_AB)), sizes_AB.reshape(-1))
    return torch.from_numpy(np.argsort(of, kind="stable")).to(device)

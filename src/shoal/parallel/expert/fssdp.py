"""Experts of which copies are made for a step, where they are expected to be popular.

What :class:`~shoal.parallel.expert.dispatch.DispatchedExperts` does, with another table of who
computes what: popular experts are gathered where there is little to do, while the layer's attention
computes, and a token goes to the nearest copy of its expert that has room. The table of copies is
made of earlier steps alone; the table of tokens of the counts that all ranks exchange. A
wrong guess costs time and nothing else: owners serve whatever has no copy.

Shapes: as in ``dispatch``; and H experts that this rank has in a step, its own and copies.

Source: Hecate: Unlocking Efficient Sparse Model Training via Fully Sharded Sparse Data
Parallelism, 2025.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.parallel.expert.copies import copies_of
from shoal.parallel.expert.dispatch import DispatchedExperts
from shoal.parallel.expert.exchange import counts_of
from shoal.parallel.expert.layer_copies import CopyMeter, LayerCopies, begun, handed, landed
from shoal.parallel.tensor.linear import grouped
from shoal.plan.placement.estimates import budget, hidden_again
from shoal.plan.placement.owners import in_order
from shoal.plan.placement.protocols import Devices, LoadForecast
from shoal.plan.placement.routing import routed

if TYPE_CHECKING:
    from torch import nn

    from shoal.core.parts import Choice
    from shoal.ir import Machine, Work
    from shoal.model.config import ModelConfig
    from shoal.model.routing import Tokens
    from shoal.parallel.expert.copies import ExpertCopies
    from shoal.parallel.protocols import ExpertRanks
    from shoal.plan.placement.protocols import ExpertPlacer, Flags, Ints, LinkBudget


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
    if placer is None or "experts_stay" in traits("placer", placer):
        return DispatchedExperts(config, ranks, layer)
    part: ExpertPlacer = table("placer").build(placer, where="parallel.placer")
    return CopiedExperts(config, ranks, layer, part)


def lending(model: nn.Module, work: Work, machine: Machine | None) -> CopyMeter | None:
    """Let a model's layers of experts count their copies together, and choose what each may do.

    Args:
        model: as this rank has it.
        work: its job.
        machine: whose rates say what attention hides; if not given it is taken to hide nothing.

    Returns:
        Where copies are counted; None where there are none.
    """
    result = {one.layer: one for one in model.modules() if isinstance(one, CopiedExperts)}
    if not result:
        return None
    ledger, job = CopyMeter(), work.job
    placer = next(iter(result.values())).placer
    free = None if machine is None else budget(work, machine)
    hidden = machine is not None and hidden_again(work, machine, placer.slots)
    # Whatever is computed again gathers again as it does.
    twice = set(result) if job.recompute == "stage" else job.recomputed(work.shape.num_layers)
    for layer, one in result.items():
        one.meter, one.budget = ledger, free
        # Copies of a stage's last layer are needed again at once.
        auto = placer.rematerialize == "auto" and hidden and layer + 1 in result
        one.again = (auto or placer.rematerialize == "on") and layer not in twice
    return ledger


class CopiedExperts(DispatchedExperts):
    """A mixture of experts of which this rank owns some, and borrows some.

    Args:
        placer: decides who borrows what.

    Attributes:
        again: copies are dropped after the forward pass, and gathered again.
        budget: of links, while attention computes; None for as many copies as there is room for.
        ledger: where they are counted, with those of other layers.
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
        self.expected = LoadForecast(self.num_experts)
        self.again, self.meter = placer.rematerialize == "on", CopyMeter()
        self.budget: LinkBudget | None = None
        self._held: Flags | None = None
        self._copies: ExpertCopies | None = None
        self._begun: tuple[LayerCopies, Tensor] | None = None

    @property
    def held(self) -> Flags:
        """Who has which expert in this step."""
        if self._held is None:
            self._held = self.placer.place(
                self.expected.loads_E, self.owner_E, self.devices, self.budget
            )
        return self._held

    def settle(self, load_E: Tensor) -> None:
        """A step is over: the next one has copies of what was popular, on all ranks alike."""
        super().settle(load_E)
        self.expected.see(load_E.cpu().numpy())
        self._held = self._copies = None

    def moved(self, owner_E: Ints) -> None:
        """Experts have moved: these are their owners now."""
        self.owner_E, self._held, self._copies = owner_E, None, None

    def begin(self) -> None:
        """Ask for this layer's copies, before its attention."""
        if self._copies is None:
            self._copies = copies_of(self.owner_E, self.held, self.devices, self.ranks.ep.rank)
        self._begun = None
        if self._copies.used:
            own = self.gate_up_proj, self.down_proj
            again = self.again and torch.is_grad_enabled()
            lent = LayerCopies(
                own, self._copies, self.ranks.ep, self.meter, layer=self.layer, again=again
            )
            self._begun = lent, begun(lent, own)

    def forward(self, x: Tensor, total: int = 0, *, tokens: Tokens | None = None) -> Tensor:
        """As without copies; :meth:`begin` comes first, or is made up for."""
        if self._begun is None:
            self.begin()
        if self._begun is not None:
            lent, sign = self._begun
            self._begun = lent, handed(lent, sign)
        return super().forward(x, total, tokens=tokens)

    def _there_and_back(self, rows_MD: Tensor, counts_E: Tensor) -> Tensor:
        ep, copies = self.ranks.ep, self._copies
        assert copies is not None
        counts_DE = counts_of(counts_E, ep, per_rank=False).numpy()
        table_DEN = routed(counts_DE, self.held, self.devices)
        mine_EN, here_DE = table_DEN[ep.rank], table_DEN[:, :, ep.rank]
        sent, received = mine_EN.sum(0).tolist(), here_DE.sum(1).tolist()
        away = _order(mine_EN, np.arange(ep.world), rows_MD.device)
        rows_RR = table_DEN.sum(1)
        here = self._across(rows_MD[away], sent, received, rows_RR)
        place_E = np.zeros(self.num_experts, dtype=np.int64)
        place_E[list(copies.experts)] = np.arange(len(copies.experts))
        order = _order(here_DE, place_E, rows_MD.device)
        counts = here_DE.sum(0)[list(copies.experts)].tolist()
        made = self._of_all(here[order], counts, copies.owned)
        unsorted = torch.empty_like(made).index_copy(0, order, made)
        back = self._across(unsorted, received, sent, rows_RR.T)
        return torch.empty_like(back).index_copy(0, away, back)

    def _of_all(self, rows_MD: Tensor, counts: list[int], owned: int) -> Tensor:
        """What this rank's own experts, and then its copies, make of their rows."""
        if self._begun is None:
            return self._made(rows_MD, counts)
        (lent, sign), self._begun = self._begun, None
        mine = sum(counts[:owned])
        own = self._made(rows_MD[:mine], counts[:owned])
        weights = landed(lent, sign)
        again = [partial(_one, lent, n) if lent.again else None for n in range(len(weights))]
        rest = counts[owned:]
        up = grouped(rows_MD[mine:], weights[0], rest, self.grouped, again[0])
        borrowed = grouped(self._gated(up), weights[1], rest, self.grouped, again[1])
        lent.drop()  # what the backward pass needs has references
        return torch.cat([own, borrowed])


def _one(lent: LayerCopies, number: int) -> Tensor:
    return lent.weights()[number]


def _order(sizes_AB: np.ndarray, place_B: np.ndarray, device: torch.device) -> Tensor:
    """How rows that lie by A, and within it by B, come to lie by B's place, and within it by A."""
    of = np.repeat(np.tile(place_B, len(sizes_AB)), sizes_AB.reshape(-1))
    return torch.from_numpy(np.argsort(of, kind="stable")).to(device)

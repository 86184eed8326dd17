"""A linear layer of a model that is served, and what adapters add to it or put into it.

Shapes: N rows of a step, I inputs, O outputs of a site, S adapters in memory, R rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import ServeError
from shoal.model.linear import DispatchedLinear

if TYPE_CHECKING:
    from shoal.serve.adapters.loaded import AdapterBank
    from shoal.train.peft.run.sites import Site


@dataclass
class AdapterRows:
    """The adapter of each row of a step.

    Args:
        runs: (first row, behind the last, slot) of rows that have an adapter.
        single: rows that are multiplied together, int64; none where all are in runs.
        mask: bool [rows, S], true where the slot is another's.
    """

    runs: list[tuple[int, int, int]]
    single: Tensor | None = None
    mask: Tensor | None = None
    spread: dict[int, Tensor] = field(default_factory=dict)

    def others(self, ranks: int) -> Tensor:
        """The mask, a column for each rank of each site of each slot."""
        assert self.mask is not None
        if ranks not in self.spread:
            self.spread[ranks] = self.mask.repeat_interleave(ranks, 1)
        return self.spread[ranks]


@dataclass
class Stack:
    """The matrices of all adapters for one module.

    Args:
        down: [S, sites * R, I].
        ups: first row, behind the last, and [S, R, O] of each site.
        rank: R.
    """

    down: Tensor
    ups: list[tuple[int, int, Tensor]]
    rank: int

    def __post_init__(self) -> None:
        # Views that every step wants.
        self.every_down = self.down.flatten(0, 1).t()
        self.every_up = [up.flatten(0, 1) for _, _, up in self.ups]


class Layered(nn.Module):
    """A linear layer and what adapters add to it.

    Args:
        base: the layer.
        bank: whose rows these are.
        last: it is behind the attention of the last block, where some rows are not needed any more.

    Attributes:
        merged: what takes the place of the layer and of all adapters, or None.
    """

    def __init__(self, base: nn.Module, bank: AdapterBank, *, last: bool) -> None:
        super().__init__()
        self.base = base
        self.merged: nn.Module | None = None
        self._bank = [bank]  # a plain list: the bank is no module of the model
        self._last = last
        self.stack: Stack | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[N, I] to [N, rows]."""
        if self.merged is not None:
            own: Tensor = self.merged(x)
            return own
        out: Tensor = self.base(x)
        bank = self._bank[0]
        rows = bank.needed if self._last else bank.rows
        if rows is None or self.stack is None:
            return out
        stack = self.stack
        for start, stop, slot in rows.runs:
            _add(out[start:stop], x[start:stop] @ stack.down[slot].t(), stack, slot)
        if rows.single is not None:
            self._mixed(out, x, rows, stack)
        return out

    def with_changes(self, changes: Sequence[tuple[Site, Tensor, Tensor]]) -> nn.Module:
        """The base with the changes of one adapter in its weights; the base stays as it is.

        Args:
            changes: sites of this layer, A [R, I] and B [R, O] of each.

        Raises:
            ServeError: the weights are in few bits.
        """
        base = self.base
        if not isinstance(base, nn.Linear | DispatchedLinear):
            raise ServeError(
                "the weights are in few bits, which what an adapter learned does not fit in; "
                "serve it unmerged, or a model with plain weights"
            )
        weight = (base.weight if isinstance(base, nn.Linear) else base.dense()).detach().clone()
        for site, down, up in changes:
            rows = weight[site.start : site.stop]
            # Rounded once, whatever the weights are kept in.
            rows.copy_(rows.float().addmm_(up.float().t(), down.float()))
        if isinstance(base, DispatchedLinear):
            return base.like(weight)
        made = copy.copy(base)
        made._parameters = {**base._parameters, "weight": nn.Parameter(weight, False)}
        return made

    def _mixed(self, out: Tensor, x: Tensor, rows: AdapterRows, stack: Stack) -> None:
        """Add to single rows what is theirs of the products of all adapters."""
        assert rows.single is not None
        every = len(rows.single) == len(x)
        some = x if every else x[rows.single]
        sites = len(stack.ups)
        inner = torch.mm(some, stack.every_down)  # [N, S * sites * R]
        # Not a product with 0: what overflowed for another is NaN then.
        inner.masked_fill_(rows.others(sites * stack.rank), 0.0)
        for place, (start, stop, _) in enumerate(stack.ups):
            own = inner
            if sites > 1:
                own = inner.view(len(some), -1, sites, stack.rank)[:, :, place].flatten(1)
            if every:
                out[:, start:stop].addmm_(own, stack.every_up[place])
            else:
                out[rows.single, start:stop] += own @ stack.every_up[place]


def _add(out: Tensor, inner: Tensor, stack: Stack, slot: int) -> None:
    """Add the products of one adapter to some rows."""
    for place, (start, stop, up) in enumerate(stack.ups):
        own = inner[:, place * stack.rank : (place + 1) * stack.rank]
        out[:, start:stop].addmm_(own, up[slot])

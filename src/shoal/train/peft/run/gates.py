"""Hard-concrete gates on the changes of a matrix.

Source: Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018,
section 2.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.random import seed64
from shoal.train.peft.run.sites import Site, SitePart, SiteRows

if TYPE_CHECKING:
    from shoal.train.peft.diff_pruning import DiffPruning

# The stretched interval of a gate and its temperature, as published.
_LOW, _HIGH, _HEAT = -0.1, 1.1, 2 / 3
# Gates begin nearly open.
_OPEN = 2.0


class GatedChange(SitePart):
    """W + z * w."""

    kept: Tensor
    fixed: Tensor
    replaces = True

    def __init__(self, site: Site, method: DiffPruning, seed: int) -> None:
        super().__init__()
        shape = site.rows, site.columns
        self._method, self._name, self._seed, self._step = method, site.name, seed, 0
        self.change = nn.Parameter(torch.zeros(shape))
        self.gate = nn.Parameter(torch.full(shape, _OPEN))
        self.group = nn.Parameter(torch.full((1,), _OPEN)) if method.structured else None
        self.register_buffer("kept", torch.ones(shape))
        self.register_buffer("fixed", torch.zeros(()))

    def before_step(self, step: int, total: int) -> None:
        """Other gates in every step."""
        self._step = step

    @torch.no_grad()
    def _fix(self) -> None:
        """Leave the largest entries, with their gates as they are on average."""
        self.change.mul_(self._opened(None))
        count = max(1, round(self._method.share * self.change.numel()))
        best = torch.topk(self.change.abs().view(-1), count).indices
        self.kept.zero_().view(-1)[best] = 1.0
        self.change.mul_(self.kept)
        self.fixed.fill_(1.0)

    def after_update(self, step: int, total: int) -> None:
        """Closed gates stay at zero, independent of the optimizer's moments."""
        # Not before a step: what was saved of the last one may still be copied then.
        if not self.fixed and self._method.fix * total <= step + 1 < total:
            self._fix()
        if self.fixed:
            with torch.no_grad():
                self.change.mul_(self.kept)

    def _opened(self, draw: torch.Generator | None) -> Tensor:
        """How far every gate is open, in [0, 1]; as expected without a draw."""
        opened = self._open(self.gate, draw)
        return opened if self.group is None else opened * self._open(self.group, draw)

    @staticmethod
    def _open(gate: Tensor, draw: torch.Generator | None) -> Tensor:
        if draw is None:
            soft = torch.sigmoid(gate)
        else:
            u = torch.rand(gate.shape, generator=draw).to(gate.device).clamp(1e-6, 1 - 1e-6)
            soft = torch.sigmoid((u.log() - (1 - u).log() + gate) / _HEAT)
        return (soft * (_HIGH - _LOW) + _LOW).clamp(0, 1)

    def delta(self) -> Tensor:
        """What is added to the weight [O, I]."""
        if self.fixed:
            return self.change * self.kept
        draw = None
        if self.training:
            # The same gates in every micro-batch of a step, and when a block is computed again.
            key = seed64(self._seed, purpose=f"gates {self._name}", step=self._step)
            draw = torch.Generator().manual_seed(key)
        return self.change * self._opened(draw)

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        bias = rows.bias
        return F.linear(x, (rows.weight + self.delta()).to(x.dtype), bias)

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        before = self.training
        self.train(False)
        try:
            return rows.weight + self.delta(), None
        finally:
            self.train(before)

    def penalty(self) -> Tensor:
        """What the open gates cost: the share that is open, times the price."""
        shift = _HEAT * math.log(-_LOW / _HIGH)
        opened = torch.sigmoid(self.gate - shift)
        if self.group is not None:
            opened = opened * torch.sigmoid(self.group - shift)
        return opened.mean() * (0.0 if self.fixed else self._method.penalty)

    def files(self) -> dict[str, Tensor]:
        """All of it: how sparse it is, ``kept`` says."""
        return dict(self.named_parameters()) | {"kept": self.kept, "fixed": self.fixed}

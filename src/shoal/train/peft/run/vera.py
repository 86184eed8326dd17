"""VeRA at work: vectors that scale a drawn pair."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.train.peft.run.low_rank import LowRankPart, drawn
from shoal.train.peft.run.sites import Site


def shared_pair(r: int, rows: int, columns: int, seed: int) -> dict[str, Tensor]:
    """A [r, columns] and B [rows, r], drawn for all sites; each uses what it needs of them."""
    return {
        "vera_A": drawn((r, columns), columns**-0.5, seed, "vera A"),
        "vera_B": drawn((rows, r), r**-0.5, seed, "vera B"),
    }


class VectorPart(LowRankPart):
    """W + diag(b) B diag(d) A.

    Args:
        initial: of d.
        shared: ``vera_A`` and ``vera_B``.
    """

    def __init__(
        self, site: Site, r: int, initial: float, shared: Mapping[str, Tensor], *, dropout: float
    ) -> None:
        super().__init__(dropout)
        self.vera_lambda_d = nn.Parameter(torch.full((r,), initial))
        self.vera_lambda_b = nn.Parameter(torch.zeros(site.rows))
        self._shared, self._shape = shared, (site.rows, site.columns)

    def pair(self) -> tuple[Tensor, Tensor, float]:
        rows, columns = self._shape
        device = self.vera_lambda_d.device
        down = self._shared["vera_A"][:, :columns].to(device)
        up = self._shared["vera_B"][:rows].to(device)
        return self.vera_lambda_d.unsqueeze(1) * down, self.vera_lambda_b.unsqueeze(1) * up, 1.0

"""Methods that scale or shift what goes through a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.train.peft.run.sites import Site, SitePart, SiteRows


class OutputScale(SitePart):
    """A factor for each output of a site; source: (IA)^3."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.ia3_l = nn.Parameter(torch.ones(site.rows, 1))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        return out * self.ia3_l.view(-1).to(out.dtype)

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        bias = rows.bias
        return rows.weight * self.ia3_l, None if bias is None else bias * self.ia3_l.view(-1)


class InputScale(SitePart):
    """A factor for each input of a site; source: (IA)^3, the feed-forward's hidden layer."""

    replaces = True

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.ia3_l = nn.Parameter(torch.ones(1, site.columns))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        return rows.linear(x * self.ia3_l.view(-1).to(x.dtype))

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        return rows.weight * self.ia3_l, None


class ScaleShift(SitePart):
    """A factor and a shift for each output of a site; source: SSF."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(site.rows))
        self.shift = nn.Parameter(torch.zeros(site.rows))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        return out * self.scale.to(out.dtype) + self.shift.to(out.dtype)

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        bias = rows.bias
        moved = self.shift if bias is None else bias * self.scale + self.shift
        return rows.weight * self.scale.unsqueeze(1), moved


class Shift(SitePart):
    """A change of each output's bias; source: BitFit."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(site.rows))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        return out + self.shift.to(out.dtype)

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        bias = rows.bias
        return rows.weight, self.shift if bias is None else bias + self.shift

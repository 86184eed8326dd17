"""Kronecker products beside a weight, never multiplied out where rows of tokens pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.train.peft.run.low_rank import drawn
from shoal.train.peft.run.sites import Site, SitePart, SiteRows


class Kronecker(SitePart):
    """W + scale * (B kron A).

    Args:
        site: what it is beside, [O, I].
        shape: of A [a, c], whose sides divide O and I; B is [O / a, I / c].
    """

    def __init__(self, site: Site, shape: tuple[int, int], scale: float, seed: int) -> None:
        super().__init__()
        a, c = shape
        self.scale = scale
        self.krona_A = nn.Parameter(drawn((a, c), c**-0.5, seed, f"{site.name}.A"))
        self.krona_B = nn.Parameter(torch.zeros(site.rows // a, site.columns // c))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        """(B kron A) x is B X A^T, with x as a matrix X."""
        cut = x.reshape(*x.shape[:-1], self.krona_B.shape[1], self.krona_A.shape[1])
        inner = cut.to(self.krona_A.dtype) @ self.krona_A.t()
        product = (self.krona_B @ inner).flatten(-2)
        return out + product.to(out.dtype) * self.scale

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        return rows.weight + torch.kron(self.krona_B, self.krona_A) * self.scale, None

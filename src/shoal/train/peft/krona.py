"""KronA: the change of a weight is a Kronecker product.

Source: Edalati et al., KronA: Parameter Efficient Tuning with Kronecker Adapter, 2022.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from shoal.core.parts import part
from shoal.train.peft.base import ATTENTION, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


def divisor(size: int) -> int:
    """The divisor of a size that is nearest to its root from below."""
    return next(d for d in range(math.isqrt(size), 0, -1) if size % d == 0)


@part
class KronA(SiteMethod):
    """W + scale * (B kron A), with B initialized to zero: full rank with few parameters.

    Each dimension of the matrix is split into two factors that are as equal as possible.

    Args:
        scale: factor of the product.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    scale: Annotated[float, Gt(0)] = 1.0
    targets: str = ATTENTION
    name: ClassVar[str] = "krona"

    def count(self, rows: int, columns: int) -> float:
        first, second = divisor(rows), divisor(columns)
        return first * second + (rows // first) * (columns // second)

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.kronecker import Kronecker

        shape = divisor(site.rows), divisor(site.columns)
        return Kronecker(site, shape, self.scale, seed)

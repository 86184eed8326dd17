"""PaFi: the smallest weights are trained, the others stand still; no data is asked.

Source: Liao et al., Parameter-Efficient Fine-Tuning without Introducing New Latency, 2023,
section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.train.peft.base import EVERY, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class PaFi(SiteMethod):
    """Train the entries of each matrix that are nearest to zero; they are the same for every task.

    Args:
        share: share of the entries of a matrix that are trained.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    share: Annotated[float, Gt(0), Le(1)] = 0.01
    targets: str = EVERY
    traits: ClassVar[frozenset[str]] = frozenset({"reads_base"})
    name: ClassVar[str] = "pafi"

    def count(self, rows: int, columns: int) -> float:
        return max(1, round(self.share * rows * columns))

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.sparse import SparsePart

        made = SparsePart(site, int(self.count(site.rows, site.columns)))
        made.choose(-handle.rows(site).weight.abs())
        return made

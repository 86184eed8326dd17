"""VeRA: one drawn pair of matrices for all layers, and two trained vectors for each.

Source: Kopiczko et al., VeRA: Vector-based Random Matrix Adaptation, 2023, equation 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Lt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.peft.base import ATTENTION, SiteMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class Vera(SiteMethod):
    """W + diag(b) B diag(d) A, B and A random and fixed: fewest parameters of mergeable methods.

    Args:
        r: rank of the random pair; much higher than LoRA's, because it is not trained.
        initial: initial value of d; b is initialized with 0.
        dropout: share of the inputs of A that is dropped in training.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    r: Annotated[int, Ge(1)] = 64
    initial: float = 0.1
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    targets: str = ATTENTION
    name: ClassVar[str] = "vera"

    def __post_init__(self) -> None:
        require(self.initial != 0, "finetune.vera.initial", self.initial, expected="not 0")

    def count(self, rows: int, columns: int) -> float:
        return self.r + rows

    def drawn(self, shape: ModelShape) -> float:
        """The pair that all matrices share, as large as the largest of them."""
        every = self.targeted(shape)
        return self.r * float(max(o for o, _ in every) + max(i for _, i in every)) if every else 0.0

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        from shoal.train.peft.run.vera import shared_pair

        columns, rows = max(s.columns for s in sites), max(s.rows for s in sites)
        handle.shared |= shared_pair(self.r, rows, columns, seed)

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.vera import VectorPart

        return VectorPart(site, self.r, self.initial, handle.shared, dropout=self.dropout)

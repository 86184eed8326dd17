"""AdaLoRA: the ranks of all matrices are one budget, assigned where they matter.

Source: Zhang et al., AdaLoRA: Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning,
2023, equations 3 (orthogonality), 8 to 10 (importance) and 12 (budget).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.peft.base import ATTENTION, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class AdaLora(SiteMethod):
    """W + P diag(E) Q: the least important singular values of all matrices are set to zero.

    The mean rank per matrix falls from r to ``target`` as a cubic function of the step, between the
    shares ``begin`` and ``end`` of the run. The importance of a triplet is the moving average of
    |weight x gradient|, multiplied by the moving average of its deviation.

    Args:
        r: initial rank of every matrix.
        target: final mean rank.
        alpha: the change is multiplied by alpha / r.
        begin: share of the steps before the budget falls.
        end: share of the steps after which it is constant.
        every: steps between two allocations.
        beta1: decay of the moving average of the importance.
        beta2: decay of the moving average of its deviation.
        orthogonal: factor of the penalty that keeps P and Q orthogonal.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    r: Annotated[int, Ge(1)] = 12
    target: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 32.0
    begin: Annotated[float, Ge(0)] = 0.1
    end: Annotated[float, Le(1)] = 0.7
    every: Annotated[int, Ge(1)] = 1
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.85
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.85
    orthogonal: Annotated[float, Ge(0)] = 0.1
    targets: str = ATTENTION
    name: ClassVar[str] = "adalora"

    def __post_init__(self) -> None:
        require(
            self.target <= self.r,
            "finetune.adalora.target",
            self.target,
            expected=f"a rank from 1 to r = {self.r}",
        )
        require(
            self.begin < self.end,
            "finetune.adalora.begin",
            self.begin,
            expected="a share below end",
        )

    def count(self, rows: int, columns: int) -> float:
        return self.r * (rows + columns + 1)

    def prepare(self, handle: ModelPeftHandle, sites: list[Site], seed: int) -> None:
        from shoal.train.peft.run.adalora import RankBudget

        handle.attach("", "adalora_budget", RankBudget(self), "budget")

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.adalora import RankBudget, Triplets

        triplets = Triplets(site, self, seed)
        budget = handle.modules["budget"]
        assert isinstance(budget, RankBudget)
        budget.matrices.append(triplets)
        return triplets

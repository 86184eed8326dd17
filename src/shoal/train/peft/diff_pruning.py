"""Diff pruning: a change of every weight, whose entries must be worth their gate.

Source: Guo et al., Parameter-Efficient Transfer Learning with Diff Pruning, 2020, equations 2 to 5;
Louizos et al., Learning Sparse Neural Networks through L0 Regularization, 2018.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.train.peft.base import EVERY, SiteMethod

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site, SitePart


@part
class DiffPruning(SiteMethod):
    """W + z * w, with hard-concrete gates z and an L0 penalty.

    It trains two numbers for each weight, more than full fine-tuning; only the stored change is
    small. From the share ``fix`` of the steps on, only the largest entries are kept and are trained
    without gates.

    Args:
        penalty: weight of the L0 penalty, in nats over all gates.
        structured: a second gate for each matrix, so that whole matrices can close.
        share: share of the entries of a matrix that are kept.
        fix: share of the steps after which the entries are fixed.
        targets: linear layers that it changes: patterns of names joined by a bar.
    """

    penalty: Annotated[float, Ge(0)] = 0.05
    structured: bool = False
    share: Annotated[float, Gt(0), Le(1)] = 0.01
    fix: Annotated[float, Gt(0), Le(1)] = 0.7
    targets: str = EVERY
    traits: ClassVar[frozenset[str]] = frozenset({"reads_base"})
    name: ClassVar[str] = "diff_pruning"

    def count(self, rows: int, columns: int) -> float:
        return 2 * rows * columns + self.structured

    def place(self, handle: ModelPeftHandle, site: Site, seed: int) -> SitePart:
        from shoal.train.peft.run.gates import GatedChange

        return GatedChange(site, self, seed)

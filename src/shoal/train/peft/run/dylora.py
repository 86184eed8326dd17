"""DyLoRA at work: the first ranks of a pair, as many as the step has drawn."""

from __future__ import annotations

from torch import Tensor

from shoal.core.random import generator
from shoal.train.peft.run.low_rank import LowRank
from shoal.train.peft.run.sites import Site


class DyLowRank(LowRank):
    """W + (alpha / b) B[:, :b] A[:b].

    Args:
        alpha: scale times rank.
        use: rank outside of training.
    """

    def __init__(
        self, site: Site, r: int, alpha: float, *, use: int, dropout: float, seed: int
    ) -> None:
        super().__init__(site, r, 1.0, dropout=dropout, seed=seed, where="finetune.dylora.r")
        self.alpha, self.use, self.now, self._seed = alpha, use, r, seed

    def before_step(self, step: int, total: int) -> None:
        """Draw the rank of the step, the same at all sites and on all ranks."""
        self.now = int(generator(self._seed, purpose="dylora", step=step).integers(1, self.r + 1))

    def pair(self) -> tuple[Tensor, Tensor, float]:
        rank = self.now if self.training else self.use
        return self.lora_A[:rank], self.lora_B[:, :rank], self.alpha / rank

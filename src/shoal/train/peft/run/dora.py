"""DoRA at work: magnitude and direction."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.train.peft.run.low_rank import LowRank
from shoal.train.peft.run.sites import Site, SiteRows


class DoraPart(LowRank):
    """m (W + scale B A) / |W + scale B A|, lengths of rows.

    Args:
        rows: the base, whose norms initialize the magnitudes.
    """

    def __init__(
        self, site: Site, rows: SiteRows, r: int, scale: float, *, dropout: float, seed: int
    ) -> None:
        super().__init__(site, r, scale, dropout=dropout, seed=seed, where="finetune.dora.r")
        with torch.no_grad():
            self.lora_magnitude_vector = nn.Parameter(self._length(rows.weight))

    def _length(self, weight: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(weight.float() + self.delta(), dim=1)
        return length

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        with torch.no_grad():
            length = self._length(rows.weight.detach())
        factor = (self.lora_magnitude_vector / length).to(out.dtype)
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        product = F.linear(F.linear(dropped.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        bias = rows.bias
        plain = out if bias is None else out - bias
        # Written so that a fresh method, whose factor is 1, adds an exact zero.
        return out + (factor - 1) * plain + factor * product.to(out.dtype) * self.scale

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        weight = rows.weight.float()
        factor = self.lora_magnitude_vector / self._length(weight)
        return factor.unsqueeze(1) * (weight + self.delta()), None

    def files(self) -> dict[str, Tensor]:
        return super().files() | {"lora_magnitude_vector": self.lora_magnitude_vector}

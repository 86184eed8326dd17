"""UniPELT at work: methods behind gates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.train.peft.run.branches import BlockBranch, Bottleneck
from shoal.train.peft.run.low_rank import LowRank
from shoal.train.peft.run.prompts import PrefixTokens
from shoal.train.peft.run.sites import Site, SiteRows

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle


class GatedLowRank(LowRank):
    """W x + g(x) * scale * B A x, g between 0 and 1."""

    def __init__(self, site: Site, r: int, scale: float, *, seed: int) -> None:
        super().__init__(site, r, scale, seed=seed, where="finetune.unipelt.r")
        self.gate = nn.Parameter(torch.zeros(1, site.columns))
        self.gate_bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        given = x.to(self.lora_A.dtype)
        opened = torch.sigmoid(F.linear(given, self.gate, self.gate_bias))
        product = F.linear(F.linear(given, self.lora_A), self.lora_B) * opened
        return out + product.to(out.dtype) * self.scale

    def files(self) -> dict[str, Tensor]:
        return super().files() | {"gate": self.gate, "gate_bias": self.gate_bias}


class GatedBottleneck(Bottleneck):
    """An adapter behind a gate."""

    def __init__(self, branch: BlockBranch, bottleneck: int, *, seed: int) -> None:
        super().__init__(branch, bottleneck, seed=seed)
        self.gate = nn.Parameter(torch.zeros(1, branch.width))
        self.gate_bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, out: Tensor) -> Tensor:
        """Outputs of the branch, changed as far as the gate is open."""
        opened = torch.sigmoid(F.linear(x.to(self.gate.dtype), self.gate, self.gate_bias))
        changed = super().forward(x, out) - out
        return out + opened.to(out.dtype) * changed


def gate_prefix(handle: ModelPeftHandle) -> None:
    """A gate for the prefix of each layer."""
    prefix = next(m for m in handle.modules.values() if isinstance(m, PrefixTokens))
    device = prefix.inputs.device
    prefix.gate = nn.Parameter(torch.zeros(prefix.sizes[0], device=device))

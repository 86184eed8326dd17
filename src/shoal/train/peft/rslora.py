"""rsLoRA: LoRA whose scale keeps its size at any rank.

Source: Kalajdzievski, A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023.
"""

from __future__ import annotations

import math
from typing import ClassVar

from shoal.core.parts import part
from shoal.train.peft.lora import Lora


@part
class RsLora(Lora):
    """W + (alpha / sqrt(r)) B A: for ranks above about 16, where LoRA's gradients vanish."""

    name: ClassVar[str] = "rslora"

    @property
    def scale(self) -> float:
        return self.alpha / math.sqrt(self.r)

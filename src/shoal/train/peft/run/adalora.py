"""AdaLoRA at work: triplets, what each of them matters, and the budget they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.train.peft.run.low_rank import LowRankPart, drawn, fits
from shoal.train.peft.run.sites import Site

if TYPE_CHECKING:
    from shoal.train.peft.adalora import AdaLora

# As Hugging Face's library has it, so that the same numbers give the same outputs.
_EPSILON = 1e-5


class Triplets(LowRankPart):
    """W + (alpha / r) B diag(E) A; E is initialized with zeros."""

    kept: Tensor

    def __init__(self, site: Site, method: AdaLora, seed: int) -> None:
        super().__init__()
        r = method.r
        fits(r, site, "finetune.adalora.r")
        self.scale = method.alpha / (r + _EPSILON)
        self._beta1, self._beta2 = method.beta1, method.beta2
        self.lora_A = nn.Parameter(drawn((r, site.columns), 0.02, seed, f"{site.name}.A"))
        self.lora_B = nn.Parameter(drawn((site.rows, r), 0.02, seed, f"{site.name}.B"))
        self.lora_E = nn.Parameter(torch.zeros(r, 1))
        self.register_buffer("kept", torch.ones(r, 1))
        for name in ("lora_A", "lora_B", "lora_E"):
            like = getattr(self, name).detach()
            self.register_buffer(f"mean_{name}", torch.zeros_like(like))
            self.register_buffer(f"spread_{name}", torch.zeros_like(like))

    def pair(self) -> tuple[Tensor, Tensor, float]:
        return self.lora_A * self.lora_E, self.lora_B, self.scale

    def files(self) -> dict[str, Tensor]:
        return {"lora_A": self.lora_A, "lora_B": self.lora_B, "lora_E": self.lora_E}

    def crooked(self) -> Tensor:
        """How far P and Q are from orthogonal."""
        a, b = self.lora_A @ self.lora_A.t(), self.lora_B.t() @ self.lora_B
        one = torch.eye(len(a), device=a.device)
        tensor: Tensor = torch.norm(a - one) + torch.norm(b - one)
        return tensor

    @torch.no_grad()
    def observe(self) -> None:
        """Take this step's |weight x gradient| into the moving averages."""
        for name in ("lora_A", "lora_B", "lora_E"):
            parameter = getattr(self, name)
            if parameter.grad is None:
                continue
            now = (parameter * parameter.grad).abs()
            mean, spread = getattr(self, f"mean_{name}"), getattr(self, f"spread_{name}")
            mean.lerp_(now, 1 - self._beta1)
            spread.lerp_((now - mean).abs(), 1 - self._beta2)

    def importance(self) -> Tensor:
        """What each triplet matters [R]."""
        score = {
            name: getattr(self, f"mean_{name}") * getattr(self, f"spread_{name}")
            for name in ("lora_A", "lora_B", "lora_E")
        }
        tensor: Tensor = score["lora_E"][:, 0] + score["lora_A"].mean(1) + score["lora_B"].mean(0)
        return tensor


class RankBudget(nn.Module):
    """Deals the ranks of all matrices.

    Attributes:
        matrices: whose ranks it deals.
    """

    def __init__(self, method: AdaLora) -> None:
        super().__init__()
        self._method = method
        self.matrices: list[Triplets] = []  # a plain list: their parameters are the sites' own

    def ranks(self, step: int, total: int) -> int:
        """Triplets that are left after a step, over all matrices."""
        method, count = self._method, len(self.matrices)
        most, least = method.r * count, method.target * count
        first, last = method.begin * total, method.end * total
        if step < first:
            return most
        if step >= last:
            return least
        left = 1 - (step - first) / (last - first)
        return int(least + (most - least) * left**3)

    def penalty(self) -> Tensor:
        """The mean over matrices of how far they are from orthogonal, at its price."""
        crooked = torch.stack([matrix.crooked() for matrix in self.matrices])
        return self._method.orthogonal * crooked.mean()

    def before_update(self, step: int, total: int) -> None:
        """Look at the gradients."""
        for matrix in self.matrices:
            matrix.observe()

    @torch.no_grad()
    def after_update(self, step: int, total: int) -> None:
        """Deal the budget, and set the others' singular values to zero."""
        settled = step > self._method.end * total
        if not settled and step % self._method.every == 0:
            scores = torch.cat([matrix.importance() for matrix in self.matrices])
            best = torch.topk(scores, self.ranks(step, total)).indices
            kept = torch.zeros_like(scores)
            kept[best] = 1.0
            at = 0
            for matrix in self.matrices:
                rank = len(matrix.kept)
                matrix.kept.copy_(kept[at : at + rank].unsqueeze(1))
                at += rank
        for matrix in self.matrices:
            matrix.lora_E.mul_(matrix.kept)

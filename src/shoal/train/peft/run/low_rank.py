"""LoRA at work: a product of two thin matrices beside a wide one, in one step with it.

The products of base and of all low-rank parts of a matrix are one operator of autograd. It keeps
the inputs for the gradient of A alone: where A stands still, they are not kept. It adds in place,
so no tensor as wide as the output is made beside the output itself.

Source: Hu et al., LoRA, 2021, section 4.1; Zhang et al., LoRA-FA, 2023, section 3.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.random import seed64
from shoal.model.recompute import own
from shoal.train.peft.run.sites import Site, SitePart, SiteRows, back, product


def drawn(shape: tuple[int, ...], std: float, seed: int, name: str) -> Tensor:
    """Gaussian numbers that depend on seed and name alone."""
    generator = torch.Generator().manual_seed(seed64(seed, purpose=f"finetune {name}"))
    return torch.randn(shape, generator=generator) * std


def fits(r: int, site: Site, where: str) -> None:
    """Refuse a rank that the matrix does not have.

    Raises:
        ConfigError: names the matrix.
    """
    most = min(site.rows, site.columns)
    if r > most:
        raise ConfigError(
            f"{where} = {r}: {site.name} is {site.rows} x {site.columns}, of rank {most} at "
            f"most; give a rank up to {most}, or other targets"
        )


class LowRankPart(SitePart):
    """Base of what is a product of two thin matrices, W + scale * B A, however they are made.

    Args:
        dropout: share of the inputs of A that is dropped in training.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    @abstractmethod
    def pair(self) -> tuple[Tensor, Tensor, float]:
        """A [R, I], B [O, R] and the factor of their product, as they are now."""

    @property
    def plain(self) -> bool:
        """Nothing but the product is done now."""
        return not (self.dropout and self.training)

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        down, up, scale = self.pair()
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        return out + F.linear(F.linear(dropped.to(down.dtype), down), up).to(out.dtype) * scale

    def delta(self) -> Tensor:
        """What is added to the weight [O, I]."""
        down, up, scale = self.pair()
        return (up @ down) * scale

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        return rows.weight + self.delta(), None


class LowRank(LowRankPart):
    """A is drawn and B is zero, and both are trained.

    Args:
        frozen_a: A stands still.

    Raises:
        ConfigError: the rank is more than the matrix has.
    """

    def __init__(
        self,
        site: Site,
        r: int,
        scale: float,
        *,
        dropout: float = 0.0,
        frozen_a: bool = False,
        seed: int = 0,
        where: str = "finetune.lora.r",
    ) -> None:
        super().__init__(dropout)
        fits(r, site, where)
        self.r, self.scale = r, scale
        std = 1 / math.sqrt(site.columns)
        self.lora_A = nn.Parameter(
            drawn((r, site.columns), std, seed, f"{site.name}.A"), requires_grad=not frozen_a
        )
        self.lora_B = nn.Parameter(torch.zeros(site.rows, r))

    def pair(self) -> tuple[Tensor, Tensor, float]:
        return self.lora_A, self.lora_B, self.scale

    def files(self) -> dict[str, Tensor]:
        """As Hugging Face calls them."""
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}


class _Products(torch.autograd.Function):
    """x W^T + b, and to some columns scale * (x A^T) B^T; W and b have no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        base: nn.Module,
        bias: Tensor | None,
        spans: tuple[tuple[int, int, float], ...],
        *pairs: Tensor,
    ) -> Tensor:
        downs, ups = pairs[::2], pairs[1::2]
        out = own(product(base, x_NI, bias))
        down = downs[0] if len(downs) == 1 else torch.cat(downs)
        inner_NR = x_NI @ down.t()
        at = 0
        for (start, stop, scale), up in zip(spans, ups, strict=True):
            rank = up.shape[1]
            out[:, start:stop].addmm_(inner_NR[:, at : at + rank], up.t(), alpha=scale)
            at += rank
        keeps = any(ctx.needs_input_grad[4::2])
        ctx.save_for_backward(x_NI if keeps else None, inner_NR, down, *ups)
        ctx.base, ctx.spans, ctx.keeps = base, spans, keeps
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x_NI, inner_NR, down, *ups = ctx.saved_tensors
        inner_grad = torch.empty_like(inner_NR)
        results: list[Tensor | None] = []
        at = 0
        for (start, stop, scale), up in zip(ctx.spans, ups, strict=True):
            rank = up.shape[1]
            own = grad[:, start:stop]
            torch.mm(own, up, out=inner_grad[:, at : at + rank]) if len(ups) == 1 else inner_grad[
                :, at : at + rank
            ].copy_(own @ up)
            if scale != 1:
                inner_grad[:, at : at + rank].mul_(scale)
            results += [None, (own.t() @ inner_NR[:, at : at + rank]).mul_(scale)]
            at += rank
        if ctx.keeps:
            down_grad = inner_grad.t() @ x_NI
            results[::2] = torch.split(down_grad, [up.shape[1] for up in ups])
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = back(ctx.base, grad)
            x_grad.addmm_(inner_grad, down)
        return x_grad, None, None, None, *results


def fused(
    base: nn.Module, plan: Sequence[tuple[SiteRows, SitePart]]
) -> Callable[[Tensor], Tensor | None] | None:
    """All parts of a matrix in one operator; None where one of them is no low-rank product."""
    if not all(
        isinstance(part, LowRankPart) and type(part).forward is LowRankPart.forward
        for _, part in plan
    ):
        return None
    parts = [part for _, part in plan if isinstance(part, LowRankPart)]

    def run(x: Tensor) -> Tensor | None:
        if not all(part.plain for part in parts):
            return None
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        pairs: list[Tensor] = []
        spans = []
        for (rows, _), part in zip(plan, parts, strict=True):
            down, up, scale = part.pair()
            pairs += [down.to(dtype), up.to(dtype)]
            spans.append((rows.start, rows.stop, scale))
        bias = getattr(base, "bias", None)
        with torch.autocast(kind, enabled=False):
            out: Tensor = _Products.apply(  # type: ignore[no-untyped-call]
                x.reshape(-1, x.shape[-1]).to(dtype),
                base,
                None if bias is None else bias.to(dtype),
                tuple(spans),
                *pairs,
            )
        return out.view(*x.shape[:-1], out.shape[-1])

    return run

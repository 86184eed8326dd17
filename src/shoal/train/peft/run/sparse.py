"""Single entries of a matrix that are trained.

The parameter is the vector of their changes, so gradient, moments and decay are of these entries
alone. The dense gradient of one matrix lives for the moment in which its entries are read from it.

Shapes: O outputs, I inputs, k entries.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.train.peft.run.sites import Site, SitePart, SiteRows


class _Sparse(torch.autograd.Function):
    """x (W + changes)^T + b, whose gradient is of x and of the changes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor, part: SparsePart, rows: SiteRows, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.part, ctx.rows = part, rows
        return F.linear(x, part.whole(rows, values).to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, values = ctx.saved_tensors
        part: SparsePart = ctx.part
        flat, given = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        weight_grad = flat.t() @ given
        if part.looking is not None:
            part.looking += weight_grad.float() ** 2
        result = weight_grad.view(-1)[part.places].to(values.dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad @ part.whole(ctx.rows, values).to(grad.dtype)
        return x_grad, result, None, None, None


class SparsePart(SitePart):
    """W, some entries of which are changed.

    Attributes:
        looking: sums of squared gradients [O, I] while entries are being chosen.
    """

    replaces = True
    places: Tensor

    def __init__(self, site: Site, k: int) -> None:
        super().__init__()
        self._shape = site.rows, site.columns
        self.values = nn.Parameter(torch.zeros(k))
        self.register_buffer("places", torch.arange(k))
        self.looking: Tensor | None = None

    def look(self) -> None:
        """Begin to look at gradients."""
        self.looking = torch.zeros(self._shape, device=self.values.device)

    def looked(self) -> Tensor:
        """What was seen [O, I], once; for ranks to sum."""
        assert self.looking is not None
        result, self.looking = self.looking, None
        return result

    def choose(self, score_OI: Tensor) -> None:
        """Take the entries with the highest scores."""
        best = torch.topk(score_OI.detach().float().reshape(-1), len(self.values)).indices
        self.places.copy_(best.sort().values)

    def whole(self, rows: SiteRows, values: Tensor) -> Tensor:
        """The changed matrix, a copy."""
        weight = rows.weight.detach().to(values.dtype, copy=True)
        weight.view(-1).index_add_(0, self.places, values.detach())
        return weight

    def forward(self, x: Tensor, out: Tensor, rows: SiteRows) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if rows.bias is None else rows.bias.to(x.dtype)
        with torch.autocast(kind, enabled=False):
            made: Tensor = _Sparse.apply(x, self.values, self, rows, bias)  # type: ignore[no-untyped-call]
        return made

    def merged(self, rows: SiteRows) -> tuple[Tensor, Tensor | None]:
        return self.whole(rows, self.values), None

    def files(self) -> dict[str, Tensor]:
        return {"values": self.values, "places": self.places}

"""A base in NF4 with its scales quantised once more.

The codes are those of the weight format ``nf4`` (:mod:`shoal.kernel.formats.normal`). The blocks'
scales, less their mean, are 8-bit integers with one fp32 scale for 256.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.kernel.formats.normal import nearest_codes, numbers

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import Handle
    from shoal.train.peft.run.sites import Site

__all__ = ["NF4Linear", "dequantise", "loftq", "quantise", "to_nf4"]

# Scales that share one of their own.
_SCALES = 256


def to_nf4(weight: Tensor, block: int) -> dict[str, Tensor]:
    """Codes and scales of a weight.

    Args:
        weight: [O, I], O * I a multiple of ``block``.
        block: weights that share a scale.

    Returns:
        ``codes`` uint8 [O * I / 2], two in a byte; ``scales`` int8, one a block; ``steps`` fp32,
        one for 256 scales; ``mean`` fp32 of the scales.
    """
    cut = weight.detach().float().reshape(-1, block)
    largest = cut.abs().amax(1)
    mean = largest.mean()
    shifted = F.pad(largest - mean, (0, -len(largest) % _SCALES)).view(-1, _SCALES)
    steps = shifted.abs().amax(1) / 127
    rounded = torch.round(shifted / torch.where(steps > 0, steps, 1.0).unsqueeze(1))
    scales = rounded.to(torch.int8).view(-1)[: len(largest)]
    used = _scales(scales, steps, mean)
    codes = nearest_codes(cut / torch.where(used > 0, used, 1.0).unsqueeze(1)).view(-1, 2)
    return {
        "codes": codes[:, 0] | codes[:, 1] << 4,
        "scales": scales,
        "steps": steps,
        "mean": mean.reshape(1),
    }


def _scales(scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    return scales.float() * steps.repeat_interleave(_SCALES)[: len(scales)] + mean


def dequantise(packed: dict[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """The weight [O, I] in fp32."""
    codes = packed["codes"]
    table, _ = numbers(codes.device)
    both = torch.stack([codes & 15, codes >> 4], 1).view(-1)
    scales = _scales(packed["scales"], packed["steps"], packed["mean"])
    values = table[both.int()].view(len(scales), -1)
    return (values * scales.unsqueeze(1)).view(shape)


class _Product(torch.autograd.Function):
    """x W^T + b; W is made for the product and made again for the gradient of x."""

    @staticmethod
    def forward(ctx, x: Tensor, layer: NF4Linear, bias: Tensor | None) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.layer = layer
        return F.linear(x, layer.dense().to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        return grad @ ctx.layer.dense().to(grad.dtype), None, None


class NF4Linear(nn.Module):
    """A linear layer whose weights are kept in NF4.

    Args:
        linear: whose weights are quantised; its bias stays as it is.
        block: weights that share a scale.

    Raises:
        ConfigError: the block does not divide the weights.
    """

    def __init__(self, linear: nn.Linear, block: int) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.out_features, linear.in_features
        if linear.weight.numel() % max(2, block) or block % 2:
            raise ConfigError(
                f"finetune.qlora.block = {block}: a matrix of {linear.out_features} x "
                f"{linear.in_features} is no multiple of it; give an even divisor"
            )
        self.bias = linear.bias
        for name, tensor in to_nf4(linear.weight, block).items():
            self.register_buffer(name, tensor)

    def dense(self) -> Tensor:
        """The weight [O, I] in fp32, made anew."""
        packed = {name: getattr(self, name) for name in ("codes", "scales", "steps", "mean")}
        return dequantise(packed, (self.out_features, self.in_features))

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., O]."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(kind, enabled=False):
            out: Tensor = _Product.apply(x, self, bias)  # type: ignore[no-untyped-call]
        return out


def _owners(handle: Handle) -> list[str]:
    """Every linear layer of the model's blocks, by path."""
    from shoal.train.peft.run.sites import all_sites

    owners = list(dict.fromkeys(site.owner for site in all_sites(handle.model)))
    return [
        owner
        for owner in owners
        if isinstance(handle.model.get_submodule(owner), nn.Linear) and "lm_head" not in owner
    ]


def quantise(handle: Handle, block: int) -> None:
    """Put NF4 layers in the place of the linear layers of a model, until the method is removed."""
    for owner in _owners(handle):
        module = handle.model.get_submodule(owner)
        assert isinstance(module, nn.Linear)
        handle.replace(owner, NF4Linear(module, block))


@torch.no_grad()
def loftq(
    handle: Handle, sites: list[Site], r: int, block: int, rounds: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Quantise as :func:`quantise`, so that each site's Q + B A is near to its W.

    Returns:
        Site -> A [r, I] and B [O, r].
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for owner in _owners(handle):
        module = handle.model.get_submodule(owner)
        assert isinstance(module, nn.Linear)
        own = [site for site in sites if site.owner == owner]
        weight = module.weight.detach().float()
        rest = weight.clone()
        shape = module.out_features, module.in_features
        stand_in = nn.Linear(shape[1], shape[0], bias=False, device=weight.device)
        stand_in.bias = module.bias
        for _ in range(rounds if own else 1):
            stand_in.weight.copy_(rest)
            layer = NF4Linear(stand_in, block)
            lost = weight - layer.dense()
            rest = weight.clone()
            for site in own:
                u, s, v = torch.linalg.svd(lost[site.start : site.stop], full_matrices=False)
                root = s[:r].sqrt()
                down, up = root.unsqueeze(1) * v[:r], u[:, :r] * root
                found[site.name] = down, up
                rest[site.start : site.stop] -= up @ down
        handle.replace(owner, layer)
    return found

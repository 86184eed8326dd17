"""A base in NF4 with its scales quantised once more.

The codes are those of the weight format ``nf4`` (:mod:`shoal.kernel.formats.normal`). The blocks'
scales, less their mean, are 8-bit integers with one fp32 scale for 256.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.dispatch import kernels_of
from shoal.kernel.formats.normal import nearest_codes, numbers
from shoal.kernel.protocols import PackedMatrix, Ready
from shoal.train.peft.run.sites import FrozenLinear, all_sites

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle
    from shoal.train.peft.run.sites import Site

# Scales that share one of their own.
_SCALES = 256
# Most weights of a tile, and outputs of a slice as the kernel has them.
_TILE, _SLICE = 2**19, 32
_KERNEL = "cpp_w4a16"


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


@functools.cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """What the two codes of a byte mean, for all bytes: [256], two numbers in each."""
    with torch.inference_mode(False):
        table = numbers(device)[0].to(dtype)
        byte = torch.arange(256, device=device)
        both = torch.stack([table[byte & 15], table[byte >> 4]], 1)
        return both.view(torch.int64 if dtype == torch.float32 else torch.int32).view(-1)


class NF4Linear(FrozenLinear):
    """A linear layer whose weights are kept in NF4.

    Rows in bf16 are multiplied by the 4-bit kernel where the CPU has it: codes then lie in the
    order in which it reads them, with the scales once more in fp16, 4.38 bits a weight in all.
    Other rows, and gradients, are multiplied by tiles of the weight that are made and gone.

    Args:
        linear: whose weights are quantised; its bias stays as it is.
        block: weights that share a scale.

    Raises:
        ConfigError: the block does not divide the weights.
    """

    codes: Tensor | None
    laid: Tensor | None

    def __init__(self, linear: nn.Linear, block: int) -> None:
        super().__init__(linear)
        if linear.weight.numel() % max(2, block) or block % 2:
            raise ConfigError(
                f"finetune.qlora.block = {block}: a matrix of {linear.out_features} x "
                f"{linear.in_features} is no multiple of it; give an even divisor"
            )
        self.block = block
        for name, tensor in to_nf4(linear.weight, block).items():
            self.register_buffer(name, tensor)
        self.register_buffer("laid", None)
        self._ready: Ready | None = None
        self._segment = 0

    def dense(self) -> Tensor:
        if self.in_features % self.block:
            packed = {name: getattr(self, name) for name in ("codes", "scales", "steps", "mean")}
            return dequantise(packed, (self.out_features, self.in_features))
        return self._tile(slice(0, self.out_features), slice(0, self.in_features), torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @torch.no_grad()
    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Product x W^T + b [..., O], by the 4-bit kernel or tile by tile."""
        ready = self._kernel(x)
        if ready is not None:
            out: Tensor = ready(x)
            return out if bias is None else out.add_(bias)
        if self.in_features % self.block:
            return F.linear(x, self.dense().to(x.dtype), bias)
        out = x.new_empty(*x.shape[:-1], self.out_features)
        every = slice(0, self.in_features)
        for rows in _cut(self.out_features, _TILE // self.in_features, _SLICE):
            own = None if bias is None else bias[rows]
            out[..., rows] = F.linear(x, self._tile(rows, every, x.dtype), own)
        return out

    @torch.no_grad()
    def back(self, grad: Tensor) -> Tensor:
        """The gradient of x, grad W [..., I], tile by tile: every number of it is one sum."""
        if self.in_features % self.block:
            return grad @ self.dense().to(grad.dtype)
        out = grad.new_empty(*grad.shape[:-1], self.in_features)
        every = slice(0, self.out_features)
        whole = math.lcm(self.block, self._segment or 1)
        for columns in _cut(self.in_features, _TILE // self.out_features, whole):
            out[..., columns] = grad @ self._tile(every, columns, grad.dtype)
        return out

    def _tile(self, rows: slice, columns: slice, dtype: torch.dtype) -> Tensor:
        """Some of the weight, its columns whole blocks."""
        each = dtype if dtype in (torch.float32, torch.bfloat16) else torch.float32
        bytes_RC = self._bytes(rows, columns).contiguous()
        both = _pairs(each, bytes_RC.device).index_select(0, bytes_RC.view(-1).int())
        scales = self._scales().view(self.out_features, -1)
        own = scales[rows, columns.start // self.block : columns.stop // self.block]
        values = both.view(each).view(*own.shape, self.block).mul_(own.to(each).unsqueeze(-1))
        return values.view(own.shape[0], -1).to(dtype)

    def _scales(self) -> Tensor:
        scales, steps, mean = (getattr(self, name) for name in ("scales", "steps", "mean"))
        return _scales(scales, steps, mean)

    def _bytes(self, rows: slice, columns: slice) -> Tensor:
        """Codes of some of the weight, two in a byte, in the order of the matrix."""
        if self.codes is not None:
            whole = self.codes.view(self.out_features, -1)
            return whole[rows, columns.start // 2 : columns.stop // 2]
        assert self.laid is not None
        s = self._segment
        first, last = rows.start // _SLICE, -(-rows.stop // _SLICE)
        some = self.laid[first:last, columns.start // s : columns.stop // s, : s * _SLICE // 2]
        # Slices of 32 outputs; of them segments, eights of inputs, two halves, outputs, bytes.
        apart = some.unflatten(-1, (s // 8, 2, 16, 4)).permute(0, 3, 4, 1, 2, 5)  # type: ignore[no-untyped-call]
        lines: Tensor = apart.reshape((last - first) * _SLICE, -1)
        return lines[rows.start - first * _SLICE : rows.stop - first * _SLICE]

    def _kernel(self, x: Tensor) -> Ready | None:
        """The 4-bit kernel, where it multiplies such rows; the codes are laid out for it once."""
        if x.dtype != torch.bfloat16 or not x.is_cpu or self.in_features % self.block:
            return None
        if self._ready is None:
            n, k = self.out_features, self.in_features
            kernel = kernels_of("linear_lowbit")[_KERNEL]
            call = LowbitLinearCall(256, n, k, f"nf4-g{self.block}", 4.25, "bf16")
            if kernel.refuses(call) is not None or self.codes is None:
                return None
            scales = self._scales().view(n, -1).half()
            packed = PackedMatrix(
                call.format, (n, k), {"codes": self.codes.view(n, -1), "scales": scales}
            )
            with torch.inference_mode(False):
                self._ready = kernel.prepare(call, packed, None)
            made = self._ready.constants[0]  # type: ignore[attr-defined]
            self.laid, self._segment, self.codes = made.memory, made.segment, None
        return self._ready


def _cut(size: int, most: int, whole: int) -> Iterator[slice]:
    """Pieces of so many at most, each of whole groups."""
    step = max(1, most // whole) * whole
    return (slice(at, min(size, at + step)) for at in range(0, size, step))


def _owners(handle: ModelPeftHandle) -> list[str]:
    """Every linear layer of the model's blocks, by path."""
    owners = list(dict.fromkeys(site.owner for site in all_sites(handle.model)))
    return [
        owner
        for owner in owners
        if isinstance(handle.model.get_submodule(owner), nn.Linear) and "lm_head" not in owner
    ]


def quantise(handle: ModelPeftHandle, block: int) -> None:
    """Put NF4 layers in the place of the linear layers of a model, until the method is removed."""
    for owner in _owners(handle):
        module = handle.model.get_submodule(owner)
        assert isinstance(module, nn.Linear)
        handle.replace(owner, NF4Linear(module, block))


@torch.no_grad()
def loftq(
    handle: ModelPeftHandle, sites: list[Site], r: int, block: int, rounds: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """Quantise as :func:`quantise`, so that each site's Q + B A is near to its W.

    Returns:
        Site -> A [r, I] and B [O, r].
    """
    result: dict[str, tuple[Tensor, Tensor]] = {}
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
                result[site.name] = down, up
                rest[site.start : site.stop] -= up @ down
        handle.replace(owner, layer)
    return result

"""A quantizer taken through a model, block by block.

Every block sees what the blocks before it make of the calibration text once they are
quantized, and every matrix what those before it in the block do. All matrices of the blocks are
quantized but for the router of experts; embedding, output and norms stay as they are.

Shapes: B sequences, T tokens of each, D hidden, N outputs, K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.kernel.formats.base import BaseFormat
from shoal.kernel.protocols import PackedMatrix
from shoal.model.architecture import plain
from shoal.model.feedforward import Experts
from shoal.model.protocols import Quantizer
from shoal.model.quantize.inputs import Inputs
from shoal.model.quantize.stored import stack
from shoal.model.rope import tables
from shoal.model.transformer import Transformer, TransformerBlock

# Tokens that pass through a block at a time.
_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class QuantizedModel:
    """A model of which some matrices are packed.

    Args:
        model: every packed matrix replaced by what its codes mean.
        packed: name of a parameter -> its matrix; experts lie below each other.
    """

    model: Transformer
    packed: dict[str, PackedMatrix]


@dataclass(frozen=True, eq=False)
class _Site:
    """One matrix of a block: [N, K], a view of a parameter."""

    parameter: str
    weight: Tensor
    owner: nn.Module


def _linear(block: TransformerBlock, name: str) -> _Site:
    owner = block.get_submodule(name)
    assert isinstance(owner, nn.Linear)
    return _Site(f"{name}.weight", owner.weight.detach(), owner)


def _stages(block: TransformerBlock) -> list[list[_Site]]:
    """The matrices in the order of the computation; those of one stage have the same inputs."""
    first = [_linear(block, "attention.qkv_proj")]
    second = [_linear(block, "attention.o_proj")]
    mlp = block.mlp
    if isinstance(mlp, Experts):
        up, down = (
            [_Site(f"mlp.{name}", matrix, mlp) for matrix in getattr(mlp, name).detach()]
            for name in ("gate_up_proj", "down_proj")
        )
    else:
        up, down = [_linear(block, "mlp.gate_up_proj")], [_linear(block, "mlp.down_proj")]
    if block.parallel:
        return [first + up, second + down]
    return [first, second, up, down]


@contextmanager
def _watched(sites: list[_Site]) -> Iterator[list[Inputs]]:
    """While open, what the matrices are given is summed."""
    results = [Inputs(site.weight.shape[1], site.weight.device) for site in sites]
    handles = []
    experts: dict[str, list[Inputs]] = {}
    owner: Any = None
    for site, inputs in zip(sites, results, strict=True):
        if isinstance(site.owner, Experts):
            owner = site.owner
            experts.setdefault(site.parameter.rpartition(".")[2], []).append(inputs)
        else:
            handles.append(site.owner.register_forward_pre_hook(_adder(inputs)))
    if owner is not None:
        product = owner.product

        def watched(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
            name = "gate_up_proj" if weight is owner.gate_up_proj else "down_proj"
            parts = torch.split(rows, counts)
            for own, part in zip(experts.get(name, ()), parts, strict=False):
                own.add(part)
            out: Tensor = product(rows, weight, counts)
            return out

        owner.product = watched
    try:
        yield results
    finally:
        for handle in handles:
            handle.remove()
        if owner is not None:
            del owner.product


def _adder(inputs: Inputs) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def add(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.add(args[0])

    return add


class _Text:
    """The calibration text on its way through the blocks."""

    def __init__(self, model: Transformer, tokens_BT: Tensor) -> None:
        self.x_BTD = model.embed(tokens_BT)
        length = tokens_BT.shape[1]
        self._tables = tables(model.config, 0, length, self.x_BTD.device, self.x_BTD.dtype)
        self._rows = max(1, _BATCH_TOKENS // length)

    def through(self, block: TransformerBlock) -> list[Tensor]:
        """What the block makes of it, in pieces."""
        return [block(x_BTD, *self._tables) for x_BTD in self.x_BTD.split(self._rows)]


@torch.no_grad()
def quantize(
    model: Transformer,
    fmt: BaseFormat,
    quantizer: Quantizer,
    tokens_BT: Tensor | None = None,
    *,
    done: Callable[[int, int], None] | None = None,
) -> QuantizedModel:
    """Quantize the matrices of a model's blocks. The model is changed.

    Args:
        model: its weights become what the codes mean.
        fmt: the format of all matrices.
        quantizer: how codes are chosen.
        tokens_BT: calibration text, int64; needed where the quantizer is calibrated.
        done: called with the number of blocks done and of all.

    Raises:
        ModelError: text is needed and missing.
        KernelError: the format refuses a matrix; names it.
    """
    plain(model.config, "quantize")
    text = None
    if quantizer.calibrated:
        if tokens_BT is None or tokens_BT.numel() == 0:
            raise ModelError(
                f"quantizer {type(quantizer).__name__}: it looks at what layers are given; "
                "give calibration text"
            )
        text = _Text(model, tokens_BT)
    packed: dict[str, PackedMatrix] = {}
    for layer, module in enumerate(model.blocks):
        assert isinstance(module, TransformerBlock)
        if text is not None:
            _rescale(module, model, fmt, quantizer, text)
        for stage in _stages(module):
            watched: list[Inputs] | list[None] = [None] * len(stage)
            if text is not None:
                with _watched(stage) as result:
                    text.through(module)
                watched = result
            parts: dict[str, list[PackedMatrix]] = {}
            for site, inputs in zip(stage, watched, strict=True):
                codes = quantizer.quantize(site.weight, fmt, inputs)
                site.weight.copy_(fmt.dequantize(codes))
                parts.setdefault(site.parameter, []).append(codes)
            for name, rows in parts.items():
                packed[f"blocks.{layer}.{name}"] = stack(rows)
        if text is not None:
            text.x_BTD = torch.cat(text.through(module))
        if done is not None:
            done(layer + 1, len(model.blocks))
    return QuantizedModel(model, packed)


def _rescale(
    block: TransformerBlock, model: Transformer, fmt: BaseFormat, quantizer: Quantizer, text: _Text
) -> None:
    """Let the quantizer move factors from what makes a matrix' inputs into the matrix."""
    config = model.config
    for made_by, takers in _links(block, grouped=config.num_heads != config.num_kv_heads):
        with _watched(takers[:1]) as result:
            text.through(block)
        weight = torch.cat([site.weight for site in takers])
        factor_K = quantizer.rescale(weight, fmt, result[0])
        if factor_K is None:
            continue
        for site in takers:
            site.weight.copy_(site.weight.float() * factor_K)
        for rows in made_by:
            # Rows of a matrix, elements of a bias or of a norm's weight.
            rows.copy_(rows.float() / factor_K.view(-1, *[1] * (rows.dim() - 1)))


def _links(block: TransformerBlock, *, grouped: bool) -> Iterator[tuple[list[Tensor], list[_Site]]]:
    """What makes the inputs of which matrices; experts, whose router reads them too, are left."""
    attention, mlp = block.attention, block.mlp
    dense = not isinstance(mlp, Experts)
    qkv, out = _linear(block, "attention.qkv_proj"), _linear(block, "attention.o_proj")
    takers = [qkv]
    if block.parallel:
        takers.append(_linear(block, "mlp.gate_up_proj"))
    yield [block.attention_norm.weight], takers
    if not grouped:  # else a value is read by several columns
        rows = attention.num_kv_heads * attention.head_dim
        made_by = [qkv.weight[-rows:]]
        if attention.qkv_proj.bias is not None:
            made_by.append(attention.qkv_proj.bias[-rows:])
        yield made_by, [out]
    if dense:
        up, down = _linear(block, "mlp.gate_up_proj"), _linear(block, "mlp.down_proj")
        if not block.parallel:
            yield [block.mlp_norm.weight], [up]
        half = len(up.weight) // 2
        made_by = [up.weight[half:]]
        if isinstance(up.owner.bias, Tensor):
            made_by.append(up.owner.bias[half:])
        yield made_by, [down]

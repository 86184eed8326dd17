"""Packed matrices put in the place of plain ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import KernelError
from shoal.kernel.formats import weight_format
from shoal.kernel.protocols import PackedMatrix
from shoal.model.feedforward import Experts
from shoal.model.lowbit import LowBitLinear
from shoal.model.quantize.stored import rows_of, stack
from shoal.model.transformer import Transformer


class LowBitExperts(Experts):
    """Experts whose matrices are packed.

    Args:
        plain: the experts they replace; its router stays.
        matrices: ``gate_up_proj``, ``down_proj`` or both, those of all experts below each other;
            what is not given stays.
    """

    def __init__(self, plain: Experts, matrices: Mapping[str, PackedMatrix]) -> None:
        nn.Module.__init__(self)
        self.take_router(plain)
        for name in ("gate_up_proj", "down_proj"):
            if name not in matrices:
                self.register_parameter(name, getattr(plain, name))
                continue
            packed = matrices[name]
            rows = packed.shape[0] // self.num_experts
            starts = range(0, packed.shape[0], rows)
            layers = [LowBitLinear(rows_of(packed, start, start + rows)) for start in starts]
            self.add_module(name, nn.ModuleList(layers))

    def product(self, rows_MI: Tensor, weight_EOI: Any, counts: list[int]) -> Tensor:
        """Each expert's matrix with its own rows, which lie behind each other; [M, O]."""
        if isinstance(weight_EOI, Tensor):
            return super().product(rows_MI, weight_EOI, counts)
        parts = torch.split(rows_MI, counts)
        return torch.cat(
            [layer(rows) for rows, layer in zip(parts, weight_EOI, strict=True) if len(rows)]
        )


def replace(model: Transformer, packed: Mapping[str, PackedMatrix]) -> None:
    """Give a model packed matrices instead of its own.

    Args:
        model: its other parameters stay.
        packed: parameter name -> matrix; experts lie below each other.
    """
    experts: dict[str, dict[str, PackedMatrix]] = {}
    for name, matrix in packed.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if isinstance(owner, Experts):
            experts.setdefault(owner_name, {})[leaf] = matrix
            continue
        bias = owner.bias if isinstance(owner, nn.Linear) else None
        model.set_submodule(
            owner_name, LowBitLinear(matrix, None if bias is None else bias.detach())
        )
    for owner_name, matrices in experts.items():
        plain = model.get_submodule(owner_name)
        assert isinstance(plain, Experts)
        model.set_submodule(owner_name, LowBitExperts(plain, matrices))


def pack(model: Transformer, text: str) -> Transformer:
    """Round the matrices of a model's blocks to the nearest of a format, in place.

    Raises:
        KernelError: no such format, or it refuses a matrix; names it.
    """
    fmt = weight_format(text)
    matrices: dict[str, PackedMatrix] = {}
    for name, module in model.blocks.named_modules(prefix="blocks"):
        tensors: dict[str, Tensor] = {}
        if isinstance(module, nn.Linear) and not name.endswith(".router"):
            tensors[f"{name}.weight"] = module.weight
        elif isinstance(module, Experts) and not isinstance(module, LowBitExperts):
            for leaf in ("gate_up_proj", "down_proj"):
                tensors[f"{name}.{leaf}"] = getattr(module, leaf).flatten(0, 1)
        for parameter, weight in tensors.items():
            try:
                matrices[parameter] = fmt.quantize(weight)
            except KernelError as cause:
                raise KernelError(f"{parameter}: {cause}") from None
    replace(model, matrices)
    return model


def packed_of(model: Transformer) -> dict[str, PackedMatrix]:
    """The packed matrices of a model, by the names of the parameters that they replace."""
    packed: dict[str, PackedMatrix] = {}
    inside: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, LowBitExperts):
            for leaf in ("gate_up_proj", "down_proj"):
                layers = getattr(module, leaf)
                if isinstance(layers, nn.ModuleList):
                    packed[f"{name}.{leaf}"] = stack(
                        [layer.packed for layer in layers if isinstance(layer, LowBitLinear)]
                    )
            inside.add(name)
        elif isinstance(module, LowBitLinear) and not any(
            name.startswith(f"{experts}.") for experts in inside
        ):
            packed[f"{name}.weight"] = module.packed
    return packed

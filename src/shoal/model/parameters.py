"""The parameters of a model directory one by one, for ranks that hold a part of each.

A rank reads a parameter, keeps its slices and lets the rest go: at no time does it hold more than
its part of the model and one whole parameter.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.model import FAMILIES
from shoal.model.finite import check_finite
from shoal.model.huggingface import (
    DTYPES,
    check_tensors,
    find_weights,
    is_gguf,
    quantization,
    read_config,
)

if TYPE_CHECKING:
    from shoal.model.families.common import Names


class Parameters:
    """The parameters of a model directory, read lazily one by one.

    Args:
        directory: config.json and safetensors, not packed.
        dtype: dtype of the returned tensors; that of the stored embedding if not given.

    Raises:
        ModelError: anything is missing, malformed or not supported.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        self.config = read_config(directory)
        if is_gguf(directory) or quantization(directory) is not None:
            raise ModelError(
                f"{directory}: packed weights; expected a directory with plain safetensors, since "
                "only their parts can be read by several ranks"
            )
        self._directory = directory
        self._names: Names = FAMILIES.build(self.config.family).names(self.config)
        self._files = find_weights(directory)
        result, _ = check_tensors(self._names, self._files, directory, tied=self.config.tied)
        stored = DTYPES[result[self._names["embed.weight"][0].name].dtype]
        self.dtype: torch.dtype = dtype or stored
        self._handles: dict[Path, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """All of a parameter, flat, in the order in which the model has it.

        Raises:
            ModelError: a file cannot be read.
        """
        from safetensors import SafetensorError

        pieces = self._names[name]
        value = torch.empty(sum(piece.numel for piece in pieces), dtype=self.dtype)
        try:
            for part, piece in zip(
                torch.split(value, [piece.numel for piece in pieces]), pieces, strict=True
            ):
                part.view(piece.shape).copy_(self._stored(piece.name))
        except (SafetensorError, OSError) as cause:
            raise ModelError(
                f"{self._directory}: cannot be read ({cause}); fetch the files again"
            ) from cause
        check_finite(value, f"{self._directory}: {name}")
        return value

    def _stored(self, name: str) -> Tensor:
        from safetensors import safe_open

        file = self._files[name]
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._handles[file].get_tensor(name)
        return tensor

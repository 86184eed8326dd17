"""Hugging Face model directories, and GGUF files, as checkpoints under our names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.checkpoint.common import box_of, model_entry, no_tensor
from shoal.checkpoint.pieces import DTYPE_NAMES, DTYPES
from shoal.checkpoint.store import MODEL
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.core.boxes import Box
from shoal.core.config import parse
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.parts import part
from shoal.core.safetensors_header import read_header

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.universal.spec import UniversalSpec

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def model_of(contents: Contents) -> Any:
    """The configuration of the model that a checkpoint says it is of.

    Raises:
        CheckpointError: it says none.
    """
    from shoal.model.config import ModelConfig

    raw = model_entry(contents.path, contents.meta)
    return parse(ModelConfig, raw, where=f"{contents.path}: model")


class _Plain:
    """A directory of safetensors: our parameters are runs of its tensors."""

    step = 0

    def __init__(self, path: Path) -> None:
        from shoal.model import FAMILIES, huggingface
        from shoal.parallel.tensor.slices import whole_shapes

        self.path = path
        config = huggingface.read_config(path)
        self.meta: dict[str, Any] = {"model": config.model_dump(mode="json")}
        self._pieces = FAMILIES.build(config.family).names(config)
        self._files = huggingface.find_weights(path)
        self._stored, _ = huggingface.check_tensors(
            self._pieces, self._files, path, tied=config.tied
        )
        self._shapes = {MODEL + name: shape for name, shape in whole_shapes(config).items()}

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(no_tensor(self.path, name, self._shapes))
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        self.shape(name)
        return self._stored[self._pieces[name.removeprefix(MODEL)][0].name].dtype

    def where(self, name: str) -> str:
        return self._files[self._pieces[name.removeprefix(MODEL)][0].name].name

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        import torch
        from safetensors import safe_open

        whole = self.shape(name)
        runs = []
        for piece in self._pieces[name.removeprefix(MODEL)]:
            with safe_open(self._files[piece.name], framework="pt") as file:
                runs.append(file.get_tensor(piece.name).reshape(-1))
        return self._box(name, torch.cat(runs).view(whole), offset, shape)

    def _box(
        self,
        name: str,
        whole: Tensor,
        offset: tuple[int, ...] | None,
        shape: tuple[int, ...] | None,
    ) -> Tensor:
        size = tuple(whole.shape)
        return whole[box_of(self.path, name, size, offset, shape).slices(Box.whole(size))]


class _Loaded(_Plain):
    """A model that has to be read as a whole: GGUF, or matrices of few bits made plain."""

    def __init__(self, path: Path) -> None:
        from shoal.model import huggingface

        self.path = path
        model = huggingface.read(path, packed=False)
        self.meta = {"model": model.config.model_dump(mode="json")}
        self._values = {MODEL + n: p.detach() for n, p in model.named_parameters()}
        self._shapes = {name: tuple(value.shape) for name, value in self._values.items()}

    def dtype(self, name: str) -> str:
        self.shape(name)
        return DTYPE_NAMES[str(self._values[name].dtype).removeprefix("torch.")]

    def where(self, name: str) -> str:
        return self.path.name

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        self.shape(name)
        return self._box(name, self._values[name], offset, shape)


@part
class HuggingFaceFormat:
    """A model directory of ``transformers``; weights only, no optimizer state.

    Args:
        dtype: dtype of the written weights; unchanged if not given.
        tokenizer: a tokenizer.json, or a directory with one, to copy beside the weights.
    """

    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    tokenizer: str = ""

    def holds(self, path: Path) -> bool:
        """Its weights are there, or it is a GGUF file."""
        return path.suffix == ".gguf" or any((path / name).is_file() for name in _WEIGHTS)

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open it; reads the headers; weights are loaded lazily."""
        from shoal.model import huggingface

        if huggingface.is_gguf(path) or huggingface.quantization(path) is not None:
            return _Loaded(path)
        return _Plain(path)

    def problems(self, path: Path) -> Iterator[str]:
        """What headers and names say; the format has no checksums."""
        try:
            self.open(path)
            for file in sorted(path.glob("*.safetensors")):
                read_header(file)
        except ShoalError as cause:
            yield str(cause)

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """The weights, one tensor after the other, under Hugging Face's names."""
        import torch

        from shoal.model import huggingface

        config = model_of(contents)
        kind = getattr(torch, DTYPES[self.dtype]) if self.dtype else None
        state = {
            name.removeprefix(MODEL): contents.tensor(name).to(dtype=kind)
            for name in contents.names()
            if name.startswith(MODEL)
        }
        huggingface.write_state(
            out, config, state, Path(self.tokenizer) if self.tokenizer else None
        )

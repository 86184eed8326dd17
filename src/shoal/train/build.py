"""The model that a job names, ready to train."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.shapes import resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shoal.ir import TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

__all__ = ["JobWeights", "is_directory"]


def is_directory(model: str) -> bool:
    """Whether ``model`` is a Hugging Face directory with weights, not just a shape."""
    path = Path(model)
    return path.is_dir() and any(path.glob("*.safetensors"))


class JobWeights:
    """What a job's model starts from: a directory, or fresh weights of the job's seed; fp32.

    Args:
        job: names the model.

    Raises:
        ModelError: the directory cannot be read or the name is unknown.
    """

    def __init__(self, job: TrainJob) -> None:
        from shoal.model import huggingface
        from shoal.model.config import ModelConfig

        self._job = job
        self._stored = is_directory(job.model)
        self.config: ModelConfig = (
            huggingface.read_config(Path(job.model))
            if self._stored
            else ModelConfig.from_shape(resolve(job.model))
        )

    def model(self) -> Transformer:
        """The whole model, ready to train."""
        import torch

        from shoal.model import huggingface
        from shoal.model.initialise import init_weights
        from shoal.model.transformer import Transformer

        if self._stored:
            model = huggingface.read(Path(self._job.model), dtype=torch.float32)
        else:
            model = Transformer(self.config)
            init_weights(model, self._job.seed)
        return model.train()

    @functools.cached_property
    def _read(self) -> dict[str, Tensor]:
        return dict(self.model().named_parameters())

    def whole(self, name: str) -> Tensor:
        """One whole parameter; of a rank that keeps a part, the rest is freed again."""
        from shoal.model.initialise import empty, initial

        if self._stored:
            return self._read[name].detach()
        if self._shapes is None:
            self._shapes = {n: p.shape for n, p in empty(self.config).named_parameters()}
        return initial(self.config, name, self._job.seed).view(self._shapes[name])

    _shapes: dict[str, torch.Size] | None = None

"""The model that a job names, ready to train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cost.shapes import resolve

if TYPE_CHECKING:
    from shoal.ir import TrainJob
    from shoal.model.transformer import Transformer

__all__ = ["build_model", "is_directory"]


def is_directory(model: str) -> bool:
    """Whether ``model`` is a Hugging Face directory with weights, not just a shape."""
    path = Path(model)
    return path.is_dir() and any(path.glob("*.safetensors"))


def build_model(job: TrainJob) -> Transformer:
    """Weights from a directory, or initialised from the job's seed; fp32.

    Raises:
        ModelError: the directory cannot be read or the name is unknown.
    """
    import torch

    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    if is_directory(job.model):
        model = huggingface.read(Path(job.model), dtype=torch.float32)
    else:
        model = Transformer(ModelConfig.from_shape(resolve(job.model)))
        init_weights(model, job.seed)
    return model.train()

"""The model that a job names, ready to train."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import require
from shoal.cost.shapes import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from shoal.corpora.tokens import TokenSet
    from shoal.ir import Architecture, TrainJob
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.train.peft.shared import SharedWeights


def weights_source(job: TrainJob) -> str:
    """Where the weights come from that training begins with, in one line."""
    if is_directory(job.model):
        return f"weights: loaded from {Path(job.model).absolute()}"
    return (
        f"weights: random, of seed {job.seed}: {job.model} names a shape; give a model directory "
        "or an id of the hub to start from its weights"
    )


def is_directory(model: str) -> bool:
    """Whether ``model`` is a Hugging Face directory with weights, not just a shape."""
    path = Path(model)
    return path.is_dir() and any(path.glob("*.safetensors"))


class FreshWeights:
    """Fresh fp32 weights of a seed."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self._seed = seed

    def model(self) -> Transformer:
        """The whole model, ready to train."""
        from shoal.model.initialise import init_weights
        from shoal.model.transformer import Transformer

        model = Transformer(self.config)
        init_weights(model, self._seed)
        return model.train()

    @functools.cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        from shoal.model.initialise import empty

        return {name: p.shape for name, p in empty(self.config).named_parameters()}

    def whole(self, name: str) -> Tensor:
        """One whole parameter; of a rank that keeps a part, the rest is freed again."""
        from shoal.model.initialise import initial

        return initial(self.config, name, self._seed).view(self._shapes[name])


class StoredWeights:
    """The fp32 weights of a Hugging Face directory.

    Args:
        directory: where they lie.
        architecture: what they become; as they are, if it is plain.
        seed: of weights that the directory has not.

    Raises:
        ModelError: it cannot be read, or cannot have the architecture.
    """

    def __init__(
        self, directory: Path, architecture: Architecture | None = None, seed: int = 0
    ) -> None:
        from shoal.model import huggingface
        from shoal.model.architecture import changed

        self._directory, self._seed = directory, seed
        self.config: ModelConfig = huggingface.read_config(directory)
        if architecture is not None and architecture.says:
            self.config = changed(self.config, architecture)

    def model(self, done: Callable[[Transformer, str], None] | None = None) -> Transformer:
        """The whole model, ready to train.

        Args:
            done: called with the model and the name of each weight that has been read, whose module
                it may replace; not where the model becomes one of another architecture.
        """
        import torch

        from shoal.model import huggingface
        from shoal.model.architecture import rebuilt

        model = huggingface.read(self._directory, torch.float32, packed=False, done=done)
        return rebuilt(model, self.config.architecture, self._seed).train()

    @functools.cached_property
    def _read(self) -> dict[str, Tensor]:
        return dict(self.model().named_parameters())

    def whole(self, name: str) -> Tensor:
        """One whole parameter."""
        return self._read[name].detach()


def with_ends(config: ModelConfig, tokens: TokenSet) -> ModelConfig:
    """A configuration that names the tokens that end a text, and a turn of a chat.

    Without them an exported model would never stop by itself.
    """
    ends = config.eos_ids or (tokens.end_of_text,)
    if tokens.end_of_turn is not None and tokens.end_of_turn not in ends:
        ends = (*ends, tokens.end_of_turn)
    if ends == config.eos_ids:
        return config
    return config.model_copy(update={"eos_token_id": ends[0] if len(ends) == 1 else ends})


def weights_of(job: TrainJob) -> FreshWeights | StoredWeights | SharedWeights:
    """What a job's model starts from: a directory, or fresh weights of the job's seed.

    Raises:
        ModelError: the directory cannot be read or the name is unknown.
        StoreError: weights that jobs share cannot be laid where all of them find them.
    """
    from shoal.model.config import ModelConfig

    if job.base == "shared":
        require(
            not job.architecture.says,
            "architecture",
            job.architecture.name or "not plain",
            expected="none with base = shared, whose jobs all read the same weights",
        )
        from shoal.train.peft.shared import SharedWeights

        return SharedWeights(Path(job.model))
    if is_directory(job.model):
        return StoredWeights(Path(job.model), job.architecture, job.seed)
    return FreshWeights(ModelConfig.from_shape(shape_of(job)), job.seed)

"""Models whose random weights are made where they are used: on a GPU in milliseconds."""

from __future__ import annotations

import torch

from shoal.model.config import ModelConfig
from shoal.model.initialise import empty
from shoal.model.transformer import Transformer
from shoal.train.build import FreshWeights


@torch.no_grad()
def random_model(
    config: ModelConfig, device: str, dtype: torch.dtype = torch.float32
) -> Transformer:
    """A model with weights of the generator of its device; norms are 1."""
    model = empty(config).to(dtype).to_empty(device=device)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=config.initializer_range)
    return model


class DeviceWeights(FreshWeights):
    """Fresh weights that are made on a device.

    Args:
        config: of the model.
        device: of torch.
    """

    def __init__(self, config: ModelConfig, device: str) -> None:
        super().__init__(config, 0)
        self._device = device

    def model(self) -> Transformer:
        return random_model(self.config, self._device).train()

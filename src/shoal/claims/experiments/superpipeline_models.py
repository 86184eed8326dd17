"""Models of the Superpipeline claim, and the peer's way of bringing blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.claims.experiments.tiny import llama
from shoal.memory.tiers.mover import EmulatedLink
from shoal.model.transformer import Transformer


def language_model(blocks: int, hidden: int, seed: int) -> Transformer:
    """A decoder of so many blocks with random weights."""
    torch.manual_seed(seed)
    ffn = 8 * hidden // 3 // 16 * 16
    return Transformer(llama(hidden, blocks, hidden // 64, vocab=512, ffn=ffn, length=512)).eval()


class VisionTransformer(nn.Module):
    """A vision transformer as torch.nn builds it, with random weights."""

    def __init__(self, blocks: int, hidden: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patches = nn.Conv2d(3, hidden, 16, 16)
        layer = nn.TransformerEncoderLayer(
            hidden, hidden // 64, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Scores [B, 10] of images [B, 3, H, W]."""
        rows = self.patches(image).flatten(2).transpose(1, 2)
        tensor: Tensor = self.head(self.encoder(rows).mean(1))
        return tensor


class _Link(Mapping[str, Tensor]):
    """Weights that take the time of a link to come."""

    def __init__(self, weights: Mapping[str, Tensor], link: EmulatedLink) -> None:
        self._weights, self._link = weights, link

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        through = self._link.book(weight.nbytes)
        came = weight.clone()
        time.sleep(max(0.0, through - time.perf_counter()))
        return came

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def accelerated(model: Transformer, link: EmulatedLink) -> Transformer:
    """A model whose blocks the library accelerate brings when they are to run, and drops then."""
    from accelerate.hooks import attach_align_device_hook

    weights = {name: p.detach().clone() for name, p in model.blocks.named_parameters()}
    kind: dict[str, Any] = {"preload_module_classes": ["Block"]}
    attach_align_device_hook(
        model.blocks,
        execution_device=torch.device("cpu"),
        offload=True,
        weights_map=_Link(weights, link),
        **kind,
    )
    return model

"""One tower: a decoder, pooled and projected to vectors of length 1, with its tokenizer.

Shapes: B texts, T tokens, D width of the decoder, d numbers of a vector.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError
from shoal.core.files import write_atomic, write_json
from shoal.core.random import generator
from shoal.corpora import tokenizer as tokenizers
from shoal.fields.retrieve.towers.protocols import Pooling, Precision, TowerError
from shoal.fields.retrieve.towers.shapes import check_config
from shoal.model import huggingface
from shoal.model.config import ModelConfig
from shoal.model.initialise import init_weights
from shoal.model.transformer import Transformer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BACKBONE, _HEAD, _SETTINGS = "backbone", "head.safetensors", "tower.json"
# Texts that are encoded at once.
_AT_ONCE = 64


class TowerSettings(Value):
    """What a tower has beside its decoder.

    Args:
        dim: numbers of a vector.
        length: most tokens of a text, its prompt included.
        prompt: stands before each text.
        pooling: how states become one.
    """

    dim: int
    length: int
    prompt: str
    pooling: Pooling


class TextTower(nn.Module):
    """Texts to vectors of length 1.

    Args:
        backbone: a decoder; tokens see none that follow, so padding behind a text changes nothing.
        tokenizer: its own.
        settings: length, prompt and pooling.

    Raises:
        TowerError: a decoder that cannot be a tower.
    """

    def __init__(
        self, backbone: Transformer, tokenizer: Tokenizer, settings: TowerSettings
    ) -> None:
        super().__init__()
        config: ModelConfig = backbone.config
        check_config(config, settings.length, config.name)
        self.backbone, self.tokenizer, self.settings = backbone, tokenizer, settings
        layers = settings.pooling == "layers"
        width = config.hidden * (config.num_layers + 1 if layers else 1)
        self.head = nn.Linear(width, settings.dim, bias=False)
        if settings.dim == width:
            nn.init.eye_(self.head.weight)
        else:
            rng = generator(0, purpose="tower head")
            draw = rng.standard_normal((settings.dim, width), np.float32)
            with torch.no_grad():
                self.head.weight.copy_(torch.from_numpy(draw) / settings.dim**0.5)

    @classmethod
    def fresh(
        cls, config: ModelConfig, tokenizer: Tokenizer, settings: TowerSettings, seed: int
    ) -> TextTower:
        """A tower whose decoder has learned nothing."""
        backbone = Transformer(config)
        init_weights(backbone, seed)
        # Pooled states are compared from the first step on, so rows begin as large as norms do.
        with torch.no_grad():
            backbone.embed.weight.mul_(1 / config.initializer_range)
        return cls(backbone, tokenizer, settings)

    def tokens(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of texts with their prompt, clipped, int32 [T] each.

        Raises:
            TowerError: a text has no tokens.
        """
        prompt = self.settings.prompt
        whole = [(prompt + text).encode("utf-8", "replace").decode() for text in texts]
        rows = [
            np.array(one.ids[: self.settings.length], np.int32)
            for one in self.tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        ]
        for row, text in zip(rows, texts, strict=True):
            if not len(row) or not text.strip():
                raise TowerError(f"text = {text[:40]!r}: expected words")
        return rows

    def forward(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Vectors of length 1, fp32 [B, d], of token ids [T] each."""
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for at, row in enumerate(rows):
            padded[at, : len(row)] = torch.from_numpy(row)
        states_BTD = self._states(padded).float()
        if self.settings.pooling == "last":
            pooled = states_BTD[torch.arange(len(rows)), lengths - 1]
        else:
            real = torch.arange(padded.shape[1]) < lengths[:, None]
            pooled = (states_BTD * real[..., None]).sum(1) / lengths[:, None]
        return F.normalize(self.head(pooled).float(), dim=-1)

    def _states(self, tokens_BT: Tensor) -> Tensor:
        """What is pooled: final states, or those in front of every block beside them."""
        if self.settings.pooling != "layers":
            return self.backbone.hidden(tokens_BT)
        seen: list[Tensor] = []
        own = threading.get_ident()

        def see(block: nn.Module, given: tuple[Tensor, ...]) -> None:
            # A server encodes on several threads, each of which has hooks here.
            if threading.get_ident() != own:
                return
            # Means of what grows from layer to layer would be those of its largest tokens.
            seen.append(F.rms_norm(given[0], given[0].shape[-1:]))

        hooks = [block.register_forward_pre_hook(see) for block in self.backbone.blocks]
        try:
            last = self.backbone.hidden(tokens_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return torch.cat([last, *seen], -1)

    @torch.no_grad()
    def encode_tokens(
        self, rows: Sequence[np.ndarray], precision: Precision = "fp32"
    ) -> np.ndarray:
        """Vectors of many texts, float32 [N, d]; such of like length go together."""
        order = np.argsort([len(row) for row in rows], kind="stable")
        out = np.empty((len(rows), self.settings.dim), np.float32)
        with products(precision):
            for begin in range(0, len(rows), _AT_ONCE):
                some = order[begin : begin + _AT_ONCE]
                out[some] = self([rows[at] for at in some]).numpy()
        return out

    def encode(self, texts: Sequence[str], precision: Precision = "fp32") -> np.ndarray:
        """Vectors of length 1 of texts, float32 [N, d].

        Args:
            texts: N of them.
            precision: of the products.

        Raises:
            TowerError: a text has no words.
        """
        return self.encode_tokens(self.tokens(texts), precision)

    def write(self, directory: Path) -> None:
        """Write the tower into an empty place: decoder, tokenizer, map and settings."""
        from safetensors.torch import save_file

        directory.mkdir()
        place = directory / "tokenizer.json"
        write_atomic(place, self.tokenizer.to_str())
        huggingface.write(directory / _BACKBONE, self.backbone, place)
        place.unlink()
        save_file({"weight": self.head.weight.detach().contiguous()}, directory / _HEAD)
        write_json(directory / _SETTINGS, self.settings.model_dump())

    @classmethod
    def read(cls, directory: Path) -> TextTower:
        """What :meth:`write` wrote.

        Raises:
            TowerError: it is no tower, or damaged.
            ModelError: its decoder cannot be read.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            raw = json.loads((directory / _SETTINGS).read_text("utf-8"))
            settings = parse(TowerSettings, raw, where=str(directory / _SETTINGS))
            weights: dict[str, Any] = load_file(directory / _HEAD)
        except (OSError, ValueError, ConfigError, SafetensorError) as cause:
            raise TowerError(
                f"{directory}: no tower ({cause}); give what shoal run train_towers wrote"
            ) from cause
        backbone = huggingface.read(directory / _BACKBONE, torch.float32)
        tower = cls(backbone, tokenizers.load(directory / _BACKBONE), settings)
        weight = weights.get("weight")
        if weight is None or weight.shape != tower.head.weight.shape:
            raise TowerError(
                f"{directory / _HEAD}: expected a weight of {list(tower.head.weight.shape)}, the "
                "vector's and the decoder's numbers"
            )
        with torch.no_grad():
            tower.head.weight.copy_(weight)
        return tower.eval()


def products(precision: Precision) -> torch.autocast:
    """A context in which products of matrices have a precision."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")

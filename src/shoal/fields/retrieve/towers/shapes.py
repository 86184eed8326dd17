"""Backbones of towers by name, without torch."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.core.files import expanded
from shoal.fields.retrieve.towers.protocols import TowerError, TowerTask
from shoal.model.config import ModelConfig

_SIZES = {"S": "2x128", "M": "4x256", "L": "8x384"}
_SHAPE = re.compile(r"(\d{1,3})x(\d{2,5})")
_HEAD = 64


def backbone_directory(backbone: str) -> Path | None:
    """The Hugging Face directory that a backbone names; None for a size."""
    if backbone in _SIZES or _SHAPE.fullmatch(backbone):
        return None
    path = expanded(backbone)
    if not path.is_dir():
        raise TowerError(
            f"backbone {backbone!r}: expected {', '.join(_SIZES)}, LAYERSxWIDTH as 2x128, or a "
            "Hugging Face directory of a decoder"
        )
    return path


def tower_config(backbone: str, vocab: int, length: int) -> ModelConfig:
    """The configuration of a fresh backbone.

    Args:
        backbone: ``S``, ``M``, ``L`` or LAYERSxWIDTH, whose width is a multiple of 64, or 32.
        vocab: entries of its tokenizer.
        length: most tokens of a text.

    Raises:
        TowerError: no such size.
    """
    match = _SHAPE.fullmatch(_SIZES.get(backbone, backbone))
    layers, width = (int(one) for one in match.groups()) if match else (0, 0)
    head = min(_HEAD, width)
    if not layers or width % 32 or width % head:
        raise TowerError(
            f"backbone {backbone!r}: expected {', '.join(_SIZES)}, or LAYERSxWIDTH with a width of "
            "32 or a multiple of 64"
        )
    return ModelConfig(
        name=f"tower-{layers}x{width}",
        vocab_size=vocab,
        hidden=width,
        num_layers=layers,
        num_heads=width // head,
        num_kv_heads=width // head,
        head_dim=head,
        # Two thirds of four times the width, as gated layers have.
        ffn_hidden=-(-8 * width // 3 // 32) * 32,
        max_position=length,
        tied=True,
    )


def config_of(task: TowerTask, backbone: str) -> ModelConfig:
    """The configuration of a backbone: of its directory, or of a fresh one.

    Raises:
        TowerError: no such size, or a model whose tokens see later ones.
        ModelError: a directory that cannot be read.
    """
    directory = backbone_directory(backbone)
    length = max(task.query_length, task.document_length)
    if directory is None:
        return tower_config(backbone, task.vocab, length)
    from shoal.model.huggingface import read_config

    config = read_config(directory)
    check_config(config, length, str(directory))
    return config


def check_config(config: ModelConfig, length: int, where: str) -> None:
    """A model can be a tower: its tokens see none that follow, such as padding.

    Raises:
        TowerError: it cannot.
    """
    if not config.causal:
        raise TowerError(f"{where}: family {config.family}: expected a decoder, which is causal")
    if config.max_position < length:
        raise TowerError(
            f"{where}: max_position = {config.max_position}: expected at least {length}, the "
            "longest text; lower query_length and document_length"
        )


def block_parameters(config: ModelConfig) -> int:
    """Parameters of all blocks, without the embedding."""
    width = config.head_dim * (config.num_heads + config.num_kv_heads)
    block = 2 * width + 3 * config.ffn_hidden
    return config.num_layers * config.hidden * block

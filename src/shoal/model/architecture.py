"""A trained model in another architecture: what both have stays, the rest is drawn.

The result computes something else than what was trained, and wants some training more.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.errors import ModelError, require
from shoal.ir.architecture import Architecture
from shoal.model.config import ModelConfig

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer


def plain(config: ModelConfig, what: str) -> None:
    """Refuse a model whose architecture ``what`` does not know.

    Raises:
        ModelError: it is not its family's.
    """
    name = config.architecture.name
    require(
        not name,
        what,
        name,
        expected=f"a model of its family's own architecture, and {config.name} is a {name} model",
        error=ModelError,
    )


def changed(config: ModelConfig, architecture: Architecture) -> ModelConfig:
    """The configuration in another architecture.

    Raises:
        ModelError: the model has one already, or cannot have this one.
    """
    require(
        config.architecture.name in ("", architecture.name),
        "architecture",
        architecture.name or "plain",
        expected=f"{config.architecture.name}, which model {config.name} is already",
        hint="begin with a plain model",
        error=ModelError,
    )
    return ModelConfig(**{**dict(config), "architecture": architecture})


def rebuilt(
    model: Transformer,
    architecture: Architecture,
    seed: int = 0,
    *,
    meant: bool = False,
    texts_PM: Tensor | None = None,
) -> Transformer:
    """The weights of ``model`` in another architecture; what it has not is drawn from ``seed``.

    Warns where a plain model becomes a ladder without ``rewire``: its blocks then compute from
    what they were not trained on.

    Args:
        model: its weights are taken over.
        architecture: what it becomes.
        seed: of new weights.
        meant: the user has requested this, so there is no warning.
        texts_PM: of streams, tokens whose keys and values the prefixes begin as, another text for
            each stream; the prefixes are drawn, if not given, and are then worth less.

    Raises:
        ModelError: the model cannot have this architecture, or such texts.
    """
    from shoal.model.initialise import empty, initial

    config = changed(model.config, architecture)
    if architecture == model.config.architecture:
        return model
    residual = architecture.residual
    if not residual.standard and not (residual.rewire or meant):
        warnings.warn(
            f"{config.name}: weights of a {model.config.architecture.name or 'plain'} model are "
            f"read as {residual.name}, which they were not trained for; say so with "
            "residual.rewire = true, and train on",
            stacklevel=2,
        )
    made = empty(config)
    known = dict(model.named_parameters())
    for name, parameter in list(made.named_parameters()):
        if name in known and known[name].shape == parameter.shape:
            value = known[name].detach()
        else:
            value = initial(config, name, seed).view(parameter.shape).to(model.weight)
        owner, _, leaf = name.rpartition(".")
        fresh = torch.nn.Parameter(value, parameter.requires_grad)
        setattr(made.get_submodule(owner), leaf, fresh)
    if texts_PM is not None:
        _begin(made, model, texts_PM)
    return made.train(model.training)


def _begin(made: Transformer, model: Transformer, texts_PM: Tensor) -> None:
    """Let prefixes be what ``model`` knows of these texts."""
    from shoal.model.parscale import begun

    streams = made.config.architecture.streams
    require(
        streams.num > 1 and texts_PM.shape == (streams.num, streams.prefix),
        "texts of streams",
        tuple(texts_PM.shape),
        expected=f"{streams.num} of {streams.prefix} tokens each, for as many streams"
        if streams.num > 1
        else "none for a single stream, which has no prefix",
        error=ModelError,
    )
    for block, value in zip(made.blocks, begun(model, texts_PM), strict=True):
        block.attention.prefix = torch.nn.Parameter(value)  # type: ignore[union-attr]

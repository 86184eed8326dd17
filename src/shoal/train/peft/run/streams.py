"""Streams that a trained model gets: its prefixes, its aggregator, and how many a step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.core.random import generator
from shoal.ir.architecture import Architecture, Streams
from shoal.model.architecture import changed
from shoal.model.initialise import initial
from shoal.model.parscale import Aggregate, use
from shoal.model.transformer import Transformer

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle


class OwnStreams(nn.Module):
    """What a handle knows of a model's streams; the parameters themselves are the model's.

    Args:
        streams: how many, and their prefixes.
        fewer: every other step computes fewer of them.

    Raises:
        ModelError: the model is not this library's, or not plain.
    """

    def __init__(
        self, handle: ModelPeftHandle, streams: Streams, seed: int, *, fewer: bool
    ) -> None:
        super().__init__()
        model = handle.model
        if not isinstance(model, Transformer):
            raise ModelError(
                f"finetune.streams: a {type(model).__name__} cannot get streams; give a directory "
                "of a model that this library knows"
            )
        before, weight = model.config, model.weight
        config = changed(before, Architecture(streams=streams))
        # In a tuple, for it is no module of this one.
        self._model, self._seed, self._fewer = (model,), seed, fewer
        self._named: dict[str, nn.Parameter] = {}

        def drawn(name: str, shape: tuple[int, ...]) -> nn.Parameter:
            value = initial(config, name, seed).view(shape).to(weight)
            self._named[name] = parameter = nn.Parameter(value)
            return parameter

        attentions = [block.attention for block in model.blocks]
        size = (2, streams.num, streams.prefix, config.num_kv_heads, config.head_dim)
        for layer, attention in enumerate(attentions):
            attention.prefix = drawn(f"blocks.{layer}.attention.prefix", size)  # type: ignore[union-attr]
        model.aggregate = aggregate = Aggregate(config.hidden, streams)
        for leaf, parameter in list(aggregate.named_parameters()):
            owner, _, name = leaf.rpartition(".")
            made = drawn(f"aggregate.{leaf}", tuple(parameter.shape))
            setattr(aggregate.get_submodule(owner), name, made)
        model.config = config
        use(model, streams.num)

        def undo() -> None:
            use(model, 1)
            for attention in attentions:
                attention.prefix = None  # type: ignore[union-attr]
            model.aggregate, model.config = None, before

        handle.later(undo)

    def files(self) -> dict[str, Tensor]:
        """Prefixes and aggregator, by their names in the model."""
        return dict(self._named)

    def before_step(self, step: int, total: int) -> None:
        """Choose how many streams a step computes; one would have nothing to learn."""
        (model,), most = self._model, self._model[0].config.architecture.streams.num
        if self._fewer and step % 2 and most > 2:
            drawn = generator(self._seed, purpose="fewer streams", step=step)
            use(model, int(drawn.integers(2, most)))

    def after_update(self, step: int, total: int) -> None:
        """All of them again, for evaluation."""
        (model,) = self._model
        use(model, model.config.architecture.streams.num)

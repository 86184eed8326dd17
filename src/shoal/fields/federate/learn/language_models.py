"""Causal language models: a small one that is trained whole, and adapters of a given one.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021; in federations:
Babakniya et al., SLoRA, 2023.
"""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Ge, Gt

from shoal.core.extras import import_extra
from shoal.core.files import expanded
from shoal.core.parts import part
from shoal.cost.shapes import resolve
from shoal.fields.federate.learn.protocols import Learning
from shoal.fields.federate.protocols import FederationError


def _length(features: tuple[int, ...]) -> int:
    """Tokens of an example.

    Raises:
        FederationError: the examples are no texts.
    """
    if len(features) != 1:
        raise FederationError(
            f"learner: examples of shape {list(features)} are no texts; take data text"
        )
    return features[0]


@part
class TinyLm:
    """A causal transformer over characters or tokens, trained from nothing.

    Args:
        width: of its states; a multiple of ``heads``.
        depth: layers.
        heads: of attention.
    """

    width: Annotated[int, Ge(1)] = 64
    depth: Annotated[int, Ge(1)] = 2
    heads: Annotated[int, Ge(1)] = 4

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Embedding, positions, blocks of 12 D² weights, and an output layer."""
        length, d = _length(features), self.width
        blocks = self.depth * (12 * d * d + 13 * d)
        size = (classes + length) * d + blocks + 2 * d + (d + 1) * classes
        products = self.depth * (12 * d * d + length * d) + d * classes
        return size, 6.0 * length * products

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """Pre-norm blocks with GELU."""
        import_extra("torch", extra="run", purpose="a language model")
        from shoal.fields.federate.learn.torch_learning import TorchLearning
        from shoal.fields.federate.learn.torch_lm import TinyTransformer

        length = _length(features)
        if self.width % self.heads:
            raise FederationError(
                f"learner tiny_lm: width = {self.width} is no multiple of heads = {self.heads}"
            )
        return TorchLearning(
            lambda: TinyTransformer(classes, length, self.width, self.depth, self.heads)
        )


@part
class LoraAdapters:
    """Low-rank adapters of a causal model, whose own weights stay where they are.

    Only the adapters travel: every client has the model in its own directory.

    Args:
        model: directory of the model, in the form of Hugging Face.
        r: rank of the change.
        alpha: the change is multiplied by alpha / r.
        targets: linear layers that it changes: patterns of names joined by a bar; empty for those
            of attention.
    """

    model: str
    r: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    targets: str = ""

    def shape(self, features: tuple[int, ...], classes: int) -> tuple[int, float]:
        """Adapters; a forward pass of the whole model and a backward pass to its states."""
        length, shape = _length(features), resolve(self.model)
        from shoal.cost.arithmetic import parameters

        return round(self._method().parameters(shape)), 4.0 * length * parameters(shape)

    def build(self, features: tuple[int, ...], classes: int) -> Learning:
        """Read the model.

        Raises:
            FederationError: its vocabulary is not that of the data.
            ModelError: it cannot be read.
        """
        torch = import_extra("torch", extra="run", purpose="adapters of a language model")
        from shoal.fields.federate.learn.torch_learning import TorchLearning
        from shoal.model.huggingface import read

        _length(features)
        place = expanded(self.model)
        if not place.is_dir():
            raise FederationError(
                f"learner lora: model = {self.model!r} is no directory of a model; train one with "
                "shoal train, or fetch one"
            )

        def make() -> Any:
            model = read(place, torch.float32, packed=False)
            if model.config.vocab_size < classes:
                raise FederationError(
                    f"learner lora: the data has {classes} tokens, {self.model} has "
                    f"{model.config.vocab_size}; give data text the tokenizer of the model"
                )
            seed = int(torch.randint(2**31, ()))
            self._method().inject(model, seed=seed).stay()
            return model

        return TorchLearning(make)

    def _method(self) -> Any:
        from shoal.train.peft.base import ATTENTION
        from shoal.train.peft.lora import Lora

        return Lora(r=self.r, alpha=self.alpha, targets=self.targets or ATTENTION)

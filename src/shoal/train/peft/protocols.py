"""What a fine-tuning method promises.

A method is injected into a model whose own weights then stand still. The
:class:`~shoal.train.peft.run.handle.ModelPeftHandle` that comes back is all that callers need of
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import nn

    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


class PeftMethod(Protocol):
    """A part of kind ``peft``.

    Attributes:
        mergeable: what it learns can be put into the weights of the base.

    An export also looks for ``whole``: that the model with the method in it is one that directories
    hold, though it is more than the base. An estimate looks for ``weight_bits``, bits of a weight
    of the blocks where the base is not kept in fp32; ``kept``, the share of the activations that
    is, where it is not all of them;
    ``drawn(shape)``, numbers that it keeps and does not train; ``shape(shape)``, that of the model
    it makes, where it is another; and ``forward_only``, where there are no gradients. Who compares
    methods looks for ``advice``: in few words, what speaks for it.
    """

    mergeable: ClassVar[bool]

    def parameters(self, shape: ModelShape) -> float:
        """Parameters that are trained in a model of this shape."""

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        """Put the method into a model, whose own parameters are trained no more.

        A fresh method changes no output, unless its documentation says so.

        Args:
            model: a :class:`~shoal.model.transformer.Transformer`, or any module.
            targets: what to change, instead of the option ``targets``: patterns of names joined
                by ``|``.
            seed: of what is drawn.

        Raises:
            ConfigError: the patterns match nothing, or the method cannot be on what they match.
        """

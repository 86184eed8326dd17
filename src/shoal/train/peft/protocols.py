"""What a fine-tuning method promises, and what it leaves in a model.

A method is injected into a model whose own weights then stand still. The handle that comes back
is all that anybody needs of it: what is trained, what is stored, and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir import ModelShape
    from shoal.train.loop import StepMethod, Trainer

__all__ = ["PeftHandle", "PeftMethod"]


class PeftHandle(Protocol):
    """A method at work in a model."""

    name: str
    model: nn.Module
    options: dict[str, Any]
    modules: dict[str, nn.Module]
    looks: int  # batches that the method looks at before the first step

    def trainable(self) -> dict[str, nn.Parameter]:
        """What is trained, by the name that it has in files."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What must be stored to have the method again on the same base: trained or drawn."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over a stored state.

        Raises:
            CheckpointError: a tensor is missing, left over, or of another shape.
        """
        ...

    def merge(self, *, dequantise: bool = False) -> None:
        """Put what was learned into the base's weights; forward passes then cost nothing extra.

        Args:
            dequantise: a base in few bits may become a plain one.

        Raises:
            ModelError: the method cannot be merged, or the base is in few bits.
        """
        ...

    def unmerge(self) -> None:
        """Give the base its weights back, bit for bit."""
        ...

    def remove(self) -> None:
        """Leave the model as it was found, bit for bit.

        Raises:
            ModelError: :meth:`stay` was called.
        """
        ...

    def stay(self) -> None:
        """Let go of what only :meth:`remove` needs, such as weights that became few bits."""
        ...

    def buffers(self) -> dict[str, Tensor]:
        """What a run that goes on needs beside parameters: it is written in place."""
        ...

    def restore(self, get: Callable[[str], Tensor]) -> None:
        """Take over what :meth:`buffers` gave in the run that is continued, by name."""
        ...

    def look(self, backward: Callable[[int], None], together: Callable[[Tensor], None]) -> None:
        """Called before the first step where ``looks`` is above 0; see the handle."""
        ...

    def loaded(self) -> None:
        """Called when parameters or buffers were written from outside."""
        ...

    def step_method(self, trainer: Trainer) -> StepMethod:
        """What takes a step of a trainer from rows to gradients, where it is not the trainer's."""
        ...

    def before_step(self, step: int, total: int) -> None:
        """Called before the forward passes of step ``step`` of ``total``."""
        ...

    def before_update(self, step: int, total: int) -> None:
        """Called when the gradients of the step are whole, before the optimizer uses them."""
        ...

    def after_update(self, step: int, total: int) -> None:
        """Called when the optimizer has made its step."""
        ...

    def penalty(self) -> Tensor | None:
        """What is added to the loss of a step, a scalar; None for nothing."""
        ...


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
        ...

    def inject(self, model: nn.Module, targets: str | None = None, *, seed: int = 0) -> PeftHandle:
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
        ...

"""What methods share that put trained tokens before every sequence, or their keys and values."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from shoal.train.peft.run.handle import ModelPeftHandle


class PromptMethod:
    """Base of the methods that every token of every sequence sees.

    Places of real tokens stay what they were: rotations know differences alone, so the trained
    ones stand before place 0.
    """

    name: ClassVar[str]
    mergeable: ClassVar[bool] = False

    @abstractmethod
    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        """Put the tokens before the model of a handle."""

    def inject(
        self, model: nn.Module, targets: str | None = None, *, seed: int = 0
    ) -> ModelPeftHandle:
        """See :class:`~shoal.train.peft.protocols.PeftMethod`.

        Raises:
            ConfigError: there is nothing to target.
        """
        from shoal.core.errors import require
        from shoal.train.peft.run.handle import ModelPeftHandle

        require(
            targets is None,
            f"finetune.{self.name}.targets",
            targets,
            expected="none: the method works on the whole model",
        )
        handle = ModelPeftHandle(model, self.name, self, mergeable=self.mergeable)
        with handle.building():
            self.put_into(handle, seed)
        return handle

"""Prefix tuning: trained keys and values before those of every sequence, in every layer.

Source: Li and Liang, Prefix-Tuning: Optimizing Continuous Prompts for Generation, 2021.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.parts import part
from shoal.train.peft.prompts import PromptMethod

if TYPE_CHECKING:
    from shoal.ir import ModelShape
    from shoal.train.peft.run.handle import ModelPeftHandle


@part
class PrefixTuning(PromptMethod):
    """Trained keys and values before the prompt; their initialization changes the output.

    Args:
        tokens: length of the prefix.
        projection: width of the MLP that generates them in training and is dropped afterwards; 0 to
            train them directly.
    """

    tokens: Annotated[int, Ge(1)] = 16
    projection: Annotated[int, Ge(0)] = 0
    name: ClassVar[str] = "prefix"

    def parameters(self, shape: ModelShape) -> float:
        """Keys and values, or the perceptron and its inputs."""
        width = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        if not self.projection:
            return self.tokens * width
        inner, hidden = self.projection, shape.hidden
        return self.tokens * hidden + hidden * inner + inner + inner * width + width

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        from shoal.train.peft.run.prompts import PrefixTokens, prefix

        module = PrefixTokens(handle.model, self.tokens, self.projection, seed)
        handle.attach("", "finetuned_prefix", module, "")
        prefix(handle, module)

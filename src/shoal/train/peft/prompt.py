"""Prompt tuning: trained embeddings before every sequence.

Source: Lester et al., The Power of Scale for Parameter-Efficient Prompt Tuning, 2021.
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
class PromptTuning(PromptMethod):
    """Trained embeddings before the prompt, initialized from random tokens.

    Args:
        tokens: number of embeddings.
    """

    tokens: Annotated[int, Ge(1)] = 16
    name: ClassVar[str] = "prompt"

    def parameters(self, shape: ModelShape) -> float:
        return self.tokens * shape.hidden

    def put_into(self, handle: ModelPeftHandle, seed: int) -> None:
        from shoal.train.peft.run.prompts import PromptEmbeddings, prompt

        module = PromptEmbeddings(handle.model, self.tokens, seed)
        handle.attach("", "finetuned_prompt", module, "")
        prompt(handle, module)

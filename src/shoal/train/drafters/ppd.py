"""Parallel prompt decoding: a few embeddings are trained, and nothing else.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding for Memory-Efficient Acceleration of
LLM Inference, 2024, sections 3.1 to 3.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.ir import Estimate, Machine, ModelShape
from shoal.ir.drafting import DrafterJob, DrafterWork
from shoal.train.drafters.base import check_levels, priced

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.train.drafters.protocols import DrafterLearner


@part
class PpdTraining:
    """Prompt tokens after the current one, at which the target itself predicts further tokens.

    Args:
        prompts: number of prompt tokens m; prompt token i predicts the token i + 1 positions ahead.
        ensemble: embeddings per prompt token, E, whose logits are averaged.
        points: positions of a sequence after which the prompt tokens are inserted in a step.
        lr: peak learning rate.
        decay: weight of the loss of distance i is decay^(i - 1).
    """

    prompts: Annotated[int, Ge(1)] = 3
    ensemble: Annotated[int, Ge(1)] = 1
    points: Annotated[int, Ge(1)] = 16
    lr: Annotated[float, Gt(0)] = 1e-2
    decay: Annotated[float, Gt(0), Le(1)] = 0.8

    def parameters(self, shape: ModelShape) -> int:
        """Rows of the embedding."""
        return self.prompts * self.ensemble * shape.hidden

    def estimate(self, work: DrafterWork, machine: Machine) -> Estimate:
        """The target over the text forward, and over the prompt tokens forward and back."""
        shape, length = work.shape, work.job.seq_len
        forward = flops_per_token(shape, length, training=False)
        share = self.points * self.prompts * self.ensemble / length
        kept = shape.num_layers * (12.0 * shape.hidden + 3.0 * shape.ffn_hidden)
        # Keys and values of the text are there for every prompt token.
        scores = float(shape.num_layers * shape.num_heads * length)
        return priced(
            work,
            machine,
            trained=float(self.parameters(shape)),
            # The weights stand still: backward passes make gradients of inputs alone.
            flops_per_token=forward + 2 * share * forward,
            activations=share * (kept + scores) + 2.0 * shape.num_layers * shape.hidden,
            passing=kept,
            logits=2 * share * shape.vocab_size,
            base=parameters(shape),
        )

    def levels(self) -> int:
        """A prompt token guesses one token."""
        return self.prompts

    def check(self, job: DrafterJob, shape: ModelShape) -> None:
        """Refuse prompt tokens that look beyond the sequences.

        Raises:
            PlanError: names the key and what is possible.
        """
        check_levels(job, shape, self.prompts, "ppd.prompts")

    def begin(self, target: Transformer, job: DrafterJob) -> DrafterLearner:
        """New embeddings; the whole target is loaded and frozen."""
        from shoal.train.drafters.run.ppd import PromptLearner

        return PromptLearner(self, target, job.seed)

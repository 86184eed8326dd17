"""Falcon: several features at once, and a training that shows some of the answers.

Source: Gao et al., Falcon: Faster and Parallel Inference of Large Language Models through Enhanced
Semi-Autoregressive Drafting and Custom-Designed Decoding Tree, 2025, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.arithmetic import block_parameters
from shoal.ir import Estimate, Machine, ModelShape
from shoal.ir.drafting import DrafterJob, DrafterWork
from shoal.train.drafters.base import check_levels, priced

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.train.drafters.protocols import DrafterLearner


@part
class FalconTraining:
    """An LSTM and one block over features; the last k positions give the next k features.

    Args:
        k: features per pass; 1 makes an autoregressive drafter.
        forwards: number of consecutive passes whose draft tokens are evaluated.
        lstm_layers: LSTM layers.
        lr: peak learning rate.
        glance_from: share of the positions mispredicted by a first pass that are given the true
            later features (glancing), at the beginning of training; 0 with ``glance_to`` = 0 makes
            no first pass.
        glance_to: that share at the end.
        weight: weight of the token loss beside the feature loss.
        soft: share of the target's distribution in the labels of the token loss; the rest is the
            text.
    """

    k: Annotated[int, Ge(1)] = 2
    forwards: Annotated[int, Ge(1)] = 2
    lstm_layers: Annotated[int, Ge(1)] = 2
    lr: Annotated[float, Gt(0)] = 1e-3
    glance_from: Annotated[float, Ge(0), Le(1)] = 0.6
    glance_to: Annotated[float, Ge(0), Le(1)] = 0.1
    weight: Annotated[float, Gt(0)] = 0.1
    soft: Annotated[float, Ge(0), Le(1)] = 0.9

    def parameters(self, shape: ModelShape) -> int:
        """The LSTM, whose first layer reads two vectors, and a block of the target's kind."""
        width = shape.hidden
        first, other = 4 * width * (2 * width + width + 2), 4 * width * (2 * width + 2)
        return first + (self.lstm_layers - 1) * other + block_parameters(shape) // shape.num_layers

    def estimate(self, work: DrafterWork, machine: Machine) -> Estimate:
        """The net three times, the head forward and back, and a first pass where some is shown."""
        shape, net = work.shape, float(self.parameters(work.shape))
        head = float(shape.hidden * shape.vocab_size)
        glances = self.glance_from > 0 or self.glance_to > 0
        return priced(
            work,
            machine,
            trained=net,
            flops_per_token=6 * net + 6 * head + (2 * net + 4 * head if glances else 0.0),
            activations=(6.0 * self.lstm_layers + 12.0) * shape.hidden + 3.0 * shape.ffn_hidden,
            logits=2.0 * shape.vocab_size,
            # Forward, twice backward, and once more where a first pass is made.
            waits=(4.0 if glances else 3.0) * self.lstm_layers * 4 * shape.hidden**2,
        )

    def levels(self) -> int:
        """K tokens a pass."""
        return self.k * self.forwards

    def check(self, job: DrafterJob, shape: ModelShape) -> None:
        """Refuse sequences that are shorter than what is guessed.

        Raises:
            PlanError: names the key and what is possible.
        """
        check_levels(job, shape, self.levels(), "falcon.k * forwards")
        require(
            job.prompt_tokens >= self.k,
            "prompt_tokens",
            job.prompt_tokens,
            expected=f"at least k = {self.k}, the places that a pass reads",
        )

    def begin(self, target: Transformer, job: DrafterJob) -> DrafterLearner:
        """A fresh net; embedding and head are the target's."""
        from shoal.train.drafters.run.feature import FeatureLearner, FeatureLoss
        from shoal.train.drafters.run.fresh import falcon

        return FeatureLearner(
            falcon(target.config, self.k, self.lstm_layers, job.seed),
            target,
            lr=self.lr,
            loss=FeatureLoss(self.weight, self.soft),
            glance=(self.glance_from, self.glance_to),
            rounds=self.forwards,
            seed=job.seed,
        )

"""Dovetail's drafter: a gate that mixes feature and token, and as many layers as pay.

Source: Zhang et al., Dovetail: A CPU/GPU Heterogeneous Speculative Decoding for LLM inference,
2025, section 3.2; trained as the drafters of Li et al., EAGLE, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from shoal.core.parts import part
from shoal.cost.arithmetic import block_parameters
from shoal.ir import Estimate, Machine, ModelShape
from shoal.ir.drafting import DrafterJob, DrafterWork
from shoal.train.drafters.base import check_levels, priced

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.train.drafters.protocols import DrafterLearner


@part
class DovetailTraining:
    """An autoregressive drafter of features, with more layers where verification is expensive.

    Args:
        layers: number of layers M, of the same kind as the target's.
        depth: number of consecutive draft tokens that are evaluated.
        lr: peak learning rate.
        weight: weight of the divergence from the target's distribution beside the feature loss.
    """

    layers: Annotated[int, Ge(1)] = 1
    depth: Annotated[int, Ge(1)] = 5
    lr: Annotated[float, Gt(0)] = 1e-3
    weight: Annotated[float, Gt(0)] = 0.1

    def parameters(self, shape: ModelShape) -> int:
        """Two square matrices, the gate, and the layers."""
        width = shape.hidden
        return 4 * width * width + width + self.layers * block_parameters(shape) // shape.num_layers

    def estimate(self, work: DrafterWork, machine: Machine) -> Estimate:
        """The net three times, and the head forward and back."""
        shape, net = work.shape, float(self.parameters(work.shape))
        head = float(shape.hidden * shape.vocab_size)
        return priced(
            work,
            machine,
            trained=net,
            flops_per_token=6 * net + 6 * head,
            activations=(8.0 + 12.0 * self.layers) * shape.hidden
            + 3.0 * self.layers * shape.ffn_hidden,
            logits=2.0 * shape.vocab_size,
        )

    def levels(self) -> int:
        """One token a pass."""
        return self.depth

    def check(self, job: DrafterJob, shape: ModelShape) -> None:
        """Refuse sequences that are shorter than what is guessed.

        Raises:
            PlanError: names the key and what is possible.
        """
        check_levels(job, shape, self.depth, "dovetail.depth")

    def begin(self, target: Transformer, job: DrafterJob) -> DrafterLearner:
        """A fresh net; embedding and head are the target's."""
        from shoal.train.drafters.run.feature import FeatureLearner, FeatureLoss
        from shoal.train.drafters.run.fresh import fusion

        return FeatureLearner(
            fusion(target.config, self.layers, job.seed),
            target,
            lr=self.lr,
            loss=FeatureLoss(self.weight, soft=1.0),
            rounds=self.depth,
            seed=job.seed,
        )

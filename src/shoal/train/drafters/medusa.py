"""Medusa: heads on the target's last hidden state.

Source: Cai et al., Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding
Heads, 2024, sections 2.1 and 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from shoal.core.parts import part
from shoal.cost.arithmetic import flops_per_token, parameters
from shoal.ir import Estimate, Machine, ModelShape
from shoal.ir.drafting import DrafterJob, DrafterWork
from shoal.train.drafters.base import check_levels, priced

if TYPE_CHECKING:
    from shoal.model.transformer import Transformer
    from shoal.train.drafters.protocols import DrafterLearner


@part
class MedusaTraining:
    """Prediction heads, each a layer and a copy of the output matrix.

    Args:
        heads: number of heads K; head k predicts the token k + 1 positions ahead.
        version: 1 trains the heads alone; 2 also trains the target through LoRA, with a penalty on
            the change of its distribution. The changed target is written beside the drafter.
        lr: peak learning rate of the heads; that of the target is a quarter of it.
        decay: weight of the loss of head k is decay^k.
        weight: version 2, weight of the heads' loss beside the target's.
        warmup: version 2, share of the steps, at the beginning, that train the heads alone.
        r: version 2, rank of the change.
    """

    heads: Annotated[int, Ge(1)] = 4
    version: Literal[1, 2] = 1
    lr: Annotated[float, Gt(0)] = 1e-3
    decay: Annotated[float, Gt(0), Le(1)] = 0.8
    weight: Annotated[float, Gt(0)] = 0.2
    warmup: Annotated[float, Ge(0), Lt(1)] = 0.3
    r: Annotated[int, Ge(1)] = 8

    def parameters(self, shape: ModelShape) -> int:
        """A square matrix, a bias and an output matrix for each head."""
        return self.heads * shape.hidden * (shape.hidden + 1 + shape.vocab_size)

    def estimate(self, work: DrafterWork, machine: Machine) -> Estimate:
        """The products of the heads, three times; in version 2 those of the target too."""
        shape = work.shape
        heads = self.parameters(shape)
        joint = self.version == 2
        flops = 6.0 * heads
        base = 0
        kept = 4.0 * self.heads * shape.hidden
        if joint:
            flops += flops_per_token(shape, work.job.seq_len)
            base = parameters(shape)
            kept += shape.num_layers * (12.0 * shape.hidden + 3.0 * shape.ffn_hidden)
        return priced(
            work,
            machine,
            trained=heads,
            flops_per_token=flops,
            activations=kept,
            logits=float((2 if joint else 1) * shape.vocab_size),
            base=base,
        )

    def levels(self) -> int:
        """A head guesses one token."""
        return self.heads

    def check(self, job: DrafterJob, shape: ModelShape) -> None:
        """Refuse heads that look beyond the sequences.

        Raises:
            PlanError: names the key and what is possible.
        """
        check_levels(job, shape, self.heads, "medusa.heads")

    def begin(self, target: Transformer, job: DrafterJob) -> DrafterLearner:
        """Fresh heads; for version 2 with a low-rank change of the target."""
        from shoal.train.drafters.run import medusa

        if self.version == 1:
            return medusa.FrozenLearner(self, target)
        return medusa.JointLearner(self, target, job)

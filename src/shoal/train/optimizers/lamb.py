"""LAMB: Adam's direction, with a step in proportion to the size of each tensor.

The trust ratio keeps large batches stable: MegaScale trains with four times the batch.

Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes,
2020, algorithm 2 (phi is the identity); Jiang et al., MegaScale, 2024, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from shoal.core.parts import part
from shoal.cost.arithmetic import parameters as count_parameters
from shoal.ir import Estimate, Interval, Machine, Work

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.train.protocols import Updater


@part
class Lamb:
    """Adam with steps relative to the norm of each tensor; for large batches.

    The norm of a tensor needs the whole tensor on one rank: choose ``shard: replicated`` or
    ``zero1``, and leave ``tp`` at 1.

    Args:
        lr: peak learning rate, relative to the norm of each tensor.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: constant added to the root of the second moment.
        weight_decay: decay of matrices, added to Adam's direction before it is scaled.
    """

    lr: Annotated[float, Gt(0)] = 1e-2
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    eps: Annotated[float, Gt(0)] = 1e-6
    weight_decay: Annotated[float, Ge(0)] = 0.01
    whole_matrices: ClassVar[bool] = True
    # Its steps depend on which experts lie in one tensor.
    whole_tensors: ClassVar[bool] = True

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Two fp32 moments; a pass for moments and direction, two for norms, one for the step."""
        count = count_parameters(work.shape)
        seconds = 12 * 4 * count / (machine.device.main_memory.read_bandwidth or 1e10)
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"optimizer": seconds},
            memory_bytes={"optimizer": 8.0 * count},
        )

    def build(self, parameters: Mapping[str, Tensor]) -> Updater:
        """An optimizer of torch's form, one group for matrices and one for vectors."""
        from shoal.train.optimizers.lamb_step import LambStep
        from shoal.train.optimizers.torch_state import TorchUpdater

        matrices = [p for p in parameters.values() if p.dim() >= 2]
        vectors = [p for p in parameters.values() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = LambStep(
            [group for group in groups if group["params"]],
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
        )
        return TorchUpdater([optimizer], {p: name for name, p in parameters.items()})

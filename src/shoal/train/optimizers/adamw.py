"""AdamW.

Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.
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
class AdamW:
    """Adam with decoupled weight decay; the default.

    Matrices are decayed; vectors (norms, biases) are not.

    Args:
        lr: peak learning rate.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: constant added to the root of the second moment.
        weight_decay: decoupled decay of matrices, multiplied by the learning rate.
        fused: use one kernel per update, instead of one per operation.
    """

    lr: Annotated[float, Gt(0)] = 3e-3
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    eps: Annotated[float, Gt(0)] = 1e-8
    weight_decay: Annotated[float, Ge(0)] = 0.1
    fused: bool = True
    traits: ClassVar[frozenset[str]] = frozenset({"lr_by_size"})
    whole_matrices: ClassVar[bool] = False
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Two fp32 moments; reads weight, gradient and moments, writes weight and moments."""
        count = count_parameters(work.shape)
        seconds = 7 * 4 * count / (machine.device.main_memory.read_bandwidth or 1e10)
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"optimizer": seconds},
            memory_bytes={"optimizer": 8.0 * count},
        )

    def build(self, parameters: Mapping[str, Tensor]) -> Updater:
        """Torch's implementation."""
        from shoal.train.optimizers.eager import EagerAdamW
        from shoal.train.optimizers.torch_state import TorchUpdater

        groups = [
            {
                "params": [p for p in parameters.values() if p.dim() >= 2],
                "weight_decay": self.weight_decay,
            },
            {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = EagerAdamW(
            [group for group in groups if group["params"]],
            lr=self.lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            fused=self.fused,
        )
        return TorchUpdater([optimizer], {p: name for name, p in parameters.items()})

    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        states: Mapping[str, Tensor],
        *,
        step: int,
        factor: float,
        matrix: bool,
    ) -> None:
        """Update some elements in place, by the same kernel that updates all of them.

        Args:
            weight: the elements, flat.
            gradient: of them.
            states: their two moments.
            step: updates made before this one.
            factor: scales the learning rate.
            matrix: they are elements of a matrix.
        """
        import torch
        from torch.optim.adamw import adamw

        with torch.no_grad():
            adamw(
                [weight],
                [gradient],
                [states["exp_avg"]],
                [states["exp_avg_sq"]],
                [],
                [torch.tensor(float(step))],
                foreach=False,
                fused=self.fused,
                amsgrad=False,
                beta1=self.beta1,
                beta2=self.beta2,
                lr=self.lr * factor,
                weight_decay=self.weight_decay if matrix else 0.0,
                eps=self.eps,
                maximize=False,
            )

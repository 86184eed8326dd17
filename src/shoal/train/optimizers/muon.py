"""Muon: momentum whose matrices are orthogonalised before the update.

The blocks' matrices are updated by Muon, embeddings, output matrix and vectors by AdamW.

Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, 2025
(the scale 0.2 sqrt(max(rows, columns)) that matches AdamW's update size).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Le, Lt

from shoal.core.parts import part
from shoal.cost.arithmetic import linears
from shoal.cost.arithmetic import parameters as count_parameters
from shoal.ir import Estimate, Interval, Machine, Work

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.train.protocols import Updater


@part
class Muon:
    """Momentum with orthogonalized updates: fewer tokens to the same loss than AdamW.

    It needs whole matrices: choose ``shard: replicated``, or ``zero1``, which also
    divides its arithmetic.

    Args:
        lr: peak learning rate of the parameters that AdamW updates; scaled by ``matrix_lr`` for the
            matrices.
        matrix_lr: factor of ``lr`` for the matrices.
        momentum: Nesterov momentum of the matrices.
        weight_decay: decoupled decay of matrices.
        iterations: Newton-Schulz iterations.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
    """

    lr: Annotated[float, Gt(0)] = 3e-3
    matrix_lr: Annotated[float, Gt(0)] = 2.0
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    weight_decay: Annotated[float, Ge(0)] = 0.1
    iterations: Annotated[int, Ge(1), Le(20)] = 5
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    whole_matrices: ClassVar[bool] = True

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """One moment for matrices, two for the rest; the iterations' matrix products."""
        shape = work.shape
        count = count_parameters(shape)
        rest = shape.vocab_size * shape.hidden * (1 if shape.tied else 2)
        matrices = max(0, count - rest)
        # AdamW updates the output matrix, as it does the embedding.
        blocks = [linear for linear in linears(shape) if linear.role != "output"]
        flops = sum(
            self.iterations
            * (4 * min(x.N, x.K) ** 2 * max(x.N, x.K) + 2 * min(x.N, x.K) ** 3)
            * x.layers
            * x.copies
            for x in blocks
        )
        device = machine.device
        rate = max(device.matmul_flops.get(name, 0.0) for name in ("bf16", "fp32")) or 1e11
        traffic = (7 * 4 * rest + (5 * 4 + 2 * 12 * self.iterations) * matrices) / (
            device.main_memory.read_bandwidth or 1e10
        )
        seconds = traffic + flops / rate
        return Estimate(
            step_s=Interval.around(seconds, 0.5),
            terms_s={"optimizer": seconds},
            memory_bytes={"optimizer": 4.0 * matrices + 8.0 * rest},
            flops=float(flops),
        )

    def build(self, parameters: Mapping[str, Tensor]) -> Updater:
        """An optimizer of torch's form for each of the two groups."""
        from shoal.train.optimizers.eager import EagerAdamW, EagerOptimizer
        from shoal.train.optimizers.muon_step import MuonStep
        from shoal.train.optimizers.torch_state import TorchUpdater

        matrices = {n: p for n, p in parameters.items() if p.dim() == 2 and "blocks." in n}
        rest = [p for n, p in parameters.items() if n not in matrices]
        optimizers: list[EagerOptimizer] = []
        if matrices:
            optimizers.append(
                MuonStep(
                    list(matrices.values()),
                    lr=self.lr * self.matrix_lr,
                    weight_decay=self.weight_decay,
                    momentum=self.momentum,
                    ns_steps=self.iterations,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if rest:
            optimizers.append(
                EagerAdamW(
                    rest,
                    lr=self.lr,
                    betas=(self.beta1, self.beta2),
                    weight_decay=0.0,
                    fused=True,
                )
            )
        return TorchUpdater(optimizers, {p: name for name, p in parameters.items()})

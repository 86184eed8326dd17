"""MeZO at work: directions that are drawn again and never kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, ModelError, require
from shoal.core.random import seed64
from shoal.train.peft.base import matches
from shoal.train.peft.run.handle import ModelPeftHandle
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from shoal.ir.hooks import TrainStep
    from shoal.parallel.tensor.rows import ReplicaSequences
    from shoal.train.loop import RankTrainer, StepMethod
    from shoal.train.peft.mezo import MeZO


class ZerothOrder(ModelPeftHandle):
    """The weights of a model, changed along drawn directions.

    Args:
        targets: patterns of parameter names.

    Raises:
        ConfigError: the patterns match nothing.
    """

    def __init__(self, model: nn.Module, method: MeZO, targets: str, seed: int) -> None:
        super().__init__(model, "mezo", method, targets, mergeable=True)
        self._eps, self._seed = method.eps, seed
        self._weights = {n: p for n, p in model.named_parameters() if matches(n, targets)}
        if not self._weights:
            self.remove()
            raise ConfigError(f"finetune.mezo.targets = {targets!r}: matches no parameter")
        copy = {name: p.detach().clone() for name, p in self._weights.items()}
        self._copy = copy if method.keep_base else None
        self.moves: list[float] = []

    def trainable(self) -> dict[str, nn.Parameter]:
        return dict(self._weights)

    def state(self) -> dict[str, Tensor]:
        """How far each step went, and the seed of the directions."""
        return {
            "moves": torch.tensor(self.moves, dtype=torch.float64),
            "seed": torch.tensor([self._seed], dtype=torch.int64),
        }

    def buffers(self) -> dict[str, Tensor]:
        return self.state()

    def restore(self, get: Callable[[str], Tensor]) -> None:
        """Make the steps of a run again."""
        self.load({name: get(name) for name in ("moves", "seed")})

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Make the stored steps on the base.

        Raises:
            ModelError: steps were made already.
        """
        if self.moves:
            raise ModelError("finetune.mezo: the weights have moved already; read the model again")
        self._seed = int(state["seed"][0])
        for number, move in enumerate(state["moves"].tolist()):
            self.there_and_back(number)
            self._move(number, move)

    @torch.no_grad()
    def _add(self, step: int, factor: float) -> None:
        """Add the direction of a step, times a factor."""
        for name, parameter in self._weights.items():
            key = seed64(self._seed, purpose=f"mezo {name}", step=step)
            drawn = torch.Generator().manual_seed(key)
            z = torch.randn(parameter.shape, generator=drawn, dtype=torch.float32)
            parameter.add_(z.to(parameter.device, parameter.dtype), alpha=factor)

    def there_and_back(
        self, step: int, loss: Callable[[], float] = lambda: 0.0
    ) -> tuple[float, float]:
        """The losses on both sides; the weights are back to within rounding."""
        self._add(step, self._eps)
        above = loss()
        self._add(step, -2 * self._eps)
        below = loss()
        self._add(step, self._eps)
        return above, below

    def _move(self, step: int, move: float) -> None:
        self._add(step, move)
        self.moves.append(move)

    def estimate(self, step: int, loss: Callable[[], float], lr: float) -> tuple[float, float]:
        """One step; the loss between both sides, and the slope along the direction.

        Args:
            step: number of the step, from 0.
            loss: of the batch, the same on every rank.
            lr: learning rate.
        """
        require(step == len(self.moves), "step", step, expected=f"the next one, {len(self.moves)}")
        above, below = self.there_and_back(step, loss)
        slope = (above - below) / (2 * self._eps)
        self._move(step, -lr * slope)
        return (above + below) / 2, slope

    def step_method(self, trainer: RankTrainer) -> StepMethod:
        return partial(self._step, trainer)

    def _step(self, trainer: RankTrainer, step: TrainStep, rows: ReplicaSequences) -> None:
        """Two losses of a batch; the weights have moved when it returns."""
        engine, size = trainer.engine, trainer.microbatch
        shared = torch.zeros(2, dtype=torch.float64, device=trainer.device)

        def loss() -> float:
            shared.zero_()
            for at in range(0, len(rows.inputs), size):
                part = slice(at, at + size)
                shared[0] += engine.loss_sum(rows.inputs[part], rows.targets[part])
            shared[1] = float(step.stop)
            trainer.comm.all_reduce(shared, tag="loss").wait()
            return float(shared[0]) / step.count

        step.changing()
        with engine.around("step"), phase(trainer.comm, "forward"):
            lr = trainer.peak_lr * step.factor
            step.loss, slope = self.estimate(step.number, loss, lr)
        step.norm = torch.tensor(abs(slope), dtype=torch.float64)
        step.stop = float(shared[1]) > 0

    def merge(self, *, dequantise: bool = False) -> None:
        """Nothing: the weights are what was learned."""

    def unmerge(self) -> None:
        """Nothing."""

    def keep_merged(self) -> nn.Module:
        return self.model

    @torch.no_grad()
    def remove(self) -> None:
        """Give the base its weights back.

        Raises:
            ModelError: there is no copy of them.
        """
        if getattr(self, "moves", None):
            if self._copy is None:
                raise ModelError(
                    "finetune.mezo: no copy of the base was kept; read the model again, or give "
                    "keep_base: true"
                )
            for name, parameter in self._weights.items():
                parameter.copy_(self._copy[name])
            self.moves = []
        super().remove()

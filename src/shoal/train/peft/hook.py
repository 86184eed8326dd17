"""What a fine-tuning method does at the moments of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from shoal.ir.hooks import StepHook, TensorSource, TrainStep
from shoal.train.peft.arenas import Arenas
from shoal.train.watch.watched_comm import phase

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.train.loop import RankTrainer
    from shoal.train.peft.job import FineTuned


class FineTuneHook(StepHook):
    """Lets a method's handle take part in steps, and counts what their memory is for.

    Args:
        tuned: the model with the method in it.
        trainer: whose steps; the method may bring its own way from rows to gradients.
    """

    kind = "finetune"
    volatile = True  # methods change their buffers before a step as well as in its update

    def __init__(self, tuned: FineTuned, trainer: RankTrainer) -> None:
        assert tuned.handle is not None
        self._handle, self._tuned, self._trainer = tuned.handle, tuned, trainer
        self._arenas = Arenas(trainer.engine.local, self._handle)
        self._bytes: dict[str, int] = {}
        self._counted = False
        if self._handle.penalty() is not None:
            # What is added to the loss gives gradients after the last backward pass.
            trainer.engine.sharded.overlap = False
        trainer.method = self._handle.step_method(trainer)

    def before_step(self, step: TrainStep) -> None:
        """Before the first one the method may look at batches."""
        if self._handle.looks and step.number == 0:
            self._handle.look(self._look_at, self._sum)
        self._handle.before_step(step.number, step.total)

    def _look_at(self, number: int) -> None:
        """Gradients of a batch, by which no step is made."""
        trainer = self._trainer
        rows = trainer.source.read(number)
        trainer.engine.backward(rows, trainer.microbatch, trainer.source.count(rows))
        trainer.engine.finish()

    def _sum(self, x: Tensor) -> None:
        self._trainer.comm.all_reduce(x, tag="look").wait()

    def passes(self, what: str, *inputs: Tensor | None) -> AbstractContextManager[None]:
        """The first step is counted, byte by byte."""
        first = what == "step" and not self._counted
        return self._arenas.passes() if first else nullcontext()

    def after_backward(self, step: TrainStep) -> None:
        """Add the gradient of what the method adds to the loss; ranks share it."""
        penalty = self._handle.penalty()
        if penalty is not None:
            torch.autograd.backward(penalty / self._trainer.comm.world)

    def after_reduce(self, step: TrainStep) -> None:
        self._handle.before_update(step.number, step.total)

    def after_update(self, step: TrainStep) -> None:
        with phase(self._trainer.comm, "update"):
            self._handle.after_update(step.number, step.total)

    def published(self, step: TrainStep) -> None:
        """After the first step there is everything that takes memory."""
        if not self._counted:
            self._counted, self._bytes = True, self._arenas.bytes(step.state())

    def state(self) -> dict[str, Tensor]:
        """What the method needs beside parameters; every rank has the same."""
        if self._trainer.comm.rank:
            return {}
        return {f"finetune.{name}": value for name, value in self._handle.buffers().items()}

    def load(self, saved: TensorSource) -> None:
        self._handle.restore(lambda name: saved.tensor(f"finetune.{name}"))

    def identity(self) -> Mapping[str, Any]:
        chosen = self._trainer.job.finetune
        assert chosen is not None
        return {"finetune": chosen.model_dump(mode="json"), "base": self._tuned.base}

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        result, self._bytes = self._bytes, {}
        return {"arenas": result} if result else {}

"""The moments of a training step, and the hooks that techniques register for them.

``Trainer.step`` and the engine are a fixed skeleton. A technique that needs a moment of the step
overrides methods of :class:`StepHook`; the engine, the trainer or a user adds it to their one list.
On every rank, in this order::

    before_step     parameters are those of the last step; no rows are there
    passes          around the passes; gradients are of this rank's micro-batches, but for what a
                    sharding part sends during the last backward pass
    after_backward  all passes are made, and no collective of the reduction has begun
    finish          within Engine.finish: the replicas' gradients are summed, those that the ranks
                    of one replica share are not
    after_reduce    every gradient is the sum over all ranks; the norm is not known
    before_update   loss and norm are known and global; gradients are not clipped
    changing        once or several times, before these tensors of the saved state change
    after_update    parameters that this rank owns are updated and not yet published
    published       every rank sees every new parameter; the step is over

A method of the step without gradients makes its own update within ``passes`` and has no reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from shoal.core.hooks import Hook

if TYPE_CHECKING:
    from torch import Tensor

ORDER = (
    # What follows is recorded as of this step; a device that computes wrongly is refused first.
    "watch",
    # Changes modules and draws; before what keeps their weights and results, and around it.
    "finetune",
    # Weights come before the passes and go after them; what is saved of a pass goes before those.
    "offload",
    "activation",
    # Keeps what this pass saves of its own accord.
    "sequences",
    # Counts what the passes did; its gates learn when all experts are updated.
    "routers",
    "copies",
    "slices",
    # Waits for other ranks: after all that this rank does to its gradients alone.
    "memory",
    # Refuses a loss or a norm before anything is changed by it.
    "finite",
    # Waits for the copies of saved tensors before these change.
    "saves",
    # Workers agree on parameters where the experts lay in this round.
    "outer",
    # Experts move last, with all that the update has made of them.
    "owners",
)
"""Kinds of hooks, in the order in which they run at every moment; they close in reverse."""


class TensorSource(Protocol):
    """Where tensors are read from, box by box: a checkpoint, or other ranks."""

    def names(self) -> Collection[str]:
        """Every tensor's name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A box of a tensor; all of it if no box is given."""


@dataclass
class TrainStep:
    """What is known of a step so far, on one rank.

    Args:
        number: of the step, from 0.
        total: steps of the run.
        factor: of the peak learning rate.
        stop: a stop is requested; from ``before_update`` on, on all ranks that update together.
        record: the times of its passes are to be kept.
        state: parameter -> what the optimizer keeps of it, by name.
        changing: to be called before the saved state changes, by what updates during the passes.
        count: counted tokens of the batch.
        own: what this rank adds to the sum of token losses; None if unknown.
        loss: mean loss, from ``before_update`` on.
        norm: gradient norm before clipping, from ``before_update`` on.
    """

    number: int
    total: int
    factor: float = 1.0
    stop: bool = False
    record: bool = False
    state: Callable[[], Mapping[str, Mapping[str, Tensor]]] = dict
    changing: Callable[[], None] = lambda: None
    count: float = 1.0
    own: Tensor | None = None
    loss: float = 0.0
    norm: Tensor = field(init=False)

    @property
    def last(self) -> bool:
        """It is the last one of the run."""
        return self.number + 1 == self.total


class StepHook(Hook):
    """Does something at moments of the step; a hook overrides those that it needs.

    Attributes:
        volatile: its state changes outside of the update, too.
        settled: after this step all ranks have the same parameters, which can be saved.
        kept: parameters that no optimizer updates but this hook does, by name.
    """

    volatile: ClassVar[bool] = False
    settled: bool = True
    kept: Mapping[str, Tensor] = {}

    def before_step(self, step: TrainStep) -> None:
        """See the module."""

    def passes(self, what: str, *inputs: Tensor | None) -> AbstractContextManager[None]:
        """Around passes.

        Args:
            what: ``step``, all that a step computes up to its gradients; within it ``train``, the
                engine's passes with gradients; ``score``, forward passes alone, at any time.
            inputs: tensors made outside that the passes use.
        """
        return nullcontext()

    def after_backward(self, step: TrainStep) -> None:
        """See the module."""

    def finish(self) -> None:
        """See the module."""

    def after_reduce(self, step: TrainStep) -> None:
        """See the module."""

    def before_update(self, step: TrainStep) -> None:
        """See the module."""

    def changing(self, names: Collection[str] | None) -> None:
        """These tensors, by the names that they are saved under, are about to change; None: all."""

    def after_update(self, step: TrainStep) -> None:
        """See the module."""

    def published(self, step: TrainStep) -> None:
        """See the module."""

    def state(self) -> dict[str, Tensor]:
        """What this rank saves beside parameters and optimizer, by name; nothing is copied."""
        return {}

    def load(self, saved: TensorSource) -> None:
        """Take over the state; the parameters are loaded already.

        Raises:
            CheckpointError: it is missing, or of another job.
        """

    def identity(self) -> Mapping[str, Any]:
        """What a checkpoint of the model must agree with to be continued."""
        return {}

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """Event -> its fields, after a step; those of ``step`` go into the event of the step."""
        return {}

    def close(self) -> None:
        """End what runs, and give places back."""

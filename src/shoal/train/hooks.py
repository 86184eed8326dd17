"""The moments of a training run on one rank, and the hooks of what happens between its steps.

``run_rank`` is a fixed skeleton: begin, steps, finish. What a run does between two steps is a
:class:`RunHook` of its list; one that needs moments of the step itself is a
:class:`~shoal.ir.hooks.StepHook`, too, and is added to the trainer's list as well.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.core.hooks import Hook, Hooks
from shoal.ir.hooks import StepHook

if TYPE_CHECKING:
    from shoal.core.meter import Meter
    from shoal.corpora.tokens import TokenSet
    from shoal.ir import TrainPlan
    from shoal.parallel.comm.collectives import TorchComm
    from shoal.train.layout import RunDir
    from shoal.train.loop import RankTrainer, TrainStepResult
    from shoal.train.saving import RunSaver

RUN_ORDER = (
    # Reads what the runtime kept of the step, which evaluation and another plan overwrite.
    "timeline",
    # Reports the step as it was, before more is sent or takes memory.
    "events",
    # A copy in memory is there soon; a save that fails is no reason to be without it.
    "memory",
    # What is saved is what is then evaluated, and can be gone back to if that fails.
    "saves",
    "evaluate",
    # Last: what comes after it has another trainer.
    "replan",
)
"""Kinds of hooks of a run, in the order in which they run at every moment."""


class RunHook(Hook):
    """Does something at moments of a run; all ranks have the same hooks."""

    def begin(self, run: RankRun, first: int) -> None:
        """The state is loaded, and ``first`` is the first step."""

    def step_begins(self, run: RankRun, number: int) -> bool:
        """A step is about to begin; true asks for the times of its passes."""
        return False

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """A step is over, on all ranks."""

    def completed(self, run: RankRun) -> None:
        """The last step of the plan is done and saved."""


@dataclass
class RankRun:
    """Everything one rank holds while it trains."""

    directory: RunDir
    plan: TrainPlan
    meter: Meter
    comm: TorchComm
    tokens: TokenSet
    trainer: RankTrainer
    saves: RunSaver
    total: int
    peak_flops: float
    undo: contextlib.ExitStack
    hooks: Hooks[RunHook] = field(default_factory=lambda: Hooks(RUN_ORDER))

    @property
    def chief(self) -> bool:
        """This rank writes events, evaluation results and samples."""
        return self.comm.rank == 0

    def event(self, kind: str, **fields: Any) -> None:
        """Write an event, on the first rank."""
        if self.chief:
            self.meter.event(kind, **fields)

    def ends(self, number: int, result: TrainStepResult) -> bool:
        """No step follows this one."""
        return result.stop or number + 1 == self.total

    def add(self, hook: RunHook) -> None:
        """Add a hook, to the trainer's as well where it is one of the step."""
        self.hooks.add(hook)
        if isinstance(hook, StepHook):
            self.trainer.hooks.add(hook)

    def go_on(self, trainer: RankTrainer) -> None:
        """Make the following steps with another trainer."""
        self.trainer = trainer
        self.undo.enter_context(contextlib.closing(trainer))
        for hook in self.hooks:
            if isinstance(hook, StepHook):
                trainer.hooks.add(hook)

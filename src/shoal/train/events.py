"""The events of a run's steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.train.hooks import RankRun, RunHook
from shoal.train.mfu import step_flops

if TYPE_CHECKING:
    from shoal.train.loop import TrainStepResult


class EventsHook(RunHook):
    """Writes the events of a step, with those of the hooks, on the first rank."""

    kind = "events"

    def __init__(self) -> None:
        self._sent = 0.0

    def begin(self, run: RankRun, first: int) -> None:
        """Operations of a step are those of the plan."""
        self._flops = step_flops(run.plan)

    def step_begins(self, run: RankRun, number: int) -> bool:
        """Bytes are counted from here."""
        self._sent = _sent(run)
        return False

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """An event of the step, every so many steps, and those of hooks, at once."""
        if not run.chief:
            return
        events = run.trainer.events()
        step = events.pop("step")
        if number % run.plan.job.log_every == 0 or number + 1 == run.total:
            run.event(
                "step",
                step=number,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                step_s=result.seconds,
                tokens_per_s=result.tokens / result.seconds,
                mfu=self._flops / result.seconds / run.peak_flops,
                targets=result.targets,
                memory_bytes=run.trainer.memory_bytes(),
                wire_bytes=_sent(run) - self._sent,
                **step,
            )
        for kind, fields in events.items():
            run.event(kind, step=number, **fields)


def _sent(run: RankRun) -> float:
    """Bytes that this rank has sent so far."""
    totals = run.meter.totals()
    return sum(value for key, value in totals.items() if key.startswith("wire_bytes"))

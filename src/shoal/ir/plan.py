"""Jobs, plans and reports of every kind: what to do, how, what it costs, and what it did cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from shoal.core.config import Value
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits, html, rich_table
from shoal.ir.estimate import Estimate, Interval
from shoal.ir.job import TrainJob
from shoal.ir.job_kind import Job
from shoal.ir.machine import Machine
from shoal.ir.serve_job import ServeJob
from shoal.ir.shape import ModelShape

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

J = TypeVar("J", bound=Job)
P = TypeVar("P", bound="Plan[Any]")


class Work(Value):
    """One step of a job as the cost model sees it, which every part's ``estimate`` reads.

    Args:
        shape: the model.
        job: the job with every choice made, its microbatch included.
    """

    shape: ModelShape
    job: TrainJob


class Plan(Value, Generic[J]):
    """A job with every choice made, the machine it is for, and what it will cost.

    A plan can be written by hand: it predicts nothing then.

    Args:
        job: the concrete job; running the plan is running this job.
        machine: the machine the prediction holds for.
        estimate: predicted cost of a step by cause, where the job has steps.
        predicted: quantity -> interval, under the names of the kind's quantities.
        planner: name of the part that made the plan.
        fits: whether the memory is enough.
        why: reason for this plan, in a sentence, and what the bottleneck is.
        notes: what a reader should know, such as parts that cannot run here yet.
    """

    job: J
    machine: Machine
    estimate: Estimate | None = None
    predicted: dict[str, Interval] = {}
    planner: str = ""
    fits: bool = True
    why: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        from shoal.ir.job_kind import kind_of

        words = [kind_of(self).describe(self)]
        if self.estimate is not None:
            step, unit = self.estimate.step_s, "s"
            if step.value < 1:
                step, unit = step.scaled(1e3), "ms"
            value, low, high = map(digits, (step.value, step.low, step.high))
            words.append(f"step {value} {unit} ({low} to {high})")
            words.append(f"{human_bytes(self.estimate.memory_total)} per rank")
        fits = "" if self.fits else ", does not fit"
        return f"<{self.job.job} plan on {self.machine.name}: {', '.join(words)}{fits}>"

    def __str__(self) -> str:
        return repr(self)


class ModelPlan(Plan[J], Generic[J]):
    """The plan of a job whose cost follows from the shape of a model.

    Args:
        shape: the model's shape.
    """

    shape: ModelShape


class Report(Value, Generic[P]):
    """Measurement beside prediction.

    Args:
        plan: what was planned.
        measured: quantity -> value, under the names and in the units of the kind's quantities.
        errors: quantity -> measured / predicted - 1.
        details: what else the run measured, by name, as JSON.
        versions: package -> version.
        device: kind of device it was measured on, cpu or gpu; empty where not recorded.
            Measured on another kind than was planned for, it says nothing about the prediction.
    """

    plan: P
    measured: dict[str, float]
    errors: dict[str, float] = {}
    details: dict[str, Any] = {}
    versions: dict[str, str] = {}
    device: Literal["", "cpu", "gpu"] = ""

    def table(self) -> Table:
        """What was measured beside what was predicted, as people read it."""
        from shoal.ir.job_kind import compared

        job = self.plan.job
        return Table(
            title=f"{job.job} {job.name} on {self.plan.machine.name}",
            columns=("", "predicted", "measured", "error"),
            rows=tuple(compared(self)),
            right=" rrr",
        )

    def __repr__(self) -> str:
        return f"<report of {self.table().title}: {len(self.measured)} quantities measured>"

    def __str__(self) -> str:
        return repr(self)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        yield rich_table(self.table())

    def _repr_html_(self) -> str:
        return html(self.table())


class TrainPlan(ModelPlan[TrainJob]):
    """A training job's plan: its estimate is of one optimizer step.

    Args:
        minutes: wall time that the number of steps was taken from; None where the job names its
            length in steps or tokens.
    """

    minutes: float | None = None


class TrainReport(Report[TrainPlan]):
    """A training run's report."""


class ServePlan(ModelPlan[ServeJob]):
    """A serving job's plan.

    Its estimate is of one full decode step; it predicts, over the whole workload,
    ``tokens_per_s`` (output), ``requests_per_s``, ``total_s``, and of ``ttft``, ``tpot`` and
    ``e2e`` the mean and percentiles: ``ttft_mean_s``, ``ttft_p50_s``, ``ttft_p95_s``,
    ``ttft_p99_s``.
    """


class ServeReport(Report[ServePlan]):
    """A served workload's report."""

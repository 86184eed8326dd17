"""The job ``coded_training``: full-batch gradients from workers that are slow at times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.federate.coded.job import CodedJob, CodedPlan, CodedReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class CodedKind(KindHere):
    """Train models in turn by full-batch gradients, without waiting for slow workers."""

    summary: ClassVar = "train models by full-batch gradients without waiting for slow workers"
    job_type: ClassVar = CodedJob
    plan_type: ClassVar = CodedPlan
    report_type: ClassVar = CodedReport
    subject: ClassVar = "data"
    example: ClassVar = {
        "data": "wine",
        "learner": "logistic",
        "workers": 4,
        "models": 2,
        "gradients": 6,
    }
    flags: ClassVar = (
        Flag(name="learner", path="learner", help="The model: logistic, mlp, cnn_digits."),
        Flag(name="scheme", path="scheme", help="uncoded, gc, sr_sgc, m_sgc."),
        Flag(name="workers", path="workers", help="Processes that compute gradients."),
        Flag(name="models", path="models", help="Models trained in turn."),
        Flag(name="gradients", path="gradients", help="Steps of all models together."),
        Flag(name="log", path="log", help="File of workers' times to pick a scheme from."),
        Flag(name="mu", path="mu", help="Waiting limit, relative to the fastest worker."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("round_s", "  of a round", "ms"),
        Quantity.of_share("load", "data that a worker processes", "lower"),
        Quantity.of_share("waited", "rounds that waited for slow workers", "lower"),
        Quantity.of_share("accuracy", "accuracy, mean of the models", "higher"),
        Quantity(name="loss", label="loss, mean of the models", better="lower"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: CodedJob, machine: Machine) -> Sequence[CodedPlan]:
        """Each scheme with the options that take the least time."""
        from shoal.fields.federate.coded.planning import plan_coded

        return plan_coded(job, machine)

    def work(self, plan: CodedPlan) -> Callable[[RunProgress], RunOutcome]:
        """Train with processes of this machine."""
        from shoal.fields.federate.coded.execute import execute

        require_extra("torch", purpose="coded training")
        return partial(execute, plan)

    def describe(self, plan: CodedPlan) -> str:
        """The scheme with its options, load and delay."""
        return plan.why

    def results(self, report: CodedReport, directory: Path) -> Sequence[Table | str]:
        """The models, and what lies where."""
        rows = tuple(
            (f"model {at}", f"{one['accuracy']:.1%}", f"{one['loss']:.3g}")
            for at, one in enumerate(report.details.get("models", []))
        )
        shown = Table(title="models", columns=("", "accuracy", "loss"), rows=rows, right=" rr")
        return [
            shown,
            f"models: {directory / 'models.safetensors'}",
            f"times of workers: {directory / 'worker_times.json'}; pick a scheme for such workers "
            "with shoal plan coded_training --log FILE",
        ]

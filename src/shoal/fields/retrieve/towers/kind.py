"""The job ``train_towers``: encoders of queries and documents for retrieval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere, method_of
from shoal.fields.retrieve.towers.job import TrainTowersJob, TrainTowersPlan, TrainTowersReport
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class TrainTowersKind(KindHere):
    """Train a tower for queries and one for documents, and measure what they retrieve."""

    summary: ClassVar = "train encoders of queries and documents for retrieval"
    job_type: ClassVar = TrainTowersJob
    plan_type: ClassVar = TrainTowersPlan
    report_type: ClassVar = TrainTowersReport
    subject: ClassVar = "data"
    example: ClassVar = {
        "data": "docstrings:email", "large": "2x64", "small": "1x32", "vocab": 400, "held": 8,
        "batch": 16, "epochs": 1, "precision": "fp32",
    }  # fmt: skip
    flags: ClassVar = (
        Flag(name="method", path="method", help="two_stage or end_to_end."),
        Flag(name="large", path="large", help="Large towers: S, M, L, LAYERSxWIDTH, a directory."),
        Flag(name="small", path="small", help="Small towers."),
        Flag(name="epochs", path="epochs", help="Passes over the pairs."),
        Flag(name="batch", path="batch", help="Pairs per step."),
        Flag(name="ranks", path="ranks", help="Processes that share each batch."),
        Flag(name="threads", path="threads", help="Threads of each process."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="train_s", label="time to learn", unit="s", better="lower", headline=True),
        Quantity.of_time("query_s", "time to encode a query", "ms"),
        Quantity.of_share("recall", "answers among k", "higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: TrainTowersJob, machine: Machine) -> Sequence[TrainTowersPlan]:
        """Both ways; two stages before one, which is quicker and retrieves less."""
        from shoal.fields.retrieve.towers.planning import plan_towers

        require_extra("torch", purpose="training text towers")
        return plan_towers(job, machine)

    def work(self, plan: TrainTowersPlan) -> Callable[[RunProgress], RunOutcome]:
        """Train and judge, in this process or on the ranks of the job."""
        from shoal.fields.retrieve.towers.execute import execute

        require_extra("torch", purpose="training text towers")
        return partial(execute, plan.job, method_of(plan))

    def describe(self, plan: TrainTowersPlan) -> str:
        """The way with its options."""
        return str(plan.job.method or "no method")

    def results(self, report: TrainTowersReport, directory: Path) -> Sequence[Table | str]:
        """Where the towers lie, and what a distilled query tower keeps."""
        details = report.details
        lines = [
            f"towers:    {directory / 'towers'}",
            f"documents: {directory / 'documents.npy'}, sha256 {details.get('index', '')[:16]}",
        ]
        if "teacher_recall" in details:
            lines.append(
                f"recall of the large query tower: {details['teacher_recall']:.1%}; answers that "
                f"are surely the same: {details['surely_same']:.1%}; mean bound of a score's "
                f"change: {details['mean_bound']:.3f}"
            )
        return lines

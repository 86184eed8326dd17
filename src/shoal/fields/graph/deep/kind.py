"""The job ``train_deep_gnn``: a deep graph network on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.graph.deep.job import TrainDeepGnnJob, TrainDeepGnnPlan, TrainDeepGnnReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class TrainDeepGnnKind(KindHere):
    """Train a deep graph network on ranks that share its layers, its nodes, or both."""

    summary: ClassVar = "train a deep graph network on several ranks"
    job_type: ClassVar = TrainDeepGnnJob
    plan_type: ClassVar = TrainDeepGnnPlan
    report_type: ClassVar = TrainDeepGnnReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "planted:400", "epochs": 3, "layers": 4, "ranks": 2, "hidden": 8}
    flags: ClassVar = (
        Flag(name="split", path="split", help="How ranks share the network, such as pipe."),
        Flag(name="ranks", path="ranks", help="Processes, each with one thread."),
        Flag(name="layers", path="layers", help="Convolutions."),
        Flag(name="labels", path="labels", help="A file of ids and labels."),
        Flag(name="epochs", path="epochs", help="Steps, each over the whole graph."),
        Flag(name="runs", path="runs", help="Training runs, each with its own seed."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="epoch_s", label="time of an epoch", unit="s", better="lower", headline=True),
        Quantity.of_time("train_s", "time to train"),
        Quantity.of_bytes("sent_bytes", "bytes between ranks, an epoch"),
        Quantity.of_share("val_accuracy", "validation accuracy", "higher"),
        Quantity.of_share("test_accuracy", "test accuracy", "higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: TrainDeepGnnJob, machine: Machine) -> Sequence[TrainDeepGnnPlan]:
        """Every split, the fastest first."""
        from shoal.fields.graph.deep.planning import plan_deep

        return plan_deep(job, machine)

    def work(self, plan: TrainDeepGnnPlan) -> Callable[[RunProgress], RunOutcome]:
        """Train on processes of this machine."""
        from shoal.fields.graph.deep.execute import execute

        require_extra("torch", purpose="training a deep graph network")
        return partial(execute, plan.job, plan.grid)

    def describe(self, plan: TrainDeepGnnPlan) -> str:
        """The split with its options."""
        return str(plan.job.split or "no split")

    def results(self, report: TrainDeepGnnReport, directory: Path) -> Sequence[Table | str]:
        """The accuracies of each seed, and what lies where."""
        details = report.details
        table = Table(
            title="networks",
            columns=("seed", "validation", "test", "best epoch"),
            rows=tuple(
                (str(one["seed"]), f"{one['val']:.1%}", f"{one['test']:.1%}", str(one["epoch"]))
                for one in details["seeds"]
            ),
            right="rrrr",
        )
        files = ", ".join(str(directory / name) for name in details["files"])
        common = f"{details['most_common']:.1%} of the test nodes have the most common class"
        return [table, common, f"files: {files}"]

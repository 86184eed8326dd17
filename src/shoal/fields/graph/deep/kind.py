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
from shoal.fields.graph.gnn.kind import network_results
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class TrainDeepGnnKind(KindHere):
    """Train a deep graph network on ranks that share its layers, its nodes, or both."""

    summary: ClassVar = "train a deep graph network on several ranks"
    job_type: ClassVar = TrainDeepGnnJob
    plan_type: ClassVar = TrainDeepGnnPlan
    report_type: ClassVar = TrainDeepGnnReport
    planner: ClassVar = "shoal.fields.graph.deep.planning:plan_deep"
    chooses: ClassVar = "split"
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

    def work(self, plan: TrainDeepGnnPlan) -> Callable[[RunProgress], RunOutcome]:
        from shoal.fields.graph.deep.execute import execute

        require_extra("torch", purpose="training a deep graph network")
        return partial(execute, plan.job, plan.grid)

    def results(self, report: TrainDeepGnnReport, directory: Path) -> Sequence[Table | str]:
        """The accuracies of each seed, and what lies where."""
        return network_results(report.details, directory)

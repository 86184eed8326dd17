"""The job ``train_gnn``: a graph neural network that assigns nodes to classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.graph.gnn.job import TrainGnnJob, TrainGnnPlan, TrainGnnReport
from shoal.fields.kinds import KindHere, method_of
from shoal.ir import Flag, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class TrainGnnKind(KindHere):
    """Train a graph neural network on the nodes of a graph that have labels."""

    summary: ClassVar = "train a graph neural network that assigns nodes to classes"
    job_type: ClassVar = TrainGnnJob
    plan_type: ClassVar = TrainGnnPlan
    report_type: ClassVar = TrainGnnReport
    planner: ClassVar = "shoal.fields.graph.gnn.planning:plan_gnn"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "planted:1000", "epochs": 5}
    flags: ClassVar = (
        Flag(name="aggregator", path="aggregator", help="How neighbours are pooled, such as lcm."),
        Flag(name="labels", path="labels", help="A file of ids and labels."),
        Flag(name="epochs", path="epochs", help="Passes over the training nodes."),
        Flag(name="neighbours", path="neighbours", help="Maximum neighbours sampled per node."),
        Flag(name="features", path="features", help="A .npy of the features of all nodes."),
        Flag(name="placement", path="placement", help="How features of a batch are gathered."),
        Flag(name="runs", path="runs", help="Training runs, each with its own seed."),
        Flag(name="threads", path="threads", help="Number of threads."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="epoch_s", label="time of an epoch", unit="s", better="lower", headline=True),
        Quantity.of_time("train_s", "time to train, validation included"),
        Quantity.of_share("val_accuracy", "validation accuracy", "higher"),
        Quantity.of_share("test_accuracy", "test accuracy", "higher"),
        Quantity.of_bytes("memory_bytes", "memory"),
        Quantity.of_bytes("host_bytes", "features moved by the host's memory in an epoch"),
    )

    def work(self, plan: TrainGnnPlan) -> Callable[[RunProgress], RunOutcome]:
        from shoal.fields.graph.gnn.execute import execute

        require_extra("torch", purpose="training a graph neural network")
        # Steps over the whole graph gather nothing.
        placement = method_of(plan, "placement") if plan.job.fanouts else None
        return partial(execute, plan.job, method_of(plan, "aggregator"), placement)

    def describe(self, plan: TrainGnnPlan) -> str:
        """The aggregator with its options, and where features of batches come from."""
        named = str(plan.job.aggregator or "no aggregator")
        return f"{named}, features {plan.job.placement}" if plan.job.placement else named

    def results(self, report: TrainGnnReport, directory: Path) -> Sequence[Table | str]:
        """The accuracies of each seed, and what lies where."""
        return network_results(report.details, directory)


def network_results(details: Mapping[str, Any], directory: Path) -> list[Table | str]:
    """The accuracies of each seed, and what lies where, of the details of a report."""
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

"""The job ``train_experts``: a generative model from data that lies on islands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.federate.ddm.job import TrainExpertsJob, TrainExpertsPlan, TrainExpertsReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class TrainExpertsKind(KindHere):
    """Train a generative model as experts on clusters of the data, with nothing sent between."""

    summary: ClassVar = "train a generative model as experts on clusters of the data"
    job_type: ClassVar = TrainExpertsJob
    plan_type: ClassVar = TrainExpertsPlan
    report_type: ClassVar = TrainExpertsReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "digits", "width": 32, "depth": 1, "steps": 20, "batch": 64}
    flags: ClassVar = (
        Flag(name="method", path="method", help="experts or monolith."),
        Flag(name="mixture", path="mixture", help="Sampler: full, top1, topm or sample."),
        Flag(name="steps", path="steps", help="Optimizer steps."),
        Flag(name="batch", path="batch", help="Samples per step, shared by the experts."),
        Flag(name="width", path="width", help="Width of a network's layers."),
        Flag(
            name="distill", path="distill", help="Steps of a student of the ensemble; 0 for none."
        ),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("train_s", "  of training"),
        Quantity.of_bytes("network_bytes", "bytes between processes"),
        Quantity.of_bytes("gradient_bytes", "bytes of a monolith's gradients on as many ranks"),
        Quantity.of_bytes("shard_bytes", "bytes sent to islands before"),
        Quantity.of_bytes("memory_bytes", "memory of a process"),
        Quantity(name="loss", label="validation loss", better="lower"),
        Quantity(name="student_loss", label="validation loss of the student", better="lower"),
        Quantity(name="frechet", label="Fréchet distance to the data", better="lower"),
        Quantity.of_share("imbalance", "largest cluster above the mean", "lower"),
    )

    def plan(self, job: TrainExpertsJob, machine: Machine) -> Sequence[TrainExpertsPlan]:
        """Experts and one model in the ways they offer, the shortest first."""
        from shoal.fields.federate.ddm.planning import plan_experts

        return plan_experts(job, machine)

    def work(self, plan: TrainExpertsPlan) -> Callable[[RunProgress], RunOutcome]:
        """Train with processes of this machine."""
        from shoal.fields.federate.ddm.execute import execute

        require_extra("torch", purpose="training experts")
        return partial(execute, plan)

    def describe(self, plan: TrainExpertsPlan) -> str:
        """The method."""
        return str(plan.job.method or "no method")

    def results(self, report: TrainExpertsReport, directory: Path) -> Sequence[Table | str]:
        """Islands, and where the samples lie."""
        failed: dict[str, str] = report.details.get("failed", {})
        rows = tuple(
            (str(at), f"{size:,}", failed.get(f"islands/{at}", "trained"))
            for at, size in enumerate(report.details.get("sizes", []))
        )
        islands = Table(
            title="islands", columns=("island", "samples", "state"), rows=rows, right="rr "
        )
        files = report.details.get("files", [])
        return [islands, *(f"{name.partition('.')[0]}: {directory / name}" for name in files)]

"""The job ``federate``: train one model on the data of many clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.config import Kind
from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.federate.job import FederateJob, FederatePlan, FederateReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.federate.follow import FederationFollower
    from shoal.fields.running import RunOutcome, RunProgress

# Clients of the table.
_SHOWN = 10


@part
class FederateKind(KindHere):
    """Train one model on the data of many clients, which stays where it is."""

    summary: ClassVar = "train one model on data that stays on many clients"
    job_type: ClassVar = FederateJob
    plan_type: ClassVar = FederatePlan
    report_type: ClassVar = FederateReport
    subject: ClassVar = "data"
    emits: ClassVar = Kind("federation_emitter")
    example: ClassVar = {"data": "wine", "learner": "logistic", "clients": "3", "rounds": 2}
    flags: ClassVar = (
        Flag(name="clients", path="clients", help="How many, such as 5 or 10xLaptop@20Mbit."),
        Flag(name="learner", path="learner", help="The model: logistic, mlp, cnn_digits."),
        Flag(
            name="partition", path="partition", help="Split of the data: iid, class_k, dirichlet."
        ),
        Flag(name="speeds", path="speeds", help="equal, normal, exponential, or factors."),
        Flag(name="algorithm", path="algorithm", help="When clients train, such as fedavg."),
        Flag(name="rounds", path="rounds", help="Length of the run, in rounds of all clients."),
        Flag(name="target", path="target", help="Accuracy at which the run ends."),
        Flag(name="clock", path="clock", help="wall or virtual."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("round_s", "  of a round's work"),
        Quantity.of_time("target_s", "time to the target"),
        Quantity.of_bytes("up_bytes", "bytes to the server"),
        Quantity.of_bytes("down_bytes", "bytes to clients"),
        Quantity.of_share("accuracy", "accuracy", "higher"),
        Quantity.of_share("best_accuracy", "best accuracy", "higher"),
        Quantity.of_share("worst_client", "accuracy of the worst client", "higher"),
        Quantity(name="loss", label="loss", better="lower"),
        Quantity(name="staleness", label="staleness", unit="versions", better="lower"),
        Quantity(name="epsilon", label="privacy, epsilon", better="lower"),
        Quantity(name="delta", label="  that it fails, delta", better="lower"),
        Quantity(name="versions", label="versions"),
        Quantity.of_share("idle", "clients' time spent waiting", "lower"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: FederateJob, machine: Machine) -> Sequence[FederatePlan]:
        """Every scheduler in every way it offers, the shortest run first."""
        from shoal.fields.federate.planning import plan_federate

        return plan_federate(job, machine)

    def work(self, plan: FederatePlan) -> Callable[[RunProgress], RunOutcome]:
        """Train with processes of this machine, or on a virtual clock."""
        from shoal.fields.federate.execute import execute

        require_extra("torch", purpose="a federation")
        return partial(execute, plan)

    def follow(self) -> FederationFollower:
        """What the page of a run shows."""
        from shoal.fields.federate.follow import FederationFollower

        return FederationFollower()

    def describe(self, plan: FederatePlan) -> str:
        """The algorithm."""
        return str(plan.job.algorithm or "no algorithm")

    def results(self, report: FederateReport, directory: Path) -> Sequence[Table | str]:
        """Clients, the worst first."""
        clients = report.details.get("clients", [])
        worst = sorted(clients, key=lambda one: one["accuracy"])[:_SHOWN]
        rows = tuple(
            (one["name"], f"{one['samples']:,}", f"{one['accuracy']:.1%}") for one in worst
        )
        table = Table(
            title=f"the worst of {len(clients)} clients",
            columns=("client", "examples", "accuracy"),
            rows=rows,
            right=" rr",
        )
        notes = [report.details[key] for key in ("missed", "ended") if key in report.details]
        said = (
            f"model: {directory / 'model.safetensors'}",
            f"timeline: {directory / 'timeline.svg'}",
            f"accuracy: {directory / 'accuracy.svg'}",
        )
        return [table, *notes, *said]

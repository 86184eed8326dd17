"""The job ``gossip``: train on nodes that talk to their neighbours, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.federate.gossip.job import GossipJob, GossipPlan, GossipReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Nodes of the table.
_SHOWN = 10


@part
class GossipKind(KindHere):
    """Train on nodes that talk to their neighbours on a graph, without a server."""

    summary: ClassVar = (
        "train on nodes that exchange models with their neighbours, without a server"
    )
    job_type: ClassVar = GossipJob
    plan_type: ClassVar = GossipPlan
    report_type: ClassVar = GossipReport
    subject: ClassVar = "data"
    example: ClassVar = {
        "data": "wine", "learner": "logistic", "nodes": "8", "rounds": 2
    }  # fmt: skip
    flags: ClassVar = (
        Flag(name="nodes", path="nodes", help="How many, such as 8 or 10xLaptop@20Mbit."),
        Flag(name="learner", path="learner", help="The model: logistic, mlp, cnn_digits."),
        Flag(
            name="partition", path="partition", help="Split of the data: iid, class_k, dirichlet."
        ),
        Flag(name="topology", path="topology", help="Graph of neighbours, such as ring_k."),
        Flag(name="policy", path="policy", help="What is sent, such as variance_corrected."),
        Flag(name="rounds", path="rounds", help="Length of the run."),
        Flag(name="target", path="target", help="Mean accuracy at which the run ends."),
        Flag(name="clock", path="clock", help="wall or virtual."),
        Flag(name="hosts", path="hosts", help="Processes that nodes are assigned to."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("round_s", "  of a round"),
        Quantity.of_time("target_s", "time to the target"),
        Quantity.of_bytes("sent_bytes", "bytes that nodes send"),
        Quantity(name="messages", label="messages", better="lower"),
        Quantity.of_share("accuracy", "mean accuracy", "higher"),
        Quantity.of_share("worst_node", "accuracy of the worst node", "higher"),
        Quantity(name="loss", label="mean loss", better="lower"),
        Quantity(name="disagreement", label="disagreement of nodes", better="lower"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def plan(self, job: GossipJob, machine: Machine) -> Sequence[GossipPlan]:
        """The job as it is: the policy changes the result, so none is put in another's place."""
        from shoal.fields.federate.gossip.planning import plan_gossip

        return [plan_gossip(job, machine)]

    def work(self, plan: GossipPlan) -> Callable[[RunProgress], RunOutcome]:
        """Train with processes of this machine, or on a virtual clock."""
        from shoal.fields.federate.gossip.execute import execute

        require_extra("torch", purpose="gossip")
        return partial(execute, plan)

    def describe(self, plan: GossipPlan) -> str:
        """Policy and topology."""
        return f"{plan.job.policy} on {plan.job.topology}"

    def results(self, report: GossipReport, directory: Path) -> Sequence[Table | str]:
        """Nodes, the worst first."""
        nodes = report.details.get("nodes", [])
        worst = sorted(nodes, key=lambda one: one["accuracy"])[:_SHOWN]
        rows = tuple(
            (one["name"], f"{one['samples']:,}", f"{one['accuracy']:.1%}", f"{one['count']:,}")
            for one in worst
        )
        table = Table(
            title=f"the worst of {len(nodes)} nodes",
            columns=("node", "examples", "accuracy", "rounds or gradients"),
            rows=rows,
            right=" rrr",
        )
        said = [report.details[key] for key in ("missed", "dropped") if report.details.get(key)]
        return [table, *said, f"model: {directory / 'model.safetensors'}, the mean of all nodes"]

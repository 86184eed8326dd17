"""The job ``embed_nodes``: vectors of the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.graph.embedding.job import EmbedNodesJob, EmbedNodesPlan, EmbedNodesReport
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress

# Counts of a report, with how they are called.
_COUNTS = {
    "num_nodes": "nodes",
    "nnz": "entries of the adjacency matrix",
    "isolated": "nodes without neighbours",
    "self_loops": "self-loops, left out",
    "duplicate_edges": "duplicate edges, merged",
    "train": "nodes that train the classifier",
    "test": "nodes that test it",
}


@part
class EmbedNodesKind(KindHere):
    """Make vectors of the nodes of a graph, and measure what they say about labels."""

    summary: ClassVar = "make vectors of the nodes of a graph"
    job_type: ClassVar = EmbedNodesJob
    plan_type: ClassVar = EmbedNodesPlan
    report_type: ClassVar = EmbedNodesReport
    planner: ClassVar = "shoal.fields.graph.embedding.planning:plan_embedding"
    executor: ClassVar = "shoal.fields.graph.embedding.execute:execute"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "planted:2000"}
    flags: ClassVar = (
        Flag(name="method", path="method", help="The embedder, fastrp or deepwalk."),
        Flag(name="labels", path="labels", help="A file of ids and labels; section or tags."),
        Flag(name="train_share", path="train_share", help="Share of the labels to train on."),
        Flag(name="threads", path="threads", help="Number of threads."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="embed_s", label="time to embed", unit="s", better="lower", headline=True),
        Quantity.of_time("read_s", "time to read"),
        Quantity.of_share("micro_f1", "Micro-F1", "higher"),
        Quantity.of_share("macro_f1", "Macro-F1", "higher"),
        Quantity.of_bytes("vector_bytes", "vectors"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def work(self, plan: EmbedNodesPlan) -> Callable[[RunProgress], RunOutcome]:
        """Embed and measure in this process."""
        job = plan.job
        if job.labels or job.data.partition(":")[0] in ("packages", "planted"):
            require_extra("sklearn", purpose="testing vectors on labels")
        return super().work(plan)

    def results(self, report: EmbedNodesReport, directory: Path) -> Sequence[Table | str]:
        """What was counted, and what lies where."""
        details = report.details
        table = Table(
            title="nodes and edges",
            columns=("what", "how many"),
            rows=tuple(
                (said, f"{details[name]:,}") for name, said in _COUNTS.items() if name in details
            ),
            right="lr",
        )
        files = ", ".join(str(directory / name) for name in details.get("files", []))
        return [table, f"vectors: {files}", f"picture: {directory / 'map.svg'}"]

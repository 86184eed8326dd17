"""The job ``communities``: who belongs to some vertices of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.graph.communities.job import (
    CommunitiesJob,
    CommunitiesPlan,
    CommunitiesReport,
)
from shoal.fields.kinds import KindHere
from shoal.ir import Flag, Quantity

# Members that are listed.
_LISTED = 30


@part
class CommunitiesKind(KindHere):
    """Find communities around vertices of a graph, by signatures of their neighbours."""

    summary: ClassVar = "find the communities of given vertices of a graph"
    job_type: ClassVar = CommunitiesJob
    plan_type: ClassVar = CommunitiesPlan
    report_type: ClassVar = CommunitiesReport
    planner: ClassVar = "shoal.fields.graph.communities.planning:plan_communities"
    executor: ClassVar = "shoal.fields.graph.communities.execute:execute"
    subject: ClassVar = "data"
    example: ClassVar = {"data": "planted:2000", "threshold": 0.02, "queries": 20}
    flags: ClassVar = (
        Flag(name="seeds", path="seeds", help="Vertices of one query, such as vim,emacs."),
        Flag(name="size", path="size", help="Vertices of a community, seeds included."),
        Flag(name="method", path="method", help="mean_similarity, agglomerative or pagerank."),
        Flag(name="labels", path="labels", help="A file of ids and labels; section or tags."),
        Flag(name="hashes", path="hashes", help="Slots of a signature."),
        Flag(name="threshold", path="threshold", help="Similarity of candidates."),
        Flag(name="serve_port", path="serve_port", help="Port of the explorer, until Ctrl-C."),
        Flag(name="threads", path="threads", help="Number of threads."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(
            name="query_s", label="time of a query (p95)", unit="s", better="lower", headline=True
        ),
        Quantity.of_time("median_s", "time of a query (median)"),
        Quantity.of_time("build_s", "time to build"),
        Quantity.of_time("read_s", "time to read"),
        Quantity.of_share("overlap", "overlap with exact answers", "higher"),
        Quantity.of_share("label_share", "added with the seeds' label", "higher"),
        Quantity.of_bytes("index_bytes", "signatures and bands"),
        Quantity.of_bytes("memory_bytes", "memory"),
    )

    def results(self, report: CommunitiesReport, directory: Path) -> Sequence[Table | str]:
        """Members of the first community, and what lies where."""
        details = report.details
        groups = details["groups"]
        seeds = [(str(one), "seed") for one in details["seeds"]]
        added = [
            (str(one), f"{score:.4f}")
            for one, score in zip(details["added"], details["scores"], strict=True)
        ]
        rows = [(*row, str(group)) for row, group in zip([*seeds, *added], groups, strict=True)][
            :_LISTED
        ]
        title = f"the first {len(rows)} of {len(groups)} members"
        table = Table(
            title=title, columns=("vertex", "score", "group"), rows=tuple(rows), right="lrr"
        )
        return [
            table,
            f"signatures: {directory / 'signatures'}, {details['vertices']:,} vertices; "
            f"{details['unsigned']:,} have too few neighbours",
            f"picture: {directory / 'community.svg'}",
        ]

"""The job ``rank_peers``: documents ranked by clicks that peers pass on, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from shoal.core.extras import require_extra
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.fields.kinds import KindHere
from shoal.fields.retrieve.grank.job import RankPeersJob, RankPeersPlan, RankPeersReport
from shoal.ir import Flag, Machine, Quantity

if TYPE_CHECKING:
    from shoal.fields.running import RunOutcome, RunProgress


@part
class RankPeersKind(KindHere):
    """Rank documents by the clicks of peers, without a server."""

    summary: ClassVar = "rank documents by the clicks of peers, without a server"
    job_type: ClassVar = RankPeersJob
    plan_type: ClassVar = RankPeersPlan
    report_type: ClassVar = RankPeersReport
    subject: ClassVar = "data"
    example: ClassVar = {"data": "packages", "peers": 2, "clicks": 20}
    flags: ClassVar = (
        Flag(name="method", path="method", help="grank, bm25 or popularity."),
        Flag(name="peers", path="peers", help="Processes, each with one user."),
        Flag(name="clicks", path="clicks", help="Clicks after which the run ends."),
        Flag(name="period", path="period_s", help="Seconds between exchanges of a peer."),
        Flag(name="seed", path="seed", help="Random seed."),
    )
    quantities: ClassVar = (
        Quantity(name="total_s", label="time", unit="s", better="lower", headline=True),
        Quantity.of_time("query_s", "time of a query", "ms"),
        Quantity.of_time("p95_query_s", "time of a query, 95th percentile", "ms"),
        Quantity.of_bytes("network_bytes", "bytes between peers"),
        Quantity(name="ndcg", label="NDCG@10", better="higher"),
        Quantity(name="mrr", label="MRR@10", better="higher"),
        Quantity(name="ndcg_bm25", label="NDCG@10 of BM25"),
        Quantity(name="ndcg_popularity", label="NDCG@10 of popularity"),
        Quantity(name="ndcg_pooled", label="NDCG@10 with one log of all"),
        Quantity(name="ndcg_offline", label="NDCG@10 of peers that were offline"),
        Quantity(name="ndcg_rejoined", label="NDCG@10 of the same peers, online again"),
        Quantity.of_bytes("memory_bytes", "memory of a process"),
    )

    def plan(self, job: RankPeersJob, machine: Machine) -> Sequence[RankPeersPlan]:
        """One plan: the job says how peers rank."""
        from shoal.fields.retrieve.grank.planning import plan_peers

        return [plan_peers(job, machine)]

    def work(self, plan: RankPeersPlan) -> Callable[[RunProgress], RunOutcome]:
        """Start peers on this machine, and their users."""
        from shoal.fields.retrieve.grank.execute import execute

        require_extra("sklearn", purpose="finding groups of interest")
        return partial(execute, plan)

    def describe(self, plan: RankPeersPlan) -> str:
        """The ranker and the number of peers."""
        return f"{plan.job.method}, {plan.job.peers} peers"

    def results(self, report: RankPeersReport, directory: Path) -> Sequence[Table | str]:
        """Rankings as clicks accumulate."""
        rows = tuple(
            (f"{row['clicks']:,.0f}", f"{row['ndcg']:.3f}", f"{row['mrr']:.3f}")
            for row in report.details.get("curve", [])
        )
        curve = Table(
            title="rankings on held-out clicks",
            columns=("clicks", "NDCG@10", "MRR@10"),
            rows=rows,
            right="rrr",
        )
        sybils = report.details.get("sybils", {})
        needed = ", ".join(f"{count:,} ({who})" for who, count in sybils.items())
        lines = [f"invented peers that move a document to the top: {needed}"] if sybils else []
        return [curve, *lines, f"picture: {directory / 'curve.svg'}"]

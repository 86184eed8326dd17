"""[32] G-Rank: do gossiped clicks rank better than text, with no server and no training?

Source: Gold and Pouwelse, G-Rank: Unsupervised Continuous Learn-to-Rank for Edge Devices in a P2P
Network, 2023.

Eight processes with one user each rank the descriptions of the installed packages, then the
documentation of scikit-learn, and gossip over HTTP. Users of four interest groups type words of a
title, without the name, and click by the cascade model. Judged are wishes that were never clicks.
The A/A run has BM25, popularity, and one log each.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.fields.retrieve.grank.documents import read_documents
from shoal.fields.retrieve.grank.execute import execute
from shoal.fields.retrieve.grank.job import RankPeersJob
from shoal.fields.retrieve.grank.planning import plan_peers
from shoal.fields.retrieve.grank.text import BM25, terms
from shoal.fields.running import RunProgress
from shoal.machine import load

_CORPORA = {"": "packages", "docs_": "docstrings:sklearn"}
_UNSEEN = 20  # scoring was chosen on networks of other seeds
# What may be lost between two points of a curve by chance, of NDCG.
_NOISE = 0.01


@part
class GRankClaim(BaseClaim, row=32, needs=("cryptography",)):
    """Networks of peers, and what ranks beside them.

    Args:
        seeds: networks.
        clicks: of all users, at the end.
    """

    seeds: int = 5
    clicks: int = 2000

    def collect(self, run: ClaimRun) -> None:
        """Run networks; the quick run has a small one."""
        sizes: dict[str, Any] = {"clicks": self.clicks, "heldout": 50, "checkpoints": (0, 100, 500)}
        seeds = self.seeds
        if run.quick:
            sizes = {"clicks": 60, "heldout": 5, "checkpoints": (0,), "peers": 3, "groups": 3}
            seeds = 1
        for prefix, data in _CORPORA.items():
            if not (run.quick and prefix):
                self._corpus(run, prefix, data, range(_UNSEEN, _UNSEEN + seeds), sizes)
        run.put("bm25_apart", _apart())

    def _corpus(
        self, run: ClaimRun, prefix: str, data: str, seeds: range, sizes: dict[str, Any]
    ) -> None:
        found = []
        for seed in seeds:
            run.progress(f"{data}, network {seed}", 0.5 * bool(prefix))
            job = RankPeersJob(data=data, seed=seed, **sizes)
            name = f"{prefix}network {seed}"
            found.append(run.remember(name, partial(_network, run, job, name)))
        measured = [one["measured"] for one in found]

        def column(name: str) -> list[float]:
            return [one[name] for one in measured]

        ndcg = column("ndcg")
        text, popular = column("ndcg_bm25"), column("ndcg_popularity")
        run.details[f"{prefix}curves"] = [one["curve"] for one in found]
        if not run.quick:
            run.put(f"{prefix}over_bm25", run.pick(ndcg, text), text)
            run.put(f"{prefix}over_popularity", run.pick(ndcg, popular), popular)
        if prefix:
            return
        run.put("of_pooled", run.pick(ndcg, column("ndcg_pooled")), column("ndcg_pooled"))
        # A peer that is alone has its own clicks.
        run.put(
            "spread", run.pick([one["spread"] for one in found], [one["alone"] for one in found])
        )
        if run.quick:
            return
        run.put("largest_loss", [one["drop"] - _NOISE for one in found])
        online = column("ndcg_rejoined")
        run.put("offline", run.pick(column("ndcg_offline"), online), online)
        run.put("p95_query_s", column("p95_query_s"))


def _network(run: ClaimRun, job: RankPeersJob, name: str) -> dict[str, Any]:
    """What a network has measured, its curve, and the largest loss between two points of it."""
    folder = run.work_dir / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    progress = RunProgress(folder, None, lambda kind, **fields: None, None)
    outcome = execute(plan_peers(job, load("laptop")), progress)
    curve, details = outcome.details["curve"], outcome.details
    values = [row["ndcg"] for row in curve]
    drops = [before - after for before, after in pairwise(values)]
    return {
        "measured": outcome.measured,
        "curve": curve,
        "drop": max(drops),
        "spread": min(details["entries"]) / details["clicks"],
        "alone": 1 / job.peers,
    }


def _apart() -> float:
    """The largest difference between our BM25 and the package's, over its largest score."""
    package: Any = import_extra("rank_bm25", extra="bench", purpose="the peer of the claim")
    texts = read_documents(_CORPORA["docs_"]).texts
    ours, theirs = BM25(texts), package.BM25Okapi([terms(one) for one in texts.values()])
    worst = 0.0
    for query in ("nearest neighbors", "sparse linear model", "plot the display of a curve"):
        expected = theirs.get_scores(terms(query))
        found = ours.scores(query)
        mine = np.array([found.get(name, 0.0) for name in texts])
        worst = max(worst, float(np.abs(mine - expected).max() / expected.max()))
    return worst

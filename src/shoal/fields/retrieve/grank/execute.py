"""A network of ranking peers from a plan to a report: processes, users, held-out judgements."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.files import write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.core.scratch import scratch_directory
from shoal.core.svg import Chart, Series
from shoal.fields.retrieve.grank.documents import DocumentSet, read_documents
from shoal.fields.retrieve.grank.entries import ClickEntry, read_entry
from shoal.fields.retrieve.grank.job import RankPeersJob, RankPeersPlan
from shoal.fields.retrieve.grank.metrics import ndcg, reciprocal_rank
from shoal.fields.retrieve.grank.network import RankingPeer, network, settle
from shoal.fields.retrieve.grank.protocols import Ranking, RetrieveError
from shoal.fields.retrieve.grank.sybil import sybils_needed
from shoal.fields.retrieve.grank.workload import Users, Wish, mean_of
from shoal.fields.running import RunOutcome, RunProgress

_SETTLE_S, _DRIVE_S = 30.0, 3600.0


class Drive:
    """Users at their peers, in threads; they go on from where they stopped."""

    def __init__(self, job: RankPeersJob, users: Users, peers: Sequence[RankingPeer]) -> None:
        self._job, self._users, self._peers = job, users, peers
        self._next = [0] * len(peers)
        self._lock = threading.Lock()
        self.clicks, self.seconds = 0, list[float]()

    def until(self, clicks: int) -> None:
        """Search and click until so many clicks are made by all.

        Raises:
            RetrieveError: a peer has ended.
        """
        failed: list[BaseException] = []
        end = time.monotonic() + _DRIVE_S

        def use(user: int) -> None:
            try:
                while self.clicks < clicks and not failed and time.monotonic() < end:
                    self._search(user)
                    time.sleep(self._job.pause_s)
            except BaseException as cause:  # handed to the thread that waits
                failed.append(cause)

        threads = [
            threading.Thread(target=use, args=(user,), daemon=True)
            for user in range(len(self._peers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DRIVE_S)
        if failed:
            raise failed[0]
        if self.clicks < clicks:
            raise RetrieveError(f"users: {self.clicks} clicks after {_DRIVE_S:g} s; ask for fewer")

    def _search(self, user: int) -> None:
        number, peer = self._next[user], self._peers[user]
        self._next[user] += 1
        wish = self._users.wish(user, number)
        found = peer.ask("rank", query=wish.query)
        chosen = self._users.clicks(user, number, wish, found["items"])
        for item in chosen:
            peer.ask("click", query=wish.query, item=item, shown=found["items"])
        with self._lock:
            self.seconds.append(found["seconds"])
            self.clicks += len(chosen)


def execute(plan: RankPeersPlan, progress: RunProgress) -> RunOutcome:
    """Run peers and users, and write ``curve.json`` and a picture.

    Raises:
        ShoalError: the documents cannot be read, or a peer has ended.
    """
    job = plan.job
    documents = read_documents(job.data)
    users = Users(documents, job.peers, job.groups, job.seed)
    common = {
        "ranker": job.method.model_dump(mode="json"),
        "settings": {
            "period_s": job.period_s,
            "newest": job.newest,
            "sample": job.sample,
            "quota": job.quota,
        },
    }
    with scratch_directory("peers") as root:
        file = root / "documents.jsonl"
        rows = [
            {"id": name, "title": documents.titles[name], "text": text}
            for name, text in documents.bodies().items()
        ]
        write_atomic(file, "".join(json.dumps(row) + "\n" for row in rows))
        with network(root, job.peers, {**common, "data": str(file)}) as peers:
            return _drive(job, documents, users, peers, progress)


def _drive(
    job: RankPeersJob,
    documents: DocumentSet,
    users: Users,
    peers: list[RankingPeer],
    progress: RunProgress,
) -> RunOutcome:
    drive, everyone = Drive(job, users, peers), range(len(peers))
    wishes = {user: heldout(users, user, job.heldout) for user in everyone}
    away = list(everyone)[len(peers) - min(job.offline, len(peers) - 1) :] if job.offline else []
    stops = sorted({one for one in job.checkpoints if one < job.clicks})
    curve: list[dict[str, float]] = []
    gone = False
    settled = True

    def judge() -> None:
        nonlocal settled
        there = [user for user in everyone if not (gone and user in away)]
        settled = settle([peers[user] for user in there], _SETTLE_S) and settled
        rows = [row for user in there for row in judged(peers[user], wishes[user])]
        curve.append({"clicks": drive.clicks, **means(rows)})
        progress.event("judged", **curve[-1])

    for stop in sorted({*stops, job.clicks // 2}):
        drive.until(stop)
        progress.tick(stop / job.clicks, f"{drive.clicks} clicks")
        if stop in stops:
            judge()
        if stop == job.clicks // 2:
            for user in away:
                peers[user].ask("online", value=False)
            gone = bool(away)
    drive.until(job.clicks)
    alone = [row for user in away for row in judged(peers[user], wishes[user])]
    for user in away:
        peers[user].ask("online", value=True)
    gone = False
    judge()
    again = [row for user in away for row in judged(peers[user], wishes[user])]
    states = [peer.ask("state") for peer in peers]
    pool = {entry.digest: entry for peer in peers for entry in map(read_entry, peer.ask("entries"))}
    entries = list(pool.values())
    names = [peer.peer for peer in peers]
    final = curve[-1]
    measured = {
        "query_s": float(np.mean(drive.seconds)),
        "p95_query_s": float(np.percentile(drive.seconds, 95)),
        "network_bytes": float(sum(state["sent_bytes"] for state in states)),
        "ndcg": final["ndcg"],
        "mrr": final["mrr"],
        **{
            f"ndcg_{name}": against(choice, documents, entries, names, wishes)["ndcg"]
            for name, choice in (
                ("bm25", Choice(name="bm25")),
                ("popularity", Choice(name="popularity")),
                ("pooled", job.method),
            )
        },
    }
    if away:
        measured |= {
            "ndcg_offline": mean_of(alone, "ndcg"),
            "ndcg_rejoined": mean_of(again, "ndcg"),
        }
    _write(curve, measured, progress)
    return RunOutcome(
        measured={"total_s": progress.seconds, **measured},
        details={
            "curve": curve,
            "settled": settled,
            "clicks": drive.clicks,
            "entries": [state["entries"] for state in states],
            "exchanges": sum(state["exchanges"] for state in states),
            "refused": sum(state["refused"] for state in states),
            "sybils": _sybils(documents, entries, names[0], wishes[0][0]),
        },
    )


def heldout(users: Users, user: int, count: int) -> list[Wish]:
    """Wishes of a user that no peer ever sees as clicks."""
    return [users.wish(user, at, "held out") for at in range(count)]


def judged(peer: RankingPeer, wishes: Sequence[Wish]) -> list[dict[str, float]]:
    """How a peer ranks what its user wants."""
    return [_scored(peer.ask("rank", query=wish.query)["items"], wish) for wish in wishes]


def against(
    choice: Choice,
    documents: DocumentSet,
    entries: Sequence[ClickEntry],
    names: Sequence[str],
    wishes: dict[int, list[Wish]],
) -> dict[str, float]:
    """How a ranker does that has all clicks in one place."""
    rows = []
    for user, name in enumerate(names):
        ranking: Ranking = table("ranker").build(choice).start(documents.texts, name)
        for entry in entries:
            ranking.add(entry)
        rows += [
            _scored([one.item for one in ranking.rank(wish.query)], wish) for wish in wishes[user]
        ]
    return means(rows)


def means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """NDCG@10 and MRR@10 of all judgements."""
    return {"ndcg": mean_of(rows, "ndcg"), "mrr": mean_of(rows, "mrr")}


def _scored(items: list[str], wish: Wish) -> dict[str, float]:
    gains = {wish.item: 1.0}
    return {"ndcg": ndcg(items, gains), "mrr": reciprocal_rank(items, gains)}


def _sybils(
    documents: DocumentSet, entries: Sequence[ClickEntry], me: str, wish: Wish
) -> dict[str, Any]:
    """For one query, of the document that is last among those that match."""
    ranked = table("ranker").build("bm25").start(documents.texts, me).rank(wish.query, limit=10**6)
    item = ranked[-1].item
    return {
        name: sybils_needed(documents.texts, entries, me, wish.query, item, copying=copying)
        for name, copying in (("strangers", False), ("copying the user", True))
    }


def _write(
    curve: list[dict[str, float]], measured: dict[str, float], progress: RunProgress
) -> None:
    write_json(progress.directory / "curve.json", curve)
    x = [row["clicks"] for row in curve]
    ends = [x[0], x[-1]]
    series = [Series(name="peers", x=x, y=[row["ndcg"] for row in curve], points=True)]
    for name in ("bm25", "popularity", "pooled"):
        value = measured[f"ndcg_{name}"]
        series.append(Series(name=name, x=ends, y=[value, value], dashed=True))
    picture = Chart(
        title="rankings as clicks accumulate",
        description="NDCG@10 on held-out clicks, and rankers that have all clicks in one place.",
        x_label="clicks",
        y_label="NDCG@10",
        series=series,
    )
    write_atomic(progress.directory / "curve.svg", picture.render())

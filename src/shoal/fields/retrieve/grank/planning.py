"""What a network of ranking peers takes: time, bytes between peers, and seconds of a query."""

from __future__ import annotations

import json

import numpy as np

from shoal.core.parts import table
from shoal.fields.rates import core_share
from shoal.fields.retrieve.grank.documents import DocumentSet, read_documents
from shoal.fields.retrieve.grank.entries import ClickEntry
from shoal.fields.retrieve.grank.job import RankPeersJob, RankPeersPlan
from shoal.fields.retrieve.grank.protocols import Ranker
from shoal.ir import Interval, Machine

# Clicks of a query, seconds of one through a pipe, of the start of all peers, and of a judgement.
_YIELD, _CALL_S, _START_S, _SETTLE_S = 0.75, 4e-3, 4.0, 1.5
# Entries that are sent twice because two neighbours bring them at once.
_TWICE = 0.15
# FLOP/s of the core whose rates are known, and memory of a peer and of the users' process.
_CORE, _PEER_BYTES, _USERS_BYTES = 1e11, 9e7, 2.9e8


def plan_peers(job: RankPeersJob, machine: Machine) -> RankPeersPlan:
    """The plan.

    Raises:
        ShoalError: the documents cannot be read, or an option is wrong.
    """
    documents = read_documents(job.data)
    ranker: Ranker = table("ranker").build(job.method, where="method")
    share = core_share(machine, _CORE)
    cores = max(machine.device.num_cores or 1, 1)
    query_s = ranker.query_s(len(documents), job.clicks) / share
    # Users that ask at the same time wait for cores.
    busy = max(1.0, job.peers * (query_s + _CALL_S) / (job.pause_s + query_s + _CALL_S) / cores)
    queries = job.clicks / job.peers / _YIELD
    judged = (len(job.checkpoints) + 2) * (
        _SETTLE_S + job.heldout * job.peers * (query_s + _CALL_S / 4)
    )
    total = _START_S * max(1, job.peers / cores / 4) + judged
    total += queries * (job.pause_s + (query_s + _CALL_S) * busy)
    memory = _PEER_BYTES * job.peers + _USERS_BYTES
    capacity = machine.device.main_memory.capacity_bytes
    return RankPeersPlan(
        job=job,
        machine=machine,
        predicted={
            "total_s": Interval.around(total, 0.4),
            "query_s": Interval.around(query_s, 1.0),
            "network_bytes": Interval.around(_bytes(job, documents, total), 0.5),
            "memory_bytes": Interval.around(_USERS_BYTES, 0.5),
        },
        planner="clicks that reach every peer",
        fits=not capacity or memory <= capacity,
        why=(
            f"{job.method}: {len(documents)} documents, {job.peers} peers; a query looks at the "
            "clicks on documents that match"
        ),
        notes=(f"{_YIELD:.0%} of queries are assumed to end with a click",),
        documents=len(documents),
    )


def _bytes(job: RankPeersJob, documents: DocumentSet, seconds: float) -> float:
    """Every click reaches every other peer; every exchange says what both have."""
    length = round(np.mean([len(name) for name in documents.texts]))
    entry = ClickEntry(
        peer="0" * 64, number=100, query="two words", item="x" * length,
        shown=("x" * length,) * 10, time=1.7e9 + 0.123456, signature="0" * 128,
    )  # fmt: skip
    size = len(json.dumps(entry.plain(), separators=(",", ":")))
    kept = min(job.clicks, job.quota * job.peers)
    introduction = 60 + job.peers * (64 + 16 + 20)
    messages = seconds / job.period_s * job.peers * 2 * 1.6
    return kept * (job.peers - 1) * size * (1 + _TWICE) + messages * introduction

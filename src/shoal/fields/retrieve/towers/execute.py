"""Towers from a plan to a report: train on one process or on ranks, judge, write."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.files import write_atomic
from shoal.core.parts import Choice, table
from shoal.core.scratch import scratch_directory
from shoal.fields.retrieve.towers.distil import error_bounds, unchanged
from shoal.fields.retrieve.towers.job import TrainTowersJob
from shoal.fields.retrieve.towers.pair import TowerPair, vectors_digest
from shoal.fields.retrieve.towers.pairs import load_pairs, write_pairs
from shoal.fields.retrieve.towers.planning import split_of
from shoal.fields.retrieve.towers.protocols import TextPairs, Tick, TowerTraining
from shoal.fields.running import RunOutcome, RunProgress

if TYPE_CHECKING:
    from shoal.parallel.comm.collectives import TorchComm

# Queries that are timed.
_TIMED = 50
_TOWERS, _DOCUMENTS = "towers", "documents.npy"


def execute(job: TrainTowersJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Train, encode all documents, and look for those of the queries that were held out.

    Raises:
        ShoalError: the pairs cannot be read, or the towers cannot be trained.
    """
    from shoal.kernel.threads import torch_threads

    progress.say(0.0, "reading")
    split = split_of(job)
    with torch_threads(job.threads):
        begin = time.perf_counter()
        if job.ranks == 1:
            method: TowerTraining = table("tower_training").build(choice, where="method")
            pair = method.train(
                job.task(), split.train, lambda done, text: progress.tick(0.9 * done, text, {})
            )
        else:
            progress.say(0.0, f"training on {job.ranks} ranks")
            pair = on_ranks(job, choice, split.train)
        train_s = time.perf_counter() - begin
        pair.save(progress.directory / _TOWERS)
        progress.say(0.9, "encoding documents")
        documents = [*split.test.documents, *split.valid.documents, *split.train.documents]
        vectors = pair.encode_document(documents, precision=job.precision)
        measured, details = _judged(job, pair, split.test.queries, vectors)
    data = io.BytesIO()
    np.save(data, vectors, allow_pickle=False)
    write_atomic(progress.directory / _DOCUMENTS, data.getvalue())
    return RunOutcome(
        measured={"train_s": train_s, **measured},
        details={**details, "documents": len(vectors), "index": vectors_digest(vectors)},
    )


def _judged(
    job: TrainTowersJob, pair: TowerPair, queries: Sequence[str], vectors: np.ndarray
) -> tuple[dict[str, float], dict[str, Any]]:
    seconds = []
    for text in queries[:_TIMED]:
        begin = time.perf_counter()
        pair.encode_query([text])
        seconds.append(time.perf_counter() - begin)
    found = pair.encode_query(queries)
    k = min(job.k, len(vectors) - 1)
    measured = {
        "query_s": float(np.median(seconds)),
        "recall": float((ranks_of(found, vectors) < k).mean()),
    }
    details: dict[str, Any] = {"queries": len(queries), "k": k}
    if pair.teacher is not None:
        teacher = pair.teacher.encode(queries)
        details |= {
            "teacher_recall": float((ranks_of(teacher, vectors) < k).mean()),
            "surely_same": float(unchanged(found, teacher, vectors, k).mean()),
            "mean_bound": float(error_bounds(found, teacher).mean()),
        }
    return measured, details


def ranks_of(queries: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """Ranks, from 0, of document i for query i among all documents, int64 [Q].

    Args:
        queries: [Q, d].
        documents: [N, d], those of the queries first.
    """
    scores = queries @ documents.T
    own = scores[np.arange(len(queries)), np.arange(len(queries))]
    return np.asarray((scores > own[:, None]).sum(1))


def on_ranks(
    job: TrainTowersJob, choice: Choice, pairs: TextPairs, *, timeout_s: float = 7 * 86_400.0
) -> TowerPair:
    """Train on processes of their own, which share every batch over Gloo.

    Raises:
        ShoalError: what a rank reported.
    """
    from shoal.parallel.comm.processes import run_processes

    with scratch_directory("towers") as place:
        write_pairs(place / "pairs.jsonl", pairs)
        given = {"job": job, "choice": choice, "place": str(place)}
        run_processes(
            f"{__name__}:train_rank", job.ranks, given, threads=job.threads,
            timeout_s=timeout_s, collective_s=600.0,
        )  # fmt: skip
        return TowerPair.load(place / _TOWERS)


def train_rank(comm: TorchComm, job: TrainTowersJob, choice: Choice, place: str) -> None:
    """What each rank does; the first writes what all have."""
    method: TowerTraining = table("tower_training").build(choice, where="method")
    silent: Tick = lambda done, text: None  # noqa: E731
    pair = method.train(job.task(), load_pairs(Path(place) / "pairs.jsonl"), silent, comm)
    if comm.rank == 0:
        pair.save(Path(place) / _TOWERS)
    comm.barrier()

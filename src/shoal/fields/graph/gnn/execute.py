"""Training from a plan to a report: read, train a network for each seed, write the best."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.extras import require_extra
from shoal.core.files import write_json
from shoal.core.parts import Choice, table
from shoal.fields.graph.gnn.inputs import check_batches, classified_graph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.graph.gnn.seeds import FILES, accuracies, most_common, train_seeds
from shoal.fields.running import RunOutcome, RunProgress

if TYPE_CHECKING:
    from shoal.fields.graph.gnn.seeds import Trained

_FACTS = "gnn.json"


def execute(
    job: TrainGnnJob, choice: Choice, placement: Choice | None, progress: RunProgress
) -> RunOutcome:
    """Train as many networks as there are runs; a stopped run goes on with the next seed.

    Args:
        job: what is trained.
        choice: the aggregator.
        placement: of the features; None without fan-outs.
        progress: of the run.

    Raises:
        ShoalError: the graph cannot be read or trained on.
    """
    require_extra("torch", purpose="training a graph neural network")
    from shoal.fields.graph.gnn.feeding import table_of
    from shoal.fields.graph.gnn.training import train_network
    from shoal.kernel.threads import torch_threads

    progress.say(0.0, "reading")
    check_batches(job)
    data = classified_graph(job)
    features = data.features_of(job.feature_dim, job.seed)

    def train(seed: int, watch: Callable[[int], None]) -> Trained:
        begin = time.perf_counter()
        with contextlib.ExitStack() as stack:
            source = None
            if placement is not None:
                source = stack.enter_context(table_of(job, placement, data, features, seed))
            found = train_network(job, choice, data, features, seed, watch, table=source)
            row: dict[str, Any] = {
                "seed": seed, "val": found.val, "test": found.test,
                "epoch": found.epoch, "train_s": time.perf_counter() - begin,
                # The first steps warm up.
                "epoch_s": float(np.median(found.seconds[min(2, len(found.seconds) - 1) :])),
            }  # fmt: skip
        if source is not None:
            row["gathered"] = source.counters().model_dump()
            row["placed"] = str(table("feature_source").spell(source.placed))
        return row, found.network, found.predicted

    with torch_threads(job.threads):
        seeds = range(job.seed, job.seed + job.runs)
        rows = train_seeds(progress, seeds, job.epochs, train)
    details: dict[str, Any] = {
        "aggregator": choice.model_dump(mode="json"),
        "data": job.data,
        "num_nodes": data.graph.num_nodes,
        "nnz": data.graph.nnz,
        "classes": data.num_classes,
        "features": features.shape[1],
        "train": len(data.train),
        "val": len(data.val),
        "test": len(data.test),
        "most_common": most_common(data),
        "seeds": rows,
    }
    write_json(progress.directory / _FACTS, {**details, "job": json.loads(job.model_dump_json())})
    measured = accuracies(rows)
    if placement is not None:
        moved = [row["gathered"]["host_read"] + row["gathered"]["host_written"] for row in rows]
        measured["host_bytes"] = float(np.mean(moved)) / job.epochs
    deviation = float(np.std([row["test"] for row in rows]))
    return RunOutcome(
        measured=measured,
        details={**details, "test_deviation": deviation, "files": [*FILES, _FACTS]},
    )

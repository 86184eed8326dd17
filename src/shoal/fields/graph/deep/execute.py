"""Training a deep network from a plan to a report: ranks that train, then one exact pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from shoal.core.extras import require_extra
from shoal.core.files import write_json
from shoal.fields.graph.deep.inputs import deep_graph, divide
from shoal.fields.graph.deep.job import TrainDeepGnnJob
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.graph.gnn.seeds import FILES, accuracies, most_common, train_seeds
from shoal.fields.running import RunOutcome, RunProgress

_FACTS = "deep_gnn.json"


def execute(job: TrainDeepGnnJob, grid: RankGrid, progress: RunProgress) -> RunOutcome:
    """Train as many networks as there are runs; a stopped run goes on with the next seed.

    Raises:
        ShoalError: the graph cannot be read or trained on.
    """
    require_extra("torch", purpose="training a deep graph network")
    from shoal.fields.graph.deep.training import train_seed

    progress.say(0.0, "reading and dividing the graph")
    data = deep_graph(job)
    features = data.features_of(job.feature_dim, job.seed)
    division = divide(data, grid, job.layers)
    rows = train_seeds(
        progress, range(job.seed, job.seed + job.runs), job.epochs,
        lambda seed, watch: train_seed(job, grid, data, features, division, seed, watch),
    )  # fmt: skip
    details: dict[str, Any] = {
        "data": job.data,
        "num_nodes": data.graph.num_nodes,
        "nnz": data.graph.nnz,
        "classes": data.num_classes,
        "grid": grid.model_dump(),
        "replicas": division.replicas(data.graph),
        "most_common": most_common(data),
        "seeds": rows,
    }
    write_json(progress.directory / _FACTS, {**details, "job": json.loads(job.model_dump_json())})
    return RunOutcome(
        measured={
            **accuracies(rows),
            "sent_bytes": float(np.median([row["sent_bytes"] for row in rows])),
            "memory_bytes": float(max(row["memory_bytes"] for row in rows)),
        },
        details={**details, "files": [*FILES, _FACTS]},
    )

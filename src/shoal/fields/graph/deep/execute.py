"""Training a deep network from a plan to a report: ranks that train, then one exact pass."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from shoal.core.extras import require_extra
from shoal.core.files import open_atomic, write_atomic, write_json
from shoal.fields.graph.deep.inputs import deep_graph, divide
from shoal.fields.graph.deep.job import TrainDeepGnnJob
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.running import RunOutcome, RunProgress

FILES = ("model.safetensors", "classes.npy", "deep_gnn.json")
"""Parameters of the network that validated best, its class of each node, and where it is from."""


def execute(job: TrainDeepGnnJob, grid: RankGrid, progress: RunProgress) -> RunOutcome:
    """Train as many networks as there are runs; a stopped run goes on with the next seed.

    Raises:
        ShoalError: the graph cannot be read or trained on.
    """
    require_extra("torch", purpose="training a deep graph network")
    from safetensors.torch import save

    from shoal.fields.graph.deep.training import train_seed

    progress.say(0.0, "reading and dividing the graph")
    data = deep_graph(job)
    features = data.features_of(job.feature_dim, job.seed)
    division = divide(data, grid, job.layers)
    rows: list[dict[str, Any]] = list((progress.state or {}).get("seeds", []))
    for number in range(len(rows), job.runs):
        state = {"seeds": list(rows)}

        def watch(epoch: int, number: int = number, state: dict[str, Any] = state) -> None:
            done = (number + epoch / job.epochs) / job.runs
            progress.tick(done, f"seed {number + 1} of {job.runs}, epoch {epoch}", state)

        row, network, assigned = train_seed(
            job, grid, data, features, division, job.seed + number, watch
        )
        if row["val"] > max((one["val"] for one in rows), default=-1.0):
            write_atomic(progress.directory / FILES[0], save(network.state_dict()))
            with open_atomic(progress.directory / FILES[1]) as file:
                np.save(file, assigned, allow_pickle=False)
        rows.append(row)
    counts = np.bincount(data.classes[data.train], minlength=data.num_classes)
    details: dict[str, Any] = {
        "data": job.data,
        "num_nodes": data.graph.num_nodes,
        "nnz": data.graph.nnz,
        "classes": data.num_classes,
        "grid": grid.model_dump(),
        "replicas": division.replicas(data.graph),
        "most_common": float((data.classes[data.test] == counts.argmax()).mean()),
        "seeds": rows,
    }
    write_json(progress.directory / FILES[2], {**details, "job": json.loads(job.model_dump_json())})
    return RunOutcome(
        measured={
            "epoch_s": float(np.median([row["epoch_s"] for row in rows])),
            "train_s": float(sum(row["train_s"] for row in rows)),
            "sent_bytes": float(np.median([row["sent_bytes"] for row in rows])),
            "memory_bytes": float(max(row["memory_bytes"] for row in rows)),
            "val_accuracy": float(np.mean([row["val"] for row in rows])),
            "test_accuracy": float(np.mean([row["test"] for row in rows])),
        },
        details={**details, "files": list(FILES)},
    )

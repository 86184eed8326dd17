"""Training from a plan to a report: read, train a network for each seed, write the best."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import numpy as np

from shoal.core.extras import require_extra
from shoal.core.files import open_atomic, write_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.fields.graph.gnn.inputs import check_batches, classified_graph
from shoal.fields.graph.gnn.job import TrainGnnJob
from shoal.fields.running import RunOutcome, RunProgress

FILES = ("model.safetensors", "classes.npy", "gnn.json")
"""Parameters of the network that validated best, its class of each node, and where it is from."""


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
    from safetensors.torch import save

    from shoal.fields.graph.gnn.feeding import table_of
    from shoal.fields.graph.gnn.training import train_network
    from shoal.kernel.threads import torch_threads

    progress.say(0.0, "reading")
    check_batches(job)
    data = classified_graph(job)
    features = data.features_of(job.feature_dim, job.seed)
    before: list[dict[str, Any]] = list((progress.state or {}).get("seeds", []))
    rows = list(before)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch_threads(job.threads))
        for number in range(len(before), job.runs):
            state = {"seeds": list(rows)}

            def watch(epoch: int, number: int = number, state: dict[str, Any] = state) -> None:
                done = (number + epoch / job.epochs) / job.runs
                progress.tick(done, f"seed {number + 1} of {job.runs}, epoch {epoch}", state)

            begin, seed = time.perf_counter(), job.seed + number
            source = None
            if placement is not None:
                source = stack.enter_context(table_of(job, placement, data, features, seed))
            found = train_network(job, choice, data, features, seed, watch, table=source)
            best = max((row["val"] for row in rows), default=-1.0)
            rows.append(
                {
                    "seed": seed, "val": found.val, "test": found.test,
                    "epoch": found.epoch, "train_s": time.perf_counter() - begin,
                    # The first steps warm up.
                    "epoch_s": float(np.median(found.seconds[min(2, len(found.seconds) - 1) :])),
                }
            )  # fmt: skip
            if source is not None:
                source.close()
                rows[-1]["gathered"] = source.counters().model_dump()
                rows[-1]["placed"] = str(table("feature_source").spell(source.placed))
            if found.val > best:
                tensors = found.network.state_dict()
                write_atomic(progress.directory / FILES[0], save(tensors))
                with open_atomic(progress.directory / FILES[1]) as file:
                    np.save(file, found.predicted, allow_pickle=False)
    counts = np.bincount(data.classes[data.train], minlength=data.num_classes)
    common = float((data.classes[data.test] == counts.argmax()).mean())
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
        "most_common": common,
        "seeds": rows,
    }
    write_json(progress.directory / FILES[2], {**details, "job": json.loads(job.model_dump_json())})
    tests = [row["test"] for row in rows]
    measured = {
        "epoch_s": float(np.median([row["epoch_s"] for row in rows])),
        "train_s": float(sum(row["train_s"] for row in rows)),
        "val_accuracy": float(np.mean([row["val"] for row in rows])),
        "test_accuracy": float(np.mean(tests)),
    }
    if placement is not None:
        moved = [row["gathered"]["host_read"] + row["gathered"]["host_written"] for row in rows]
        measured["host_bytes"] = float(np.mean(moved)) / job.epochs
    return RunOutcome(
        measured=measured,
        details={**details, "test_deviation": float(np.std(tests)), "files": list(FILES)},
    )

"""One training on the ranks of a grid, and what its network is worth in an exact pass."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from shoal.core.scratch import scratch_directory
from shoal.fields.graph.deep.inputs import write_inputs
from shoal.fields.graph.deep.job import TrainDeepGnnJob
from shoal.fields.graph.deep.network import GCNII
from shoal.fields.graph.deep.partition import NodeDivision, normalised
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.graph.deep.ranks import EPOCH, train_rank
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.parallel.comm.processes import run_processes

_LOOK_S = 0.5


def train_seed(
    job: TrainDeepGnnJob,
    grid: RankGrid,
    data: ClassifiedGraph,
    features: np.ndarray,
    division: NodeDivision,
    seed: int,
    watch: Callable[[int], None] = lambda epoch: None,
) -> tuple[dict[str, Any], GCNII, np.ndarray]:
    """Train one network; the test nodes are looked at once, with the parameters of the best epoch.

    Args:
        job: what is trained.
        grid: of the ranks.
        data: the graph with its classes.
        features: float32 [N, F].
        division: of its nodes.
        seed: of the parameters and the orders of chunks.
        watch: called, in another thread, with the number of epochs that are over.

    Returns:
        What is kept of it, as JSON; the network; its class of each node, int64 [N].

    Raises:
        ShoalError: a rank failed, or the loss is no longer finite.
    """
    with scratch_directory("deep-gnn") as place:
        write_inputs(place / "inputs.npz", data, features, division)
        arguments = {
            "job": job, "data": str(place / "inputs.npz"), "grid": grid, "seed": seed,
            "place": str(place),
        }  # fmt: skip
        with _watched(place / EPOCH, watch):
            ranks: Sequence[Mapping[str, Any]] = run_processes(
                f"{train_rank.__module__}:train_rank", grid.world, arguments, timeout_s=math.inf,
                collective_s=600.0,
            )  # fmt: skip
        parameters = [load_file(place / f"{rank}.safetensors") for rank in range(grid.world)]
    stages = np.array_split(np.arange(job.layers), grid.stages)
    whole = dict(parameters[0])
    for stage, numbers in enumerate(stages):
        for number in numbers:
            name = f"weights.{number}"
            whole[name] = parameters[stage * grid.parts][name]
    network = GCNII(features.shape[1], job.hidden, data.num_classes, job.layers)
    network.load_state_dict(whole)
    x = torch.from_numpy(np.ascontiguousarray(features, np.float32))
    assigned = network(x, normalised(data.graph)).argmax(1).numpy()
    epochs: list[Mapping[str, Any]] = ranks[0]["epochs"]
    # Epochs that bring old vectors up to date count; the first ones, which make them, do not.
    counted = epochs[job.exact_epochs :] or epochs
    sent = [one["bytes"] for rank in ranks for one in rank["epochs"][-len(counted) :]]
    row = {
        "seed": seed,
        "val": _share(assigned, data, data.val),
        "test": _share(assigned, data, data.test),
        "epoch": ranks[0]["best_epoch"],
        "epoch_s": float(np.mean([one["seconds"] for one in counted])),
        "train_s": float(sum(one["seconds"] for one in epochs)),
        "sent_bytes": sum(sent) / len(counted),
        "memory_bytes": sum(rank["memory_bytes"] for rank in ranks),
        "loss": [one["loss"] for one in epochs],
    }
    return row, network, assigned


def _share(assigned: np.ndarray, data: ClassifiedGraph, nodes: np.ndarray) -> float:
    return float((assigned[nodes] == data.classes[nodes]).mean())


@contextlib.contextmanager
def _watched(path: Path, watch: Callable[[int], None]) -> Iterator[None]:
    """Say the number that ranks write into a file, when it changes."""
    over = threading.Event()

    def look() -> None:
        last = ""
        while not over.wait(_LOOK_S):
            with contextlib.suppress(FileNotFoundError):
                now = path.read_text()
                if now != last:
                    watch(int(now))
                last = now

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

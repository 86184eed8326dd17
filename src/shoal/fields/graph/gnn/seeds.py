"""The trainings of a run, one for each seed: a stopped run goes on, and the best network stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.core.files import open_atomic, write_atomic
from shoal.fields.graph.gnn.inputs import ClassifiedGraph
from shoal.fields.running import RunProgress

if TYPE_CHECKING:
    from torch import nn

    Trained = tuple[dict[str, Any], nn.Module, np.ndarray]

FILES = ("model.safetensors", "classes.npy")
"""Parameters of the network that validated best, and its class of each node."""


def train_seeds(
    progress: RunProgress,
    seeds: range,
    epochs: int,
    train: Callable[[int, Callable[[int], None]], Trained],
) -> list[dict[str, Any]]:
    """Train the networks that a stopped run has not trained, and write the best to :data:`FILES`.

    Args:
        progress: of the run.
        seeds: of all its networks.
        epochs: of each.
        train: trains the network of a seed, and calls what it is given with the number of epochs
            that are over; what is kept of it, as JSON, with ``val``; the network; its classes [N].

    Returns:
        What is kept of each network.
    """
    # An optimizer imports it when it is first made: a second that is no training.
    import torch._dynamo  # noqa: F401
    from safetensors.torch import save

    rows: list[dict[str, Any]] = list((progress.state or {}).get("seeds", []))
    for number in range(len(rows), len(seeds)):
        state = {"seeds": list(rows)}

        def watch(epoch: int, number: int = number, state: dict[str, Any] = state) -> None:
            done = (number + epoch / epochs) / len(seeds)
            progress.tick(done, f"seed {number + 1} of {len(seeds)}, epoch {epoch}", state)

        row, network, classes = train(seeds[number], watch)
        if row["val"] > max((one["val"] for one in rows), default=-1.0):
            write_atomic(progress.directory / FILES[0], save(network.state_dict()))
            with open_atomic(progress.directory / FILES[1]) as file:
                np.save(file, classes, allow_pickle=False)
        rows.append(row)
    return rows


def most_common(data: ClassifiedGraph) -> float:
    """The share of the test nodes that have the most common class of those that are learned of."""
    counts = np.bincount(data.classes[data.train], minlength=data.num_classes)
    return float((data.classes[data.test] == counts.argmax()).mean())


def accuracies(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Time of an epoch and of all trainings, and mean accuracies."""
    return {
        "epoch_s": float(np.median([row["epoch_s"] for row in rows])),
        "train_s": float(sum(row["train_s"] for row in rows)),
        "val_accuracy": float(np.mean([row["val"] for row in rows])),
        "test_accuracy": float(np.mean([row["test"] for row in rows])),
    }

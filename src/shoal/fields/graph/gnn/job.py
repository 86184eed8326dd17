"""The values of a job ``train_gnn``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Kind, Value
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class ClassifiedGraphKeys(Value):
    """The graph of a job, whose nodes have classes.

    Args:
        data: a .npz of Planetoid, such as planetoid/cora.npz below SHOAL_DATA; or any graph of
            ``embed_nodes`` that has labels, one for each node: ``packages``, ``planted:N``, a file.
        labels: a file with an id and a label a line; empty for those that the graph brings.
        features: a .npy of float32 [N, F] with the features of all nodes; empty for those that the
            graph brings, or FastRP's.
        feature_dim: numbers of the vectors that FastRP makes of a graph without features.
        train_share: of the nodes with labels, where the data divide none.
        val_share: of the nodes with labels, by which the best epoch is chosen.
        seed: of the division of the nodes, and of the first training.
    """

    data: str
    labels: str = ""
    features: str = ""
    feature_dim: Annotated[int, Ge(1), Le(4096)] = 128
    train_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    val_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    seed: NonNegativeInt = 0


class TrainGnnJob(ClassifiedGraphKeys, Job):
    """Train a graph neural network that assigns nodes to classes.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        aggregator: how neighbours are pooled; None lets the planner choose.
        hidden: numbers of a hidden vector.
        layers: convolutions.
        dropout: share of numbers that are left out in training.
        learning_rate: of Adam.
        weight_decay: of Adam.
        epochs: passes over the nodes that the network learns of; without fan-outs one step each.
        neighbours: of a node that are drawn in an epoch at most; 0 for all. Without fan-outs.
        fanouts: neighbours of a node that are drawn for each batch, one number for each layer,
            those of the batch's nodes first; -1 for all. Empty: steps over the whole graph.
        batch_size: nodes of a batch, with fan-outs.
        placement: how features of a batch come to where it is trained on, with fan-outs; None lets
            the planner choose.
        host_bytes_per_s: holds all traffic of the memory that holds the features to a rate, with
            fan-outs: a slower memory, emulated. None for none.
        runs: trainings, each with a seed of its own.
        threads: that train.
    """

    job: Literal["train_gnn"] = "train_gnn"
    name: str = Field(default="gnn", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    aggregator: Annotated[Choice, Kind("aggregator")] | None = None
    hidden: Annotated[int, Ge(1), Le(4096)] = 64
    layers: Annotated[int, Ge(1), Le(16)] = 2
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.5
    learning_rate: PositiveFloat = 0.01
    weight_decay: NonNegativeFloat = 5e-4
    epochs: PositiveInt = 100
    neighbours: NonNegativeInt = 0
    fanouts: tuple[int, ...] = ()
    batch_size: PositiveInt = 512
    placement: Annotated[Choice, Kind("feature_source")] | None = None
    host_bytes_per_s: PositiveFloat | None = None
    runs: PositiveInt = 1
    threads: PositiveInt = 1


class TrainGnnPlan(Plan[TrainGnnJob]):
    """A plan of training: its job has an aggregator.

    Args:
        num_nodes: of the graph.
        nnz: entries of its adjacency matrix.
        depth: operations that must follow one another to pool the neighbours of the largest node.
    """

    num_nodes: int
    nnz: int
    depth: int


class TrainGnnReport(Report[TrainGnnPlan]):
    """A report of training; its details have the accuracies of each seed."""

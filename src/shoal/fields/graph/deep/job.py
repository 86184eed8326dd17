"""The values of a job ``train_deep_gnn``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.graph.deep.protocols import RankGrid
from shoal.fields.graph.gnn.job import ClassifiedGraphKeys
from shoal.ir import Job, Plan, Report


class TrainDeepGnnJob(ClassifiedGraphKeys, Job):
    """Train a deep graph network (GCNII) on several ranks.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        split: how ranks share the network; None lets the planner choose.
        ranks: processes, each with one thread.
        hidden: numbers of a hidden vector.
        layers: convolutions.
        learning_rate: of Adam.
        weight_decay: of Adam.
        epochs: steps, each over the whole graph.
        exact_epochs: at the beginning, of a pipeline: each layer waits for the whole graph, and
            leaves the vectors and gradients that the next epoch begins with.
        refresh: so many epochs after an exact one another one is exact; 0 for none.
        warmup: epochs in which the learning rate rises.
        runs: trainings, each with a seed of its own.
    """

    job: Literal["train_deep_gnn"] = "train_deep_gnn"
    name: str = Field(default="deep_gnn", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    split: Annotated[Choice, Kind("graph_split")] | None = None
    ranks: Annotated[int, Ge(1), Le(256)] = 4
    hidden: Annotated[int, Ge(1), Le(4096)] = 64
    layers: Annotated[int, Ge(1), Le(1024)] = 32
    learning_rate: PositiveFloat = 0.01
    weight_decay: NonNegativeFloat = 5e-4
    epochs: PositiveInt = 100
    exact_epochs: PositiveInt = 1
    refresh: NonNegativeInt = 0
    warmup: NonNegativeInt = 0
    runs: PositiveInt = 1

    def exact(self, epoch: int) -> bool:
        """Whether a pipeline's epoch, from 1 on, has one chunk."""
        after = epoch - self.exact_epochs
        return after <= 0 or (self.refresh > 0 and after % self.refresh == 0)


class TrainDeepGnnPlan(Plan[TrainDeepGnnJob]):
    """A plan of training: its job has a split.

    Args:
        grid: of the ranks.
        num_nodes: of the graph.
        replicas: rows that parts hold of each other's nodes, summed over the parts.
    """

    grid: RankGrid
    num_nodes: int
    replicas: int


class TrainDeepGnnReport(Report[TrainDeepGnnPlan]):
    """A report of training; its details have the accuracies of each seed and the losses."""

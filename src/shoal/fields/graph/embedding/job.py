"""The values of a job ``embed_nodes``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Lt
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class EmbedNodesJob(Job):
    """Make a vector of each node of a graph, and measure what the vectors say about labels.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: an edge list as SNAP has them (perhaps .gz), a .npz of SciPy, a directory of
            ``CSRGraph.save``, ``packages``, what depends on what among this machine's packages, or
            ``planted:N``, N nodes in communities.
        labels: of the nodes: a file with an id and a label a line; of packages ``section`` or
            ``tags``; empty for those that the graph brings, if any.
        directed: edges of a list lead one way only.
        largest_component: leave out all nodes but those of the largest component.
        method: the embedder; None lets the planner choose.
        train_share: of the nodes with labels, whose labels the classifier sees.
        tuning_share: of the nodes with labels, by which a method may choose its options; they are
            among those that the classifier sees.
        judged: nodes with labels that are used, drawn by the seed; 0 for all.
        threads: that embed.
        seed: random seed.
    """

    job: Literal["embed_nodes"] = "embed_nodes"
    name: str = Field(default="embedding", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    labels: str = ""
    directed: bool = False
    largest_component: bool = False
    method: Annotated[Choice, Kind("node_embedder")] | None = None
    train_share: Annotated[float, Gt(0), Lt(1)] = 0.1
    tuning_share: Annotated[float, Gt(0), Lt(1)] = 0.01
    judged: NonNegativeInt = 20_000
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0


class EmbedNodesPlan(Plan[EmbedNodesJob]):
    """An embedding's plan: its job has a method.

    Args:
        num_nodes: of the graph.
        nnz: entries of its adjacency matrix.
    """

    num_nodes: int
    nnz: int


class EmbedNodesReport(Report[EmbedNodesPlan]):
    """An embedding's report; its details have what the graph and the method have counted."""

"""The values of a job ``communities``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.graph.communities.adjacency import Side
from shoal.ir import Job, Plan, Report


class CommunitiesJob(Job):
    """Sign the vertices of a graph, and ask which belong to some seeds.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: an edge list as SNAP has them (perhaps .gz), a .npz of SciPy, a directory of
            ``CSRGraph.save``, ``packages``, where an edge leads from a package to one that it
            depends on, or ``planted:N``, N nodes in communities.
        labels: of the nodes: a file with an id and a label a line; of packages ``section`` or
            ``tags``; empty for those that the graph brings, if any.
        directed: edges of a list lead one way only.
        side: the set of a vertex are those with an edge to it (``in``), those to which it has one
            (``out``), or ``both``; the same where edges are undirected.
        seeds: vertices of one query, separated by commas; empty to draw queries.
        size: vertices of a community, seeds included.
        queries: that are drawn and timed where no seeds are given.
        seeds_each: of a drawn query, vertices of one label; without labels it has one.
        method: the expander; None lets the planner choose.
        hashes: slots of a signature.
        least_degree: neighbours that a vertex has, at least, to be signed.
        threshold: Jaccard similarity at which candidates should be found.
        recall: probability of that, for one seed.
        judged: queries that are also answered with exact similarities.
        threads: that build.
        serve_port: after the queries, the explorer is served at this port of this machine until
            Ctrl-C, 0 for any free one; None ends the run without.
        seed: random seed.
    """

    job: Literal["communities"] = "communities"
    name: str = Field(default="communities", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    labels: str = ""
    directed: bool = False
    side: Side = "in"
    seeds: str = ""
    size: Annotated[int, Gt(1), Le(10_000)] = 50
    queries: PositiveInt = 100
    seeds_each: PositiveInt = 5
    method: Annotated[Choice, Kind("community_expander")] | None = None
    hashes: Annotated[int, Gt(0), Le(65_536)] = 1000
    least_degree: PositiveInt = 1
    threshold: Annotated[float, Gt(0), Le(1)] = 0.1
    recall: Annotated[float, Gt(0), Lt(1)] = 0.9
    judged: NonNegativeInt = 20
    threads: PositiveInt = 1
    serve_port: Annotated[int, Ge(0), Le(65_535)] | None = None
    seed: NonNegativeInt = 0


class CommunitiesPlan(Plan[CommunitiesJob]):
    """A plan of communities: its job has a method.

    Args:
        num_vertices: that are signed.
        entries: members of all their sets.
        candidates: vertices that a query compares with its seeds, as a few queries predict.
    """

    num_vertices: int
    entries: int
    candidates: float


class CommunitiesReport(Report[CommunitiesPlan]):
    """A report of communities; its details have the first query's members."""

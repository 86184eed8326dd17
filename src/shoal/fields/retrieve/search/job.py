"""The values of a job ``search``: what to serve, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class SearchJob(Job):
    """Serve collections of points over HTTP, or measure how fast documents are searched so.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: directory of the collections; made where there is none.
        documents: that are put into a collection of their own and searched by their titles,
            as ``rank_peers`` reads them (``packages``, ``docstrings:PACKAGE``, a directory, a file
            of JSON lines); empty to serve ``data`` until stopped.
        points: that a plan is for; with ``documents`` at most so many documents.
        dim: numbers of a vector, where the embedder does not say.
        embedder: makes vectors of texts.
        method: how queries of the load are answered; None lets the planner choose.
        k: points of an answer.
        queries: of the load.
        clients: of the load, that ask at the same time.
        host: address to listen on; anything but this machine itself needs keys.
        port: 0 for any free one; the load takes a free one.
        keys: file of the API keys and of what each may do.
        allow_host: further names that the header ``Host`` may have.
        seed: of the order of the queries.
    """

    job: Literal["search"] = "search"
    name: str = Field(default="search", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str = "collections"
    documents: str = ""
    points: PositiveInt = 100_000
    dim: Annotated[int, Ge(1), Le(65_536)] = 384
    embedder: Annotated[Choice, Kind("embedder")] = Choice(name="hashed_words")
    method: Annotated[Choice, Kind("search_method")] | None = None
    k: Annotated[int, Ge(1), Le(1000)] = 10
    queries: PositiveInt = 1000
    clients: Annotated[int, Ge(1), Le(64)] = 1
    host: str = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65_535)] = 6333
    keys: str = ""
    allow_host: tuple[str, ...] = ()
    seed: NonNegativeInt = 0


class SearchPlan(Plan[SearchJob]):
    """A plan of a search: its job has a method.

    Args:
        points: of the collection.
    """

    points: int


class SearchReport(Report[SearchPlan]):
    """A search's report; its details have ``requests`` by status."""

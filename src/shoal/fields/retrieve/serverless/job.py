"""The values of a search by functions: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.cost.functions import FunctionPrices
from shoal.fields.retrieve.index.protocols import Metric
from shoal.ir import Job, Plan, Report


class SearchFunctionsJob(Job):
    """Search vectors with attributes by functions that start each other as a tree.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: vectors, as of a job ``index``.
        columns: those that make up a vector; empty for every column of numbers.
        metric: what is near: ``l2``, ``ip`` (inner product) or ``cosine``.
        backend: where functions run; None lets the planner choose.
        tree: of allocators, ``FANOUTxDEPTH``.
        parts: of the vectors, each with a function of its own.
        copies: containers of a part's function at a time; further calls of it wait.
        bits_per_dim: of a vector's code, on average.
        k: neighbours of a query.
        queries: vectors that are held out and searched for, all in one batch.
        attributes: uniform ones that are drawn for each vector; 0 for no filter.
        selectivity: share of the vectors that pass a filter on all attributes.
        batches: searches after the first, whose containers are warm.
        latency_s: that each dispatch of a call is held back, to emulate a service that is far away.
        memory_gb: of each container.
        call_usd: price of a call.
        gb_s_usd: price of a GB of memory for a second.
        threads: for building.
        seed: random seed.
    """

    job: Literal["search_functions"] = "search_functions"
    name: str = Field(default="functions", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, ...] = ()
    metric: Metric = "l2"
    backend: Annotated[Choice, Kind("function_backend")] | None = None
    tree: Annotated[str, Field(pattern=r"^[1-9]\d{0,3}x[1-9]\d?$")] = "2x2"
    parts: Annotated[int, Ge(1), Le(1024)] = 10
    copies: Annotated[int, Ge(1), Le(1024)] = 4
    bits_per_dim: Annotated[float, Gt(0), Le(8)] = 4.0
    k: Annotated[int, Ge(1), Le(65_536)] = 10
    queries: Annotated[int, Gt(1)] = 200
    attributes: Annotated[int, Ge(0), Le(16)] = 4
    selectivity: Annotated[float, Gt(0), Le(1)] = 0.08
    batches: Annotated[int, Ge(1), Le(1000)] = 5
    latency_s: Annotated[float, Ge(0), Lt(60)] = 0.0
    memory_gb: Annotated[float, Gt(0), Le(64)] = 1.769
    call_usd: Annotated[float, Ge(0)] = FunctionPrices().call_usd
    gb_s_usd: Annotated[float, Ge(0)] = FunctionPrices().gb_s_usd
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0

    @property
    def prices(self) -> FunctionPrices:
        """Of calls and of memory."""
        return FunctionPrices(call_usd=self.call_usd, gb_s_usd=self.gb_s_usd)


class SearchFunctionsPlan(Plan[SearchFunctionsJob]):
    """The plan of a search by functions.

    Args:
        n: vectors.
        dim: numbers of each.
        calls: of functions, for a batch.
    """

    n: int
    dim: int
    calls: float


class SearchFunctionsReport(Report[SearchFunctionsPlan]):
    """The report; its details have the bill of each batch."""

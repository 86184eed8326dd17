"""The values of a job that solves a variational inequality: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.federate.clients import parse_clients
from shoal.ir import Job, Plan, Report


class SolveViJob(Job):
    """Solve a saddle point or another variational inequality whose operator workers share.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        problem: what is solved.
        method: how; None lets the planner choose.
        clients: workers, each a process: ``5``, ``20@20Mbit``, ``4@100Mbit+1@5Mbit``.
        compressor: how workers compress what they send.
        server_compressor: how the server compresses the mean.
        step: gamma; None for the bound of the method.
        tolerance: error at which the run ends: squared distance to the solution over that of the
            start.
        iterations: after which it ends in any case.
        seed: of everything that is drawn.
    """

    job: Literal["solve_vi"] = "solve_vi"
    name: str = Field(default="solve_vi", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    problem: Annotated[Choice, Kind("vi_problem")] = Choice(name="quadratic_saddle")
    method: Annotated[Choice, Kind("vi_method")] | None = None
    clients: str = "4"
    compressor: Annotated[Choice, Kind("update_compressor")] = Choice(name="rand_k")
    server_compressor: Annotated[Choice, Kind("update_compressor")] = Choice(name="identity")
    step: PositiveFloat | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    iterations: PositiveInt = 20_000
    seed: NonNegativeInt = 0

    @model_validator(mode="before")
    @classmethod
    def _number(cls, values: object) -> object:
        """A bare number of clients is one."""
        if isinstance(values, dict) and isinstance(values.get("clients"), int):
            return {**values, "clients": str(values["clients"])}
        return values

    @model_validator(mode="after")
    def _clients_are_readable(self) -> SolveViJob:
        parse_clients(self.clients)
        return self


class SolveViPlan(Plan[SolveViJob]):
    """The plan: its job has a method.

    Args:
        size: numbers of the solution.
        step: gamma.
    """

    size: int
    step: float


class SolveViReport(Report[SolveViPlan]):
    """The report; its details have the curve of the error."""

"""The values of a job ``recommend``: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.ir import Job, Plan, Report


class RecommendJob(Job):
    """Learn what users do next from their events, and measure how often it is right.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a table of events (.parquet, .csv, .jsonl), or ``streams:N``, N drawn sequences of
            items that appear over time.
        columns: of users, items and times; a table without times is in the order of time.
        sort: bring the events of the table into the order of time.
        method: the recommender; None lets the planner choose.
        length: most events of a history.
        dim: numbers of an event.
        blocks: layers of a network.
        heads: of attention.
        epochs: passes over the events; 0 for one over streams, which keep their order, and ten
            over a table.
        batch: sequences of a step.
        lr: learning rate of AdamW.
        dropout: of the output of a layer.
        negatives: items drawn for each sequence, against which the right one is chosen.
        temperature: by which cosines are divided.
        sparse: change only those rows of the table of items that a step touches.
        threads: of the network.
        seed: random seed.
    """

    job: Literal["recommend"] = "recommend"
    name: str = Field(default="recommend", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    columns: tuple[str, str, str] = ("user", "item", "time")
    sort: bool = False
    method: Annotated[Choice, Kind("recommender")] | None = None
    length: Annotated[int, Ge(2), Field(le=8192)] = 64
    dim: PositiveInt = 50
    blocks: PositiveInt = 4
    heads: PositiveInt = 2
    epochs: NonNegativeInt = 0
    batch: PositiveInt = 32
    lr: Annotated[float, Gt(0)] = 4e-3
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.2
    negatives: PositiveInt = 128
    temperature: Annotated[float, Gt(0)] = 0.05
    sparse: bool = False
    threads: PositiveInt = 1
    seed: NonNegativeInt = 0


class RecommendPlan(Plan[RecommendJob]):
    """A recommender's plan: its job has a method.

    Args:
        users: that have events.
        items: that there are.
        events: that are learned from in a pass.
    """

    users: int
    items: int
    events: int


class RecommendReport(Report[RecommendPlan]):
    """A recommender's report."""

"""The values of a mining job: what to do, the plan, the report."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import Field, PositiveInt

from shoal.core.config import Kind
from shoal.core.parts import Choice
from shoal.fields.data.mine.protocols import Target
from shoal.fields.data.readers import BadRows
from shoal.ir import Job, Plan, Report


class MineJob(Job):
    """Find sets of items that occur together in many baskets, and rules among them.

    Args:
        job: the kind of job.
        name: name of the run and of its directory.
        data: a file or directory of Parquet, JSON Lines or Arrow with a column of lists; a text
            file with a basket on each line; ``debian``, the dependencies of the packages in this
            machine's index; or ``baskets:N[:SIZE[:P]]``, N generated baskets of at most SIZE items
            that have a planted set with probability P.
        column: that has the lists; None for the only one.
        separator: between the items of a line of text; None for spaces and tabs.
        min_support: share of all baskets that a frequent set is in, (0, 1]; or their number.
        target: ``all`` frequent sets; ``closed``, those of which no larger one has the support;
            ``maximal``, those of which no larger one is frequent.
        max_len: most items of a set.
        max_itemsets: more sets are an error, raised before the memory is full.
        method: how sets are found; None lets the planner choose.
        min_confidence: of rules; None for no rules. Needs ``target: all``.
        sharded: two passes over shards of the data, which need not fit in memory.
        bad: rows that cannot be read: ``raise`` an error, or ``skip`` and count them.
        pool: where shards are processed: None for this process, ``local``, ``ray``.
        workers: shards that are in work at a time.
    """

    job: Literal["mine"] = "mine"
    name: str = Field(default="mine", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    data: str
    column: str | None = None
    separator: str | None = None
    min_support: PositiveInt | Annotated[float, Gt(0), Le(1)] = 0.1
    target: Target = "all"
    max_len: PositiveInt | None = None
    max_itemsets: PositiveInt = 10_000_000
    method: Annotated[Choice, Kind("miner")] | None = None
    min_confidence: Annotated[float, Gt(0), Le(1)] | None = None
    sharded: bool = False
    bad: BadRows = "raise"
    pool: Annotated[Choice, Kind("pool")] | None = None
    workers: PositiveInt = 1


class MinePlan(Plan[MineJob]):
    """A mining plan: its job has a method.

    Args:
        num_baskets: of the data.
        least: support that makes a set frequent.
    """

    num_baskets: int
    least: int


class MineReport(Report[MinePlan]):
    """A mining report; its details have ``lengths``, sets by their number of items."""

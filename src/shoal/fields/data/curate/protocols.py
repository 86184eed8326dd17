"""What a method of curation is, what it is given, and what it returns.

A method goes over shards with :func:`~shoal.fields.data.shards.map_shards` and writes the rows that
are kept as Parquet, one file for a shard, so that data may be larger than memory and a run that was
stopped goes on with the next shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, runtime_checkable

from pydantic import Field

from shoal.core.config import Value
from shoal.fields.data.row_rates import RowRates

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.core.pool import Pool
    from shoal.fields.data.sources import Source
    from shoal.ir import Estimate, Machine


class CurateWork(Value):
    """What is curated, as the methods' estimates see it.

    Args:
        num_bytes: of the data, as stored.
        rows: None where only reading tells.
        columns: names of all columns.
        text: the column that holds text; empty where there is none.
        dim: numbers of the vector that a row is; 0 for text, or where nothing tells.
        keep: share of the rows that is kept, of methods that are given one.
        workers: shards that are in work at a time.
        rates: of reading and writing.
        sample: some of the rows, as record batches of Arrow, on which a method can be timed; none
            of a machine that is only described.
    """

    num_bytes: int
    rows: int | None
    columns: tuple[str, ...]
    text: str
    dim: int = 0
    keep: float
    workers: int
    rates: RowRates = RowRates()
    sample: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)


class CurationStage(NamedTuple):
    """What one part of a method did, a filter or a choice by score.

    Args:
        name: of the part.
        rows: that it was given.
        dropped: of them.
        examples: the beginnings of some that it dropped, each with its reason.
        counts: why it dropped how many, and what else it has counted.
        seconds: that it took, of all workers together; 0 where that was not timed.
    """

    name: str
    rows: int
    dropped: int
    examples: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = {}
    seconds: float = 0.0


@dataclass(frozen=True)
class CurateProblem:
    """One curation.

    Args:
        source: the rows.
        text: the column that holds text; empty where there is none.
        columns: that the user named.
        keep: share of the rows.
        place: directory for what is kept: ``place / "kept"``, one Parquet file for a shard.
        pool: a choice of kind ``pool``, or one that is open; None for this process.
        workers: shards that are in work at a time.
        seed: of everything random.
        tick: called with (share done, what is done).
    """

    source: Source
    text: str
    columns: tuple[str, ...]
    keep: float
    place: Path
    pool: Choice | Pool | None = None
    workers: int = 1
    seed: int = 0
    tick: Callable[[float, str], None] = lambda done, text: None


class Curation(NamedTuple):
    """What was kept.

    Args:
        rows: that were read.
        kept: of them.
        bad: rows that could not be read.
        first_bad: where the first of these is.
        stages: what each part dropped, in order.
        measured: further quantities, such as ``loss``.
        details: anything else, as JSON; the arguments of :func:`~shoal.core.tables.table_of` in
            the list ``tables`` are shown.
    """

    rows: int
    kept: int
    bad: int
    first_bad: str
    stages: Sequence[CurationStage]
    measured: dict[str, float]
    details: dict[str, Any]


@runtime_checkable
class Curator(Protocol):
    """A part of kind ``curator``: one way to choose rows."""

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Seconds of the whole curation, and bytes of memory by cause."""

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def curate(self, problem: CurateProblem) -> Curation:
        """Choose rows and write them.

        Raises:
            DataError: the data cannot be read, or not be curated like that.
        """

"""What a method of deduplication is, what it is given, and what it returns.

A method says for each row which row it is a duplicate of. It goes over shards with
:func:`~shoal.fields.data.shards.map_shards`, so data may be larger than memory and a run that was
stopped goes on with the next shard; what is kept is written afterwards, the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    runtime_checkable,
)

from shoal.core.config import Value
from shoal.fields.data.row_rates import RowRates

if TYPE_CHECKING:
    from shoal.core.parts import Choice
    from shoal.core.pool import Pool
    from shoal.fields.data.minhash.hasher import ShingleUnit
    from shoal.fields.data.sources import Source
    from shoal.ir import Estimate, Machine

Compared: TypeAlias = Literal["rows", "tables"]
"""What is compared: rows of a table by their text, or the tables of a directory."""


class DedupeRates(Value):
    """How fast one process of a machine is.

    Args:
        shingles: shingles cut and hashed in a second.
        slots: images of a shingle under a hash function in a second.
        digest: bytes of text whose words are hashed in a second.
        sort: rows of a band that are sorted and united in a second.
        probe: small queries of tables in a second.
        spread: half-width of the 90 % interval of a sum of them, as a share.
        measured: on this machine, or derived from its description.
    """

    shingles: float
    slots: float
    digest: float
    sort: float
    probe: float
    spread: float
    measured: bool


class DedupeWork(Value):
    """What is searched for duplicates, as the methods' estimates see it.

    Args:
        compared: rows or tables.
        num_bytes: of the data, as stored.
        rows: about how many.
        tables: files.
        threshold: Jaccard similarity from which on rows are duplicates.
        unit: what a shingle is a run of.
        ngram: units of a shingle.
        workers: shards that are in work at a time.
        rates: of one process.
        reading: how fast rows are read and written.
    """

    compared: Compared
    num_bytes: int
    rows: float
    tables: int
    threshold: float
    unit: Literal["words", "characters"]
    ngram: int
    workers: int
    rates: DedupeRates
    reading: RowRates = RowRates()

    @property
    def size(self) -> float:
        """Bytes of the rows in memory."""
        return self.num_bytes * self.reading.inflate


@dataclass(frozen=True)
class DedupeProblem:
    """One search for duplicates.

    Args:
        where: a file, a directory or an address.
        source: the rows; None where tables are compared.
        texts: columns of text that are compared together.
        threshold: Jaccard similarity from which on rows are duplicates.
        unit: what a shingle is a run of.
        ngram: units of a shingle.
        place: directory for files.
        pool: a choice of kind ``pool``, or one that is open; None for this process.
        workers: shards that are in work at a time.
        seed: of everything random.
        tick: called with (share done, what is done).
    """

    where: str
    source: Source | None
    texts: tuple[str, ...]
    threshold: float
    unit: ShingleUnit
    ngram: int
    place: Path
    pool: Choice | Pool | None = None
    workers: int = 1
    seed: int = 1
    tick: Callable[[float, str], None] = lambda done, text: None


class DuplicateExample(NamedTuple):
    """Two duplicates side by side.

    Args:
        kept: the beginning of what is kept, or its name.
        dropped: of what is not.
        why: how similar they are.
    """

    kept: str
    dropped: str
    why: str = ""


class Deduplication(NamedTuple):
    """What was found.

    Args:
        rows: rows or tables that were compared.
        kept: of them.
        clusters: groups of two or more duplicates.
        sizes: (members of a group, groups of that size).
        examples: of duplicates.
        bad: rows or tables that could not be read.
        first_bad: where the first of these is.
        measured: further quantities.
        details: anything else, as JSON.
        files: what was written, name -> what it is.
    """

    rows: int
    kept: int
    clusters: int
    sizes: tuple[tuple[int, int], ...]
    examples: tuple[DuplicateExample, ...]
    bad: int
    first_bad: str
    measured: dict[str, float]
    details: dict[str, Any]
    files: dict[str, str]


@runtime_checkable
class Deduper(Protocol):
    """A part of kind ``deduper``: one way to find duplicates.

    Attributes:
        compared: what it compares.
    """

    compared: ClassVar[Compared]

    def estimate(self, work: DedupeWork, machine: Machine) -> Estimate:
        """Seconds of the whole search, and bytes of memory by cause."""

    def finds(self, work: DedupeWork) -> float:
        """Share of the pairs at the threshold that are found, by the method's arithmetic."""

    def candidates(self, work: DedupeWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here; nothing, if it is not."""

    def dedupe(self, problem: DedupeProblem) -> Deduplication:
        """Find duplicates, and write what is kept and why.

        Raises:
            DataError: the data cannot be read, or not be compared like that.
        """

"""ContainmentFinder: tables whose rows all occur in another, by sieves that cost more and more.

Source: Shah et al., R2D2: Reducing Redundancy and Duplication in Data Lakes, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from shoal.core.errors import ConfigError
from shoal.fields.data.lake.content import sampled_edges
from shoal.fields.data.lake.footers import RowSemantics, clashes, footer_edges
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.schema_graph import Edge, lake_schemas, schema_edges
from shoal.fields.data.lake.tables import Lake

SieveTick = Callable[[float, str], None]


class Sieve(Protocol):
    """One stage: keeps the edges that it cannot refute."""

    def __call__(
        self, queries: LakeQueries, edges: Sequence[Edge], tick: SieveTick
    ) -> list[Edge]: ...


class SieveCount(NamedTuple):
    """What a stage left.

    Args:
        name: of the stage.
        edges: that are left.
        bytes_read: by this stage.
    """

    name: str
    edges: int
    bytes_read: int


@dataclass
class Containments:
    """Which tables contain which.

    Args:
        edges: (parent, child), places in ``lake.tables``; of equal tables, both ways.
        exact: every row was compared; otherwise some edges may be false, and none is missing.
        stages: what each sieve left.
        touched: pairs of which rows were compared.
        problems: (tables, what could not be compared).
    """

    edges: list[Edge]
    exact: bool
    stages: list[SieveCount] = field(default_factory=list)
    touched: int = 0
    problems: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes_read(self) -> int:
        """Bytes of columns that were read, beside footers."""
        return sum(stage.bytes_read for stage in self.stages)


class ContainmentFinder:
    """Find the tables of a lake whose rows all occur in another table.

    A table is contained if its columns occur in the other by their normalized names, and each of
    its rows among the other's rows of these columns. NULL equals NULL, NaN equals NaN, and -0.0 is
    not 0.0, so that a contained table can be rebuilt bit by bit.

    Args:
        semantics: ``set``; or ``bag``, where a row that occurs n times in the child occurs n times
            in the parent.
        columns: of the child that are sampled.
        rows: of the child that are sampled; see :func:`~shoal.fields.data.lake.content.rows_for`.
        verify: ``sample``, or ``full`` to compare all rows of what the samples leave.
        types: columns match only with their kinds; otherwise a clash of kinds is reported.
        seed: of the samples.
        threads: of DuckDB.
        sieves: name -> stage, in the place of the footers and the samples.

    Raises:
        ConfigError: a number below 1.
    """

    def __init__(
        self,
        *,
        semantics: RowSemantics = "set",
        columns: int = 4,
        rows: int = 10,
        verify: Literal["sample", "full"] = "sample",
        types: bool = False,
        seed: int = 0,
        threads: int = 1,
        sieves: dict[str, Sieve] | None = None,
    ) -> None:
        for name, value in (("columns", columns), ("rows", rows), ("threads", threads)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: expected a number from 1 on")
        self.semantics, self.verify, self.types = semantics, verify, types
        self.columns, self.rows, self.seed, self.threads = columns, rows, seed, threads
        self.sieves = (
            sieves
            if sieves is not None
            else {
                "footers": self._footers,
                "samples": self._samples,
            }
        )

    def find(self, lake: Lake, tick: SieveTick = lambda done, text: None) -> Containments:
        """All containments of a lake.

        Args:
            lake: its tables.
            tick: called with (share done, what is done).

        Raises:
            DataError: a file cannot be read, or has changed.
            MissingExtraError: DuckDB is not installed.
        """
        tick(0.0, "schemas")
        first = schema_edges(lake_schemas(lake, types=self.types))
        result = Containments([], self.verify == "full", problems=list(lake.problems))
        result.stages.append(SieveCount("schemas", len(first.edges), 0))
        edges = []
        for parent, child in first.edges:
            wrong = clashes(lake.tables[parent], lake.tables[child])
            if wrong:
                names = f"{lake.tables[parent].name}, {lake.tables[child].name}"
                result.problems.append((names, "; ".join(wrong)))
            else:
                edges.append((parent, child))
        sieves: dict[str, Sieve] = dict(self.sieves)
        if self.verify == "full":
            sieves["all rows"] = self._all_rows
        with LakeQueries(lake, threads=self.threads) as queries:
            for at, (name, sieve) in enumerate(sieves.items()):

                def say(done: float, text: str, at: int = at) -> None:
                    tick((at + done) / len(sieves), text)

                before, given = queries.bytes_read, edges
                edges = sieve(queries, given, say)
                read = queries.bytes_read - before
                result.stages.append(SieveCount(name, len(edges), read))
                if read and not result.touched:
                    result.touched = len(given)
        result.edges = edges
        return result

    def _footers(self, queries: LakeQueries, edges: Sequence[Edge], tick: SieveTick) -> list[Edge]:
        tick(0.0, "footers")
        return footer_edges(queries.lake, edges, self.semantics)

    def _samples(self, queries: LakeQueries, edges: Sequence[Edge], tick: SieveTick) -> list[Edge]:
        return sampled_edges(
            queries,
            edges,
            columns=self.columns,
            rows=self.rows,
            seed=self.seed,
            tick=lambda done: tick(done, f"samples of {len(edges):,} pairs"),
        )

    def _all_rows(self, queries: LakeQueries, edges: Sequence[Edge], tick: SieveTick) -> list[Edge]:
        """Compare all rows; what follows from two edges that hold is not compared again."""
        tables = queries.lake.tables
        # The nearest sizes first: a chain of them spares the pairs between its ends.
        order = sorted(edges, key=lambda edge: tables[edge[0]].rows - tables[edge[1]].rows)
        parents: dict[int, set[int]] = {}
        children: dict[int, set[int]] = {}
        for done, (parent, child) in enumerate(order):
            between = children.get(parent, set()) & parents.get(child, set())
            if between or not queries.missing(tables[parent], tables[child], self.semantics):
                parents.setdefault(child, set()).add(parent)
                children.setdefault(parent, set()).add(child)
            tick((done + 1) / len(order), f"rows of {len(order):,} pairs")
        return [edge for edge in edges if edge[0] in parents.get(edge[1], ())]

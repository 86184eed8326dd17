"""Tables whose rows all occur in another, and which of them need not be kept.

Source: Shah et al., R2D2: Reducing Redundancy and Duplication in Data Lakes, 2023.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.errors import DataError
from shoal.core.files import write_atomic, write_json
from shoal.core.parts import part
from shoal.fields.data.curate.keeping import write_rows
from shoal.fields.data.dedupe.costs import lake_estimate
from shoal.fields.data.dedupe.protocols import (
    Compared,
    DedupeProblem,
    DedupeWork,
    Deduplication,
    DuplicateExample,
)
from shoal.fields.data.lake.finder import ContainmentFinder, Containments
from shoal.fields.data.lake.picture import lake_page
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.recipes import recipe_of
from shoal.fields.data.lake.retention import RetentionPlan, RetentionPlanner
from shoal.fields.data.lake.tables import Lake, open_lake
from shoal.fields.data.readers import arrow
from shoal.ir import Estimate, Machine

# Contained tables that are shown.
_EXAMPLES = 5


@part
class TableContainment:
    """Find tables that others contain, and choose those that can be rebuilt in time.

    Every table that need not be kept has a recipe, which has been executed and compared with the
    table bit by bit. Nothing is deleted.

    Args:
        semantics: ``set``; or ``bag``, where rows that repeat have to repeat in the parent.
        sample_columns: columns of a table that are sampled.
        sample_rows: rows of a table that are sampled.
        verify: ``full`` compares all rows of what the samples leave; after ``sample`` only the
            tables that would not be kept are.
        types: columns match only with their kinds; otherwise a clash of kinds is reported.
        latency_s: longest time that rebuilding a table may take.
        storage_usd: USD a GB and month.
        maintenance_usd: USD a table and month.
        accesses: of a table in a month, in the mean.
        compute_usd: USD an hour of a machine that rebuilds.
    """

    compared: ClassVar[Compared] = "tables"

    semantics: Literal["set", "bag"] = "set"
    sample_columns: Annotated[int, Ge(1)] = 4
    sample_rows: Annotated[int, Ge(1)] = 10
    verify: Literal["sample", "full"] = "full"
    types: bool = False
    latency_s: Annotated[float, Gt(0)] = 60.0
    storage_usd: Annotated[float, Ge(0)] = 0.023
    maintenance_usd: Annotated[float, Ge(0)] = 0.0
    accesses: Annotated[float, Ge(0)] = 0.1
    compute_usd: Annotated[float, Ge(0)] = 0.4

    def estimate(self, work: DedupeWork, machine: Machine) -> Estimate:
        """Footers, a few questions about each table, and reading what is contained."""
        return lake_estimate(work, machine, full=self.verify == "full")

    def finds(self, work: DedupeWork) -> float:
        """All: no sieve refutes a true containment."""
        return 1.0

    def candidates(self, work: DedupeWork, machine: Machine) -> Iterator[Self]:
        """Where there are several tables."""
        if work.tables > 1:
            yield self

    def dedupe(self, problem: DedupeProblem) -> Deduplication:
        """Find contained tables, and write recipes for those that need not be kept."""
        lake = open_lake(problem.where, tick=lambda done: problem.tick(0.1 * done, "footers"))
        finder = ContainmentFinder(
            semantics=self.semantics,
            columns=self.sample_columns,
            rows=self.sample_rows,
            verify=self.verify,
            types=self.types,
            seed=problem.seed,
            threads=problem.workers,
        )
        found = finder.find(lake, lambda done, text: problem.tick(0.1 + 0.6 * done, text))
        planner = RetentionPlanner(
            storage_usd=self.storage_usd,
            maintenance_usd=self.maintenance_usd,
            accesses=self.accesses,
            compute_usd=self.compute_usd,
            latency_s=self.latency_s,
        )
        plan, why = self._plan(problem, lake, found, planner)
        return _written(problem, lake, found, plan, why)

    def _plan(
        self, problem: DedupeProblem, lake: Lake, found: Containments, planner: RetentionPlanner
    ) -> tuple[RetentionPlan, dict[int, str]]:
        """A plan all of whose recipes hold; a pair whose recipe does not is not used."""
        sizes, edges = [table.num_bytes for table in lake.tables], list(found.edges)
        why: dict[int, str] = {}
        done: set[tuple[int, int]] = set()
        with LakeQueries(lake, threads=problem.workers) as queries:
            while True:
                plan, wrong = planner.plan(sizes, edges), False
                for child, parent in sorted(plan.rebuilt.items()):
                    if (parent, child) in done:
                        continue
                    try:
                        recipe = recipe_of(queries, lake.tables[parent], lake.tables[child])
                    except DataError as cause:
                        why[child] = str(cause)
                        edges.remove((parent, child))
                        wrong = True
                        continue
                    recipe.save(problem.place / "recipes" / f"{child:06}.parquet")
                    done.add((parent, child))
                    problem.tick(
                        0.7 + 0.3 * len(done) / max(len(plan.rebuilt), len(done)),
                        f"recipe {len(done)} of {len(plan.rebuilt)}",
                    )
                if not wrong:
                    return plan, {at: text for at, text in why.items() if at not in plan.rebuilt}


def _written(
    problem: DedupeProblem,
    lake: Lake,
    found: Containments,
    plan: RetentionPlan,
    why: dict[int, str],
) -> Deduplication:
    """Edges, what is kept, and the page."""
    pa, names = arrow(), [table.name for table in lake.tables]
    schema = pa.schema([("parent", pa.string()), ("child", pa.string()), ("exact", pa.bool_())])
    edges = pa.record_batch(
        [
            pa.array([names[u] for u, _ in found.edges], pa.string()),
            pa.array([names[v] for _, v in found.edges], pa.string()),
            pa.array(np.full(len(found.edges), found.exact)),
        ],
        schema=schema,
    )
    write_rows(problem.place / "edges.parquet", schema, iter([edges]))
    roots = np.array([plan.rebuilt.get(at, at) for at in range(len(names))], np.int64)
    schema = pa.schema([("table", pa.string()), ("cluster", pa.string()), ("kept", pa.bool_())])
    rows = pa.record_batch(
        [
            pa.array(names, pa.string()),
            pa.array([names[at] for at in roots], pa.string()),
            pa.array(roots == np.arange(len(names))),
        ],
        schema=schema,
    )
    write_rows(problem.place / "clusters.parquet", schema, iter([rows]))
    recipes: list[dict[str, Any]] = [
        {
            "table": names[child],
            "parent": names[parent],
            "columns": {
                column.name: lake.tables[parent].columns[name].name
                for name, column in lake.tables[child].columns.items()
            },
            "rows": f"recipes/{child:06}.parquet",
        }
        for child, parent in sorted(plan.rebuilt.items())
    ]
    write_json(
        problem.place / "retention.json",
        {
            "usd_a_month": plan.cost,
            "usd_a_month_if_all_are_kept": plan.all_kept,
            "recipes": recipes,
            "kept_though_contained": {names[at]: text for at, text in why.items()},
            "problems": [list(one) for one in found.problems],
        },
    )
    write_atomic(problem.place / "lake.html", lake_page(lake, plan, why))
    members = Counter(plan.rebuilt.values())
    examples = tuple(
        DuplicateExample(names[parent], names[child], f"{lake.tables[child].rows:,} rows")
        for child, parent in sorted(plan.rebuilt.items())[:_EXAMPLES]
    )
    unreadable = len(lake.problems)
    return Deduplication(
        rows=len(names),
        kept=len(plan.kept),
        clusters=len(members),
        sizes=tuple(sorted(Counter(1 + count for count in members.values()).items())),
        examples=examples,
        bad=unreadable,
        first_bad=": ".join(lake.problems[0]) if unreadable else "",
        measured={"compared_pairs": float(found.touched), "read_bytes": float(found.bytes_read)},
        details={
            "edges": len(found.edges),
            "stages": [stage._asdict() for stage in found.stages],
            "problems": [list(one) for one in found.problems[:20]],
            "usd_a_month": plan.cost,
            "usd_a_month_if_all_are_kept": plan.all_kept,
        },
        files={
            "edges.parquet": "pairs",
            "clusters.parquet": "kept or rebuilt",
            "retention.json": "recipes",
            "lake.html": "graph",
        },
    )

"""[73] R2D2: do three sieves find contained tables without comparing all pairs, and miss none?

Source: Shah et al., R2D2: Reducing Redundancy and Duplication in Data Lakes, 2023.

A lake grows from real tables of this machine by selecting, projecting, sampling, joining and
renaming, with near-misses of one changed cell. The baseline compares all rows of every pair whose
columns allow it, in DuckDB; what it finds is the truth. The A/A run has the baseline.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.r2d2_lake import grow_lake
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.fields.data.lake.finder import ContainmentFinder, Containments
from shoal.fields.data.lake.footers import clashes
from shoal.fields.data.lake.queries import LakeQueries
from shoal.fields.data.lake.schema_graph import Edge, lake_schemas, schema_edges
from shoal.fields.data.lake.tables import Lake, open_lake


@part
class R2D2Claim(BaseClaim, row=73, needs=("duckdb", "sklearn")):
    """The sieves of R2D2, and every pair whose columns allow it in DuckDB.

    Args:
        tables: of the lake.
        pairs: rounds of the timing.
    """

    tables: int = 300
    pairs: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Grow a lake, compare all of it, and sieve it."""
        count = 60 if run.quick else self.tables
        place, made = run.remember("lake", partial(_lake, Path(run.work_dir), count, run.seed))
        lake = open_lake(str(place))
        run.progress("comparing all pairs", 0.2)
        truth, all_bytes, compared = run.remember("truth", partial(_all_pairs, lake))
        run.progress("sieves", 0.5)
        sampled = run.remember("sampled", lambda: ContainmentFinder(seed=run.seed).find(lake))
        full = run.remember(
            "full", lambda: ContainmentFinder(seed=run.seed, verify="full").find(lake)
        )
        right = set(truth)
        n = len(lake.tables)
        run.put("touched", run.pick(sampled.touched / (n * (n - 1)), 1.0))
        run.put("bytes_read", run.pick(sampled.bytes_read / all_bytes, 1.0))
        run.put("recall", run.pick(_recall(sampled, right), 1.0))
        run.put("false_edges", run.pick(_false(sampled, right), 0.0))
        run.put("false_edges_full", run.pick(len(set(full.edges) ^ right), 0))
        run.details |= {
            "tables": n,
            "bytes": sum(table.num_bytes for table in lake.tables),
            "contained": len(right),
            "pairs_by_columns": compared,
            "made": made,
            "stages": [stage._asdict() for stage in full.stages],
        }
        if run.quick:
            return
        arms = {
            "method": partial(_seconds, lambda: ContainmentFinder(seed=run.seed).find(lake)),
            "baseline": partial(_seconds, lambda: _all_pairs(lake)),
        }
        seconds = run.turns(run.arms(arms), self.pairs)
        run.put("over_all_pairs", seconds["method"], seconds["baseline"])
        run.details["full_s"] = _seconds(
            lambda: ContainmentFinder(seed=run.seed, verify="full").find(lake)
        )


def _lake(place: Path, count: int, seed: int) -> tuple[Path, dict[str, int]]:
    """A lake that both runs read, and how its tables were made."""
    return place / "lake", grow_lake(place / "lake", count, seed=seed)


def _all_pairs(lake: Lake) -> tuple[list[Edge], int, int]:
    """What is contained, bytes that were read for it, and pairs that were compared."""
    edges = [
        (parent, child)
        for parent, child in schema_edges(lake_schemas(lake, types=False)).edges
        if not clashes(lake.tables[parent], lake.tables[child])
    ]
    with LakeQueries(lake) as queries:
        found = [
            (parent, child)
            for parent, child in edges
            if not queries.missing(lake.tables[parent], lake.tables[child], "set")
        ]
        return found, queries.bytes_read, len(edges)


def _seconds(run: object) -> float:
    begin = time.perf_counter()
    assert callable(run)
    run()
    return time.perf_counter() - begin


def _recall(found: Containments, truth: set[Edge]) -> float:
    return len(truth & set(found.edges)) / max(len(truth), 1)


def _false(found: Containments, truth: set[Edge]) -> float:
    """Share of the edges that are left and false."""
    return len(set(found.edges) - truth) / max(len(found.edges), 1)

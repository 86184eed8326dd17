"""Random rows: what every other choice has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.data.curate.costs import streaming
from shoal.fields.data.curate.keeping import kept_of, write_rows
from shoal.fields.data.curate.protocols import CurateProblem, CurateWork, Curation
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.sources import SourceShard
from shoal.ir import Estimate, Machine


@part
class RandomRows:
    """Keep each row with probability ``keep``, by its place and the seed alone."""

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Reading and writing."""
        return streaming(work, machine, write=work.keep)

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def curate(self, problem: CurateProblem) -> Curation:
        """Keep some rows of each shard."""
        return kept_of(problem, _some_rows, (problem.keep, problem.seed))


def _some_rows(shard: SourceShard, place: Path, shared: tuple[float, int]) -> dict[str, Any]:
    keep, seed = shared
    draw = generator(seed, purpose="curate", index=shard.number)
    bad, rows = BadRowCount(), 0

    def chosen() -> Iterator[Any]:
        nonlocal rows
        for batch in shard.batches(bad=bad):
            rows += batch.num_rows
            yield batch.filter(arrow().array(draw.random(batch.num_rows) < keep))

    kept = write_rows(place.with_suffix(".parquet"), arrow().schema(list(shard.fields)), chosen())
    return {
        "rows": rows,
        "kept": kept,
        "bad": bad.rows,
        "first_bad": bad.first,
        "stages": [["random", rows, rows - kept, []]],
    }

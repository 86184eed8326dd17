"""Writing the rows of a shard that are kept, and putting the shards of a curation together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.core.files import open_atomic
from shoal.fields.data.curate.protocols import CurateProblem, Curation, CurationStage
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards
from shoal.fields.data.sources import SourceShard

# Examples of what a stage dropped.
_EXAMPLES = 5


def write_rows(path: Path, schema: Any, batches: Iterator[Any]) -> int:
    """Rows as Parquet, whole or not at all.

    Args:
        path: of the file.
        schema: of the rows.
        batches: record batches or tables.

    Returns:
        Rows that were written.

    Raises:
        ShoalError: the file system refuses.
    """
    rows = 0
    with (
        open_atomic(path) as file,
        arrow("parquet").ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for batch in batches:
            rows += batch.num_rows
            if batch.num_rows:
                writer.write(batch)
    return rows


def kept_of(
    problem: CurateProblem,
    function: Callable[[SourceShard, Path, Any], dict[str, Any]],
    shared: Any,
) -> Curation:
    """Curate shard by shard.

    Args:
        problem: what to do.
        function: (shard, place, shared) -> ``rows``, ``kept``, ``bad``, ``first_bad`` and
            ``stages`` of the shard, each a list of the fields of :class:`CurationStage`. It writes
            what is kept to ``place`` with the ending ``.parquet``.
        shared: goes to every call.
    """
    bad = BadRowCount()
    shards = problem.source.shards(bad=bad)
    results = map_shards(
        function,
        shards,
        problem.place / "kept",
        pool=problem.pool,
        workers=problem.workers,
        shared=shared,
        tick=lambda done, total: problem.tick(done / max(total, 1), f"shard {done} of {total}"),
    )
    stages: dict[str, CurationStage] = {}
    for result in results:
        for fields in result.get("stages", ()):
            stage = CurationStage(*fields)
            before = stages.get(stage.name, CurationStage(stage.name, 0, 0))
            some = (*before.examples, *((text, why) for text, why in stage.examples))[:_EXAMPLES]
            stages[stage.name] = CurationStage(
                stage.name,
                before.rows + stage.rows,
                before.dropped + stage.dropped,
                some,
                dict(Counter(before.counts) + Counter(stage.counts)),
                before.seconds + stage.seconds,
            )
        bad.add(result["first_bad"], result["bad"])
    return Curation(
        rows=sum(result["rows"] for result in results),
        kept=sum(result["kept"] for result in results),
        bad=bad.rows,
        first_bad=bad.first,
        stages=tuple(stages.values()),
        measured={},
        details={},
    )

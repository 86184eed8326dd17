"""The rows of a table as examples, and writing those of them that are chosen."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.fields.data.curate.keeping import kept_of, write_rows
from shoal.fields.data.curate.protocols import CurateProblem, Curation
from shoal.fields.data.prune.examples import columns_of, embed_shard, gathered
from shoal.fields.data.prune.protocols import PruneExamples, RowIds, Scores
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards
from shoal.fields.data.sources import SourceShard

_VECTORS = "vectors"


@dataclass(frozen=True)
class ScoredRows:
    """The examples of a table, and where their rows are.

    Args:
        examples: in the order of the rows.
        classes: names of the classes.
        per_shard: rows of each shard.
    """

    examples: PruneExamples
    classes: list[str]
    per_shard: tuple[int, ...]

    def keep(self, problem: CurateProblem, name: str, scores: Scores, chosen: RowIds) -> Curation:
        """Write the rows that are chosen, and ``scores.parquet``.

        Args:
            problem: whose rows they are.
            name: of what has chosen.
            scores: float64 [n].
            chosen: sorted int64, numbers of rows.
        """
        _write_scores(problem.place / "scores.parquet", scores, chosen, self.examples, self.classes)
        parts = by_shard(chosen, self.per_shard)
        second = replace(problem, tick=lambda done, text: problem.tick(0.5 + done / 2, text))
        result = kept_of(second, write_chosen, (name, parts))
        shutil.rmtree(problem.place / _VECTORS)
        return result


def read_rows(problem: CurateProblem, label: str) -> ScoredRows:
    """The examples of a table, read shard by shard.

    Args:
        problem: whose rows they are.
        label: column of classes; empty for ``label``, if there is one.

    Raises:
        DataError: there are no vectors, no text, or no such label.
    """
    source, place = problem.source, problem.place / _VECTORS
    columns = columns_of(source.schema, problem.columns, label, source.where)
    shards = map_shards(
        embed_shard,
        source.shards(bad=BadRowCount()),
        place,
        pool=problem.pool,
        workers=problem.workers,
        shared=columns,
        tick=lambda done, total: problem.tick(0.4 * done / max(total, 1), "vectors"),
    )
    examples, names = gathered(shards, place, columns)
    return ScoredRows(examples, names, tuple(shard["rows"] for shard in shards))


def by_shard(chosen: RowIds, per_shard: Sequence[int]) -> list[RowIds]:
    """Numbers of rows within each shard.

    Args:
        chosen: sorted int64, numbers of rows of all shards.
        per_shard: rows of each shard.
    """
    ends = np.searchsorted(chosen, np.cumsum(per_shard))
    begins = np.cumsum((0, *per_shard[:-1]))
    return [part - begin for part, begin in zip(np.split(chosen, ends[:-1]), begins, strict=True)]


def taken(shard: SourceShard, rows: RowIds, bad: BadRowCount) -> Iterator[tuple[int, Any]]:
    """For each batch of a shard: its rows, and a batch of those that are chosen.

    Args:
        shard: is read whole.
        rows: sorted int64, numbers of rows of the shard.
        bad: counts what was passed over.
    """
    total = 0
    for batch in shard.batches(bad=bad):
        first, total = total, total + batch.num_rows
        inside = rows[np.searchsorted(rows, first) : np.searchsorted(rows, total)] - first
        yield batch.num_rows, batch.take(arrow().array(inside))


def write_chosen(
    shard: SourceShard, place: Path, shared: tuple[str, list[RowIds]]
) -> dict[str, Any]:
    """Write some rows of a shard; a function of :func:`~shoal.fields.data.shards.map_shards`.

    Args:
        shard: whose rows they are.
        place: of the file, which ends with ``.parquet``.
        shared: name of what has chosen, and the rows of each shard.
    """
    name, rows = shared[0], shared[1][shard.number]
    bad, total = BadRowCount(), 0

    def chosen() -> Iterator[Any]:
        nonlocal total
        for seen, batch in taken(shard, rows, bad):
            total += seen
            yield batch

    kept = write_rows(place.with_suffix(".parquet"), arrow().schema(list(shard.fields)), chosen())
    return {
        "rows": total,
        "kept": kept,
        "bad": bad.rows,
        "first_bad": bad.first,
        "stages": [[name, total, total - kept, []]],
    }


def _write_scores(
    path: Path, scores: Scores, chosen: RowIds, examples: PruneExamples, names: list[str]
) -> None:
    """Row, score, whether it is kept, and its class."""
    pa, kept, labels = arrow(), np.zeros(len(scores), bool), examples.y
    kept[chosen] = True
    columns = {"row": pa.array(np.arange(len(scores))), "score": pa.array(scores)}
    columns["kept"] = pa.array(kept)
    if labels is not None:
        columns["label"] = pa.array(names).take(pa.array(labels))
    batch = pa.record_batch(columns)
    write_rows(path, batch.schema, iter([batch]))

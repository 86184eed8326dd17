"""The passes that all methods over rows share: keys of every row, clusters, and what is kept.

A first pass over the shards writes keys of every row beside each other; rows of equal keys are
united; a last pass writes the rows that are kept. Of each row only its keys and the number of its
cluster are ever in memory.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import open_atomic
from shoal.fields.data.curate.keeping import write_rows
from shoal.fields.data.dedupe.protocols import DedupeProblem, Deduplication, DuplicateExample
from shoal.fields.data.minhash.lsh import KeyedRows, RowClusters, Rows
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards
from shoal.fields.data.sources import Source, SourceShard

# Pairs that are shown side by side, and characters of each.
_EXAMPLES, _SHOWN = 5, 300
# Rows of clusters.parquet that are written at a time.
_BLOCK = 1 << 20

KeysOfTexts = Callable[[Any, Any], tuple[Any, Any]]
"""(texts, shared) -> uint64 [bands, n] keys, and bool [n] which rows have any."""


class RowKeys(NamedTuple):
    """Keys of all rows, in files.

    Args:
        shards: of the source.
        begins: row with which each shard begins, and the rows of all.
        pieces: the keys of each shard, mapped.
        bad: rows that could not be read.
    """

    shards: list[SourceShard]
    begins: Rows
    pieces: list[KeyedRows]
    bad: BadRowCount

    @property
    def n(self) -> int:
        """Rows."""
        return int(self.begins[-1])


def source_rows(problem: DedupeProblem) -> Source:
    """The rows of a problem.

    Raises:
        DataError: it has none.
    """
    if problem.source is None:
        raise DataError(f"data = {problem.where!r}: rows of text are expected")
    return problem.source


def texts_of(batch: Any, columns: tuple[str, ...]) -> Any:
    """Large strings: the texts of a batch's rows, of several columns one after the other."""
    pa, compute = arrow(), arrow("compute")
    texts = [compute.fill_null(batch.column(name).cast(pa.large_string()), "") for name in columns]
    if len(texts) == 1:
        return texts[0]
    return compute.binary_join_element_wise(*texts, pa.scalar("\n", pa.large_string()))


def row_keys(
    problem: DedupeProblem, function: KeysOfTexts, shared: Any, *, until: float
) -> RowKeys:
    """The keys of every row, written shard by shard.

    Args:
        problem: what to do.
        function: at the top of a module: the keys of some texts.
        shared: goes to every call.
        until: share of the whole search that is done then.
    """
    bad = BadRowCount()
    shards = source_rows(problem).shards(bad=bad)
    place = problem.place / "keys"
    results = map_shards(
        _write_keys,
        shards,
        place,
        pool=problem.pool,
        workers=problem.workers,
        shared=(function, shared, problem.texts),
        tick=lambda done, total: problem.tick(
            until * done / max(total, 1), f"keys of shard {done} of {total}"
        ),
    )
    begins = np.cumsum([0, *(result["rows"] for result in results)], dtype=np.int64)
    pieces = []
    for at, result in enumerate(results):
        bad.add(result["first_bad"], result["bad"])
        name = place / f"{at:06}"
        keys = np.load(name.with_suffix(".keys.npy"), mmap_mode="r")
        rows = np.load(name.with_suffix(".rows.npy"))
        pieces.append(KeyedRows(keys, rows.astype(np.int64) + begins[at]))
    return RowKeys(shards, begins, pieces, bad)


def _write_keys(
    shard: SourceShard, place: Path, shared: tuple[KeysOfTexts, Any, tuple[str, ...]]
) -> dict[str, Any]:
    function, options, columns = shared
    bad, rows = BadRowCount(), 0
    keys, places = [], []
    for batch in shard.batches(bad=bad):
        some, has = function(texts_of(batch, columns), options)
        inside = np.flatnonzero(has)
        keys.append(some if len(inside) == batch.num_rows else some[:, inside])
        places.append((rows + inside).astype(np.uint32))
        rows += batch.num_rows
    if not keys:
        some, _ = function(arrow().array([], arrow().large_string()), options)
        keys, places = [some], [np.empty(0, np.uint32)]
    save(place.with_suffix(".keys.npy"), np.concatenate(keys, axis=1))
    save(place.with_suffix(".rows.npy"), np.concatenate(places))
    return {"rows": rows, "bad": bad.rows, "first_bad": bad.first}


def save(path: Path, array: Any) -> None:
    """Write an array, whole or not at all."""
    with open_atomic(path, error=DataError) as file:
        np.save(file, array)


def kept_rows(
    problem: DedupeProblem, keys: RowKeys, clusters: RowClusters, details: dict[str, Any]
) -> Deduplication:
    """Write the first row of each cluster, and which row is in which.

    Args:
        problem: what was done.
        keys: of all rows; their files are removed at the end.
        clusters: what was found.
        details: of the search.
    """
    roots = clusters.roots()
    save(problem.place / "keys" / "roots.npy", roots)
    own = roots == np.arange(keys.n)
    members = np.bincount(roots[~own], minlength=keys.n) if keys.n else np.empty(0, np.int64)
    several = members[members > 0] + 1
    sizes = tuple(sorted(Counter(several.tolist()).items()))
    # Of the first clusters, the first that is dropped beside what is kept.
    dropped = np.flatnonzero(~own)
    _, first = np.unique(roots[dropped], return_index=True)
    pairs = [(int(roots[row]), int(row)) for row in dropped[np.sort(first)[:_EXAMPLES]]]
    wanted = sorted({row for pair in pairs for row in pair})
    results = map_shards(
        _write_kept,
        list(zip(keys.shards, keys.begins.tolist(), strict=False)),
        problem.place / "kept",
        pool=problem.pool,
        workers=problem.workers,
        shared=(problem.place / "keys" / "roots.npy", problem.texts, wanted),
        tick=lambda done, total: problem.tick(
            0.75 + 0.25 * done / max(total, 1), f"writing shard {done} of {total}"
        ),
    )
    for at, result in enumerate(results):
        if result["rows"] != keys.begins[at + 1] - keys.begins[at]:
            raise DataError(
                f"{problem.where}: has changed while it was read: shard {at} had "
                f"{keys.begins[at + 1] - keys.begins[at]} rows and has {result['rows']}; run again"
            )
    texts = {int(row): text for result in results for row, text in result["texts"]}
    _write_clusters(problem.place / "clusters.parquet", roots)
    shutil.rmtree(problem.place / "keys")
    return Deduplication(
        rows=keys.n,
        kept=int(own.sum()),
        clusters=len(several),
        sizes=sizes,
        examples=tuple(
            DuplicateExample(texts[kept], texts[row], f"rows {kept:,} and {row:,}")
            for kept, row in pairs
        ),
        bad=keys.bad.rows,
        first_bad=keys.bad.first,
        measured={"compared_pairs": float(clusters.compared)} if clusters.compared else {},
        details=details,
        files={"kept": "kept", "clusters.parquet": "clusters"},
    )


def _write_kept(
    numbered: tuple[SourceShard, int], place: Path, shared: tuple[Path, tuple[str, ...], list[int]]
) -> dict[str, Any]:
    (shard, begin), (file, columns, wanted) = numbered, shared
    roots = np.load(file, mmap_mode="r")
    bad, at = BadRowCount(), begin
    texts: list[tuple[int, str]] = []

    def own() -> Iterator[Any]:
        nonlocal at
        for batch in shard.batches(bad=bad):
            rows = np.arange(at, at + batch.num_rows)
            some = [row for row in wanted if at <= row < at + batch.num_rows]
            if some:
                shown = texts_of(batch, columns)
                texts.extend((row, shown[row - at].as_py()[:_SHOWN]) for row in some)
            mine = roots[at : at + batch.num_rows] == rows[: max(len(roots) - at, 0)]
            at += batch.num_rows
            if len(mine) == batch.num_rows:
                yield batch.filter(arrow().array(mine))

    kept = write_rows(place.with_suffix(".parquet"), arrow().schema(list(shard.fields)), own())
    return {"rows": at - begin, "kept": kept, "texts": texts}


def _write_clusters(path: Path, roots: Rows) -> None:
    """Row, cluster, and whether the row is kept."""
    pa = arrow()
    schema = pa.schema([("row", pa.int64()), ("cluster", pa.int64()), ("kept", pa.bool_())])

    def blocks() -> Iterator[Any]:
        for at in range(0, len(roots), _BLOCK):
            some = roots[at : at + _BLOCK]
            rows = np.arange(at, at + len(some))
            yield pa.record_batch([pa.array(x) for x in (rows, some, rows == some)], schema=schema)

    write_rows(path, schema, blocks())

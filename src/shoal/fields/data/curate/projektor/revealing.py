"""The rows of several sources: counted by source, drawn, and read where they are revealed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.core.files import open_atomic
from shoal.core.random import generator
from shoal.fields.data.curate.protocols import CurateProblem
from shoal.fields.data.prune.examples import LABEL, PruneColumns, columns_of, embed_shard, gathered
from shoal.fields.data.prune.protocols import PruneError, PruneExamples, RowIds
from shoal.fields.data.prune.scored_rows import by_shard, taken
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards
from shoal.fields.data.sources import ROWS, Source, SourceShard

SOURCE = "source"
"""Column of sources, where the user names none."""


class NamedRows(NamedTuple):
    """Vectors with the names of their classes.

    Args:
        X: float32 [n, d].
        names: [n] of the classes.
    """

    X: npt.NDArray[np.float32]
    names: npt.NDArray[np.str_]

    def take(self, rows: Any) -> NamedRows:
        """Some of them."""
        return NamedRows(self.X[rows], self.names[rows])


@dataclass(frozen=True)
class SourceRows:
    """Which source each row is of; nothing else is known of the rows.

    Args:
        names: of the sources.
        codes: int64 [n], the sources of the rows.
        per_shard: rows of each shard.
        columns: that make up an example.
    """

    names: list[str]
    codes: RowIds
    per_shard: tuple[int, ...]
    columns: PruneColumns

    @classmethod
    def counted(cls, problem: CurateProblem, column: str, label: str) -> SourceRows:
        """Read the sources of all rows.

        Args:
            problem: whose rows they are.
            column: of sources; empty for ``source``, if there is one, and else the files.
            label: column of classes; empty for ``label``.

        Raises:
            PruneError: there is no such column, or one source only.
        """
        source = problem.source
        known = source.schema.names
        if column and column not in known:
            raise PruneError(
                f"{source.where}: method.source: there is no {column!r}; it has "
                f"{', '.join(known[:20])}"
            )
        column = column or (SOURCE if SOURCE in known else "")
        columns = _columns(source, problem.columns, label, column)
        place = problem.place / "revealed" / "sources"
        results = map_shards(
            _count,
            source.shards(bad=BadRowCount()),
            place,
            pool=problem.pool,
            workers=problem.workers,
            shared=(column, source.where),
            tick=lambda done, total: problem.tick(0.1 * done / max(total, 1), "counting sources"),
        )
        names = sorted({name for result in results for name in result["sources"]})
        if len(names) < 2:
            raise PruneError(
                f"{source.where}: {len(names)} source; expected two or more: several files, or "
                "a column that method.source names"
            )
        at = {name: number for number, name in enumerate(names)}
        codes = [
            np.array([at[name] for name in result["sources"]])[_load(place / f"{number:06}.npy")]
            for number, result in enumerate(results)
            if result["rows"]
        ]
        return cls(
            _short(names),
            np.concatenate(codes),
            tuple(result["rows"] for result in results),
            columns,
        )

    @property
    def sizes(self) -> list[int]:
        """Rows of each source."""
        return [int(n) for n in np.bincount(self.codes, minlength=len(self.names))]

    def drawn(self, counts: Sequence[int] | RowIds, seed: int) -> RowIds:
        """Sorted int64: so many random rows of each source; more of them include fewer.

        Raises:
            PruneError: a source does not have so many.
        """
        some = []
        for number, (name, have, count) in enumerate(
            zip(self.names, self.sizes, counts, strict=True)
        ):
            if have < count:
                raise PruneError(
                    f"source {name!r}: it has {have} rows, and {count} are wanted; give a smaller "
                    "method.larger, or leave the source out"
                )
            draw = generator(seed, purpose="projektor rows", index=number)
            some.append(draw.permutation(np.flatnonzero(self.codes == number))[:count])
        return np.sort(np.concatenate(some))

    def read(self, problem: CurateProblem, chosen: RowIds, name: str) -> NamedRows:
        """The examples of some rows.

        Args:
            problem: whose rows they are.
            chosen: sorted int64, numbers of rows.
            name: of what is read; its files lie below ``revealed``.

        Raises:
            DataError: one of these rows has no numbers, or no class.
        """
        shards = [
            _PartOfShard(one.form, one.piece, one.fields, one.bad, one.number, rows=rows)
            for one, rows in zip(
                problem.source.shards(bad=BadRowCount()),
                by_shard(chosen, self.per_shard),
                strict=True,
            )
        ]
        return _read(problem, shards, self.columns, name)

    def read_validation(self, problem: CurateProblem, other: Source) -> NamedRows:
        """All examples of another table with the same columns.

        Raises:
            DataError: it cannot be read, or has other columns.
        """
        chosen = self.columns.vectors or (self.columns.text,)
        columns = _columns(other, chosen, self.columns.label, "")
        return _read(problem, other.shards(bad=BadRowCount()), columns, "validation")


@dataclass(frozen=True, kw_only=True)
class _PartOfShard(SourceShard):
    """Some rows of a shard.

    Args:
        rows: sorted int64, their numbers within the shard.
    """

    rows: RowIds

    def batches(self, rows: int = ROWS, *, bad: BadRowCount | None = None) -> Iterator[Any]:
        """Batches without the other rows."""
        whole = SourceShard(self.form, self.piece, self.fields, self.bad, self.number)
        for _, batch in taken(whole, self.rows, bad if bad is not None else BadRowCount()):
            yield batch


def examples_of(*sets: NamedRows) -> list[PruneExamples]:
    """The same rows with classes that have the same numbers in all sets."""
    names, codes = np.unique(np.concatenate([one.names for one in sets]), return_inverse=True)
    parts = np.split(codes.astype(np.int64), np.cumsum([len(one.names) for one in sets])[:-1])
    return [PruneExamples(one.X, part, len(names)) for one, part in zip(sets, parts, strict=True)]


def _columns(source: Source, chosen: Sequence[str], label: str, other: str) -> PruneColumns:
    """What makes up an example, which the column ``other`` does not."""
    schema = arrow().schema([one for one in source.schema if one.name != other])
    columns = columns_of(schema, chosen, label, source.where)
    if not columns.label:
        raise PruneError(
            f"{source.where}: no column {LABEL!r}; name the column of classes with method.label"
        )
    return columns


def _count(shard: SourceShard, place: Path, shared: tuple[str, str]) -> dict[str, Any]:
    """The source of each row of a shard, to ``place`` with the ending ``.npy``."""
    column, where = shared
    names: dict[str, int] = {}
    codes = [np.empty(0, np.int64)]
    for batch in shard.batches(bad=BadRowCount()):
        if not column:
            codes.append(np.full(batch.num_rows, names.setdefault(shard.piece.url, 0)))
            continue
        if batch.column(column).null_count:
            raise PruneError(
                f"{where}: method.source: rows without {column!r}; fill or remove them"
            )
        encoded = batch.column(column).cast(arrow().string()).dictionary_encode()
        known = [names.setdefault(name, len(names)) for name in encoded.dictionary.to_pylist()]
        codes.append(np.array(known, np.int64)[encoded.indices.to_numpy()])
    joined = np.concatenate(codes)
    with open_atomic(place.with_name(f"{place.name}.npy")) as file:
        np.save(file, joined, allow_pickle=False)
    return {"rows": len(joined), "sources": list(names)}


def _read(
    problem: CurateProblem, shards: Sequence[SourceShard], columns: PruneColumns, name: str
) -> NamedRows:
    place = problem.place / "revealed" / name
    results = map_shards(
        embed_shard, shards, place, pool=problem.pool, workers=problem.workers, shared=columns
    )
    examples, names = gathered(results, place, columns)
    return NamedRows(examples.X, np.array(names)[examples.labels])


def _short(names: list[str]) -> list[str]:
    """Names of files without their directories, unless these tell them apart."""
    last = [name.rpartition("/")[2] for name in names]
    return last if len(set(last)) == len(names) and all(last) else names


def _load(path: Path) -> RowIds:
    codes: RowIds = np.load(path, allow_pickle=False)
    return codes

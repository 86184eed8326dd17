"""A datastore that is open: its shards, its passages, and what a query gets of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from shoal.core.files import expanded
from shoal.core.parts import Choice, table
from shoal.fields.retrieve.datastore.passages import FILE, LENGTH, PassageMap, TextFile
from shoal.fields.retrieve.datastore.protocols import (
    BuiltPassageIndex,
    CorpusCounts,
    DatastoreError,
    Passage,
    PassageIndex,
    RankedLists,
    RetrievalOptions,
    best_of,
    padded,
)

VERSION = 1
MANIFEST, PASSAGES, SHARDS = "datastore.json", "passages.npy", "shards"
# Queries that all shards answer before the next.
_AT_ONCE = 64


@dataclass(frozen=True)
class Datastore:
    """Passages of text files, indexed in shards.

    Source: Shao et al., Scaling Retrieval-Based Language Models with a Trillion-Token Datastore,
    2024.

    Args:
        directory: of it.
        manifest: what ``datastore.json`` says.
        passages: where they lie.
        shards: (index, number of its first passage) of each shard.
    """

    directory: Path
    manifest: dict[str, Any]
    passages: PassageMap
    shards: Sequence[tuple[BuiltPassageIndex, int]]

    @classmethod
    def open(cls, directory: str | Path, *, threads: int = 1) -> Self:
        """Open a datastore; its map stays on disk, and so do indexes that can be mapped.

        Args:
            directory: where it was built.
            threads: of a search.

        Raises:
            DatastoreError: there is none, it is not whole, or it is damaged.
        """
        place = expanded(directory)
        try:
            manifest = json.loads((place / MANIFEST).read_bytes())
            if manifest["version"] != VERSION:
                raise DatastoreError(
                    f"{place}: a datastore of version {manifest['version']}; expected {VERSION}"
                )
            rows = np.load(place / PASSAGES, mmap_mode="r", allow_pickle=False)
            files = [TextFile(name, Path(path)) for name, path, _ in manifest["files"]]
            sizes = [int(size) for _, _, size in manifest["files"]]
            choice = Choice.model_validate(manifest["method"])
            ends = [(int(one["begin"]), int(one["end"])) for one in manifest["shards"]]
            broken = rows.ndim != 2 or rows.shape != (manifest["passages"], 5)
            broken |= [begin for begin, _ in ends] != [0, *(end for _, end in ends[:-1])]
            if broken or rows.dtype != np.int64 or ends[-1][1] != len(rows):
                raise DatastoreError(f"{place}: shards of other passages; build it again")
            if rows[:, FILE].min() < 0 or rows[:, FILE].max() >= len(files):
                raise DatastoreError(f"{place / PASSAGES}: passages of no file; build it again")
        except FileNotFoundError as cause:
            raise DatastoreError(
                f"{place}: no datastore, or one whose build was stopped ({cause.filename} is not "
                "there); build it with shoal run datastore"
            ) from cause
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as cause:
            raise DatastoreError(
                f"{place}: damaged ({cause!r}); build the datastore again"
            ) from cause
        part: PassageIndex = table("passage_index").build(choice, where=str(place))
        shards = [
            (part.open(place / SHARDS / f"{at:06}", threads=threads), begin)
            for at, (begin, _) in enumerate(ends)
        ]
        return cls(place, manifest, PassageMap(files, sizes, rows), shards)

    def __len__(self) -> int:
        return len(self.passages)

    @cached_property
    def counts(self) -> CorpusCounts:
        """Passages, and their words as the index counts them."""
        return CorpusCounts(len(self), sum(int(one["words"]) for one in self.manifest["shards"]))

    @property
    def num_bytes(self) -> int:
        """Bytes of its files, the texts not among them."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    def search(self, texts: Sequence[str], k: int) -> RankedLists:
        """The best passages of all shards for each query, equal ones by their number.

        Args:
            texts: queries.
            k: passages of each.

        Raises:
            ShoalError: a query cannot be embedded.
        """
        k = min(k, len(self))
        pieces = [
            self._search(texts[at : at + _AT_ONCE], k) for at in range(0, len(texts), _AT_ONCE)
        ]
        if not pieces:
            return RankedLists(np.empty((0, k), np.int64), np.empty((0, k)))
        return RankedLists(
            np.concatenate([one.ids for one in pieces]),
            np.concatenate([one.scores for one in pieces]),
        )

    def _search(self, texts: Sequence[str], k: int) -> RankedLists:
        having = [index.frequencies(texts) for index, _ in self.shards]
        frequencies = np.sum(having, axis=0)
        ids, scores = [], []
        for index, begin in self.shards:
            found = index.search(texts, k, self.counts, frequencies)
            ids.append(np.where(found.ids < 0, -1, found.ids + begin))
            scores.append(found.scores)
        rows = []
        for some, of in zip(np.hstack(ids), np.hstack(scores), strict=True):
            there = some >= 0
            rows.append(best_of(some[there], of[there], k))
        return padded(rows, k)

    def retrieve(
        self,
        texts: Sequence[str],
        k: int = 3,
        *,
        against: Sequence[str] | None = None,
        options: RetrievalOptions | None = None,
    ) -> list[list[Passage]]:
        """The first k passages of each query after all steps, the best first.

        Args:
            texts: queries.
            k: passages of each.
            against: text that is judged, one for each query, which no passage may repeat; None
                where nothing is judged.
            options: of the steps; ``k`` is that of the call.

        Raises:
            DatastoreError: fewer passages are searched than are wanted.
            ShoalError: a query cannot be embedded, or a file has changed.
        """
        from shoal.fields.retrieve.datastore.sweep import StoreSweep

        given = (options or RetrievalOptions()).model_dump() | {"k": k}
        if options is None:
            given["depth"] = max(given["depth"], k)
        asked = RetrievalOptions.model_validate(given)
        sweep = StoreSweep(self, texts, against=against, options=asked)
        lists = sweep.first(asked.share, asked.seed).lists
        return [
            [
                self.passage(int(one), score)
                for one, score in zip(ids, scores, strict=True)
                if one >= 0
            ]
            for ids, scores in zip(lists.ids, lists.scores.tolist(), strict=True)
        ]

    def passage(self, number: int, score: float = 0.0) -> Passage:
        """A passage by its number.

        Raises:
            DatastoreError: its file has changed.
        """
        file, offset, length = map(int, self.passages.rows[number, : LENGTH + 1])
        (text,) = self.passages.texts([number])
        return Passage(number, self.passages.files[file].name, offset, length, score, text)

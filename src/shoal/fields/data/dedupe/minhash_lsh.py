"""MinHash with locality-sensitive hashing: documents that share most of their shingles.

Source: Broder, On the Resemblance and Containment of Documents, 1997; Indyk, Motwani, Approximate
Nearest Neighbors, 1998. Signatures and bands are those of datasketch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import ConfigError
from shoal.core.parts import part
from shoal.fields.data.dedupe.costs import row_estimate, shingles_of
from shoal.fields.data.dedupe.passes import RowKeys, kept_rows, row_keys, save, texts_of
from shoal.fields.data.dedupe.protocols import Compared, DedupeProblem, DedupeWork, Deduplication
from shoal.fields.data.minhash.hasher import MinHasher, Scheme
from shoal.fields.data.minhash.lsh import (
    Bands,
    RowClusters,
    ShingleSets,
    band_keys,
    candidate_rows,
    collision,
    optimal_bands,
    sorted_runs,
)
from shoal.fields.data.readers import BadRowCount
from shoal.fields.data.shards import map_shards
from shoal.fields.data.sources import SourceShard
from shoal.ir import Estimate, Machine


class HasherOptions(NamedTuple):
    """What makes a hasher, and the cut of its signatures; goes to other processes."""

    num_perm: int
    seed: int
    unit: Literal["words", "characters"]
    ngram: int
    scheme: Scheme
    cut: Bands

    def hasher(self) -> MinHasher:
        """The hasher."""
        return MinHasher(
            self.num_perm, seed=self.seed, unit=self.unit, ngram=self.ngram, scheme=self.scheme
        )


@part
class MinHashLSH:
    """Keep one of the documents that share a band of their MinHash signatures.

    A document without a word is kept: it resembles none. With ``verify``, the Jaccard similarity of
    the shingles decides about each pair that shares a band: a document is compared with the first
    of each group that has its band so far.

    Args:
        num_perm: hash functions of a signature.
        bands: bands of a signature; 0, with ``rows: 0``, for those that datasketch would choose.
        rows: slots of a band.
        verify: compare the shingles of documents that share a band.
        scheme: the hash functions: ``affine32``, of datasketch since its version 2; ``legacy``, of
            datasketch before; or ``datatrove``, of datatrove with 32 bits of SHA-1 and of
            text-dedup.
        memory_mb: MB that sorting may use; the keys are read several times where they need more.
    """

    compared: ClassVar[Compared] = "rows"

    num_perm: Annotated[int, Ge(1), Le(65_536)] = 128
    bands: Annotated[int, Ge(0), Le(65_536)] = 0
    rows: Annotated[int, Ge(0), Le(65_536)] = 0
    verify: bool = False
    scheme: Literal["affine32", "legacy", "datatrove"] = "affine32"
    memory_mb: Annotated[int, Ge(1)] = 2000

    def cut(self, threshold: float) -> Bands:
        """The bands: as given, or with the least error at a threshold.

        Raises:
            ConfigError: they need more slots than there are, or only one of the two is given.
        """
        if not self.bands and not self.rows:
            return optimal_bands(threshold, self.num_perm)
        if not self.bands or not self.rows or self.bands * self.rows > self.num_perm:
            raise ConfigError(
                f"minhash: bands = {self.bands}, rows = {self.rows}: expected both from 1 on and "
                f"bands times rows at most num_perm = {self.num_perm}; or both 0"
            )
        return Bands(self.bands, self.rows)

    def estimate(self, work: DedupeWork, machine: Machine) -> Estimate:
        """Reading twice, shingles, their images, sorting each band, writing."""
        cut, shingles = self.cut(work.threshold), shingles_of(work)
        compute = shingles / work.rates.shingles + shingles * self.num_perm / work.rates.slots
        if self.verify:  # the shingles of candidates, once more
            compute += 0.3 * (shingles / work.rates.shingles + work.size * work.reading.read_s)
        return row_estimate(
            work,
            machine,
            compute_s=compute,
            bands=cut.bands,
            key_bytes=min(40.0, 1e6 * self.memory_mb / max(work.rows, 1.0)),
        )

    def finds(self, work: DedupeWork) -> float:
        """Probability that a pair of the threshold's similarity shares a band."""
        return collision(work.threshold, self.cut(work.threshold))

    def candidates(self, work: DedupeWork, machine: Machine) -> Iterator[Self]:
        """Where documents need not be equal."""
        if work.threshold < 1:
            yield self

    def dedupe(self, problem: DedupeProblem) -> Deduplication:
        """Unite documents that share a band."""
        cut = self.cut(problem.threshold)
        options = HasherOptions(
            self.num_perm, problem.seed, problem.unit, problem.ngram, self.scheme, cut
        )
        keys = row_keys(problem, _keys, options, until=0.6)
        clusters, memory = RowClusters(keys.n), 1e6 * self.memory_mb
        sets = self._sets(problem, keys, options) if self.verify else None
        for done, some, rows in sorted_runs(keys.pieces, memory):
            if sets is None:
                clusters.unite_equal(some, rows)
            else:
                clusters.unite_similar(some, rows, sets, problem.threshold)
            problem.tick(0.65 + 0.1 * done, "bands")
        without = keys.n - sum(len(piece.rows) for piece in keys.pieces)
        return kept_rows(
            problem, keys, clusters, {"bands": cut.bands, "rows": cut.rows, "empty": without}
        )

    def _sets(self, problem: DedupeProblem, keys: RowKeys, options: HasherOptions) -> ShingleSets:
        """The shingles of every row that shares a band with another."""
        memory = 1e6 * self.memory_mb
        rows = candidate_rows(
            keys.pieces, keys.n, memory, lambda done: problem.tick(0.6, "candidates")
        )
        place = problem.place / "keys"
        save(place / "candidates.npy", rows)
        map_shards(
            _write_sets,
            list(zip(keys.shards, keys.begins.tolist(), strict=False)),
            place / "sets",
            pool=problem.pool,
            workers=problem.workers,
            shared=(place / "candidates.npy", problem.texts, options),
            tick=lambda done, total: problem.tick(
                0.6 + 0.05 * done / max(total, 1), f"shingles of shard {done} of {total}"
            ),
        )
        pieces = []
        for at in range(len(keys.shards)):
            name = place / "sets" / f"{at:06}"
            mine = np.flatnonzero(rows[keys.begins[at] : keys.begins[at + 1]]) + keys.begins[at]
            hashes = np.load(name.with_suffix(".sets.npy"), mmap_mode="r" if len(mine) else None)
            pieces.append((mine, hashes, np.load(name.with_suffix(".ends.npy"))))
        return ShingleSets(keys.n, pieces)


def _keys(texts: Any, options: HasherOptions) -> tuple[Any, Any]:
    signatures, shingles = options.hasher().signatures(texts)
    return band_keys(signatures, options.cut), shingles > 0


def _write_sets(
    numbered: tuple[SourceShard, int],
    place: Path,
    shared: tuple[Path, tuple[str, ...], HasherOptions],
) -> dict[str, Any]:
    (shard, at), (file, columns, options) = numbered, shared
    wanted = np.load(file, mmap_mode="r")
    hasher, taken = options.hasher(), 0
    sets, ends = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for batch in shard.batches(bad=BadRowCount()):
        some = np.flatnonzero(wanted[at : at + batch.num_rows])
        at += batch.num_rows
        if len(some):
            found, last = hasher.shingle_sets(texts_of(batch.take(some), columns))
            sets.append(found)
            ends.append(last + taken)
            taken += len(found)
    save(place.with_suffix(".sets.npy"), np.concatenate(sets))
    save(place.with_suffix(".ends.npy"), np.concatenate(ends))
    return {"shingles": taken}

"""OSQ over vectors that are larger than memory should hold: time, memory and recall.

Usage: python benchmarks/filtered_vectors.py [--vectors N] [--parts P] [--dir DIR] [--dry]

Vectors of 128 numbers are drawn in blocks around 4,000 centres, with energy that falls from axis to
axis, and written as uint8; the index reads them from the file. Queries have four uniform attributes
of which 8 % of the rows pass; the truth is found by comparing every such row, block by block. With
``--dry`` nothing is recorded.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import reduce
from operator import and_
from pathlib import Path

import numpy as np
from common import Row, record

from shoal.core.random import generator
from shoal.fields.retrieve.collections.filters import col
from shoal.fields.retrieve.index import OSQIndex
from shoal.fields.retrieve.index.osq.files import load_index, save_index
from shoal.machine.host import peak_memory

DIM, CENTRES, BLOCK, K, ATTRIBUTES, SELECTIVITY = 128, 4000, 1 << 18, 10, 4, 0.08


def block(at: int, count: int) -> np.ndarray:
    """Vectors of a block, uint8 [count, DIM]."""
    centres = generator(0, purpose="centres").normal(0, 24, (CENTRES, DIM)).astype(np.float32)
    spread = (40 / np.sqrt(1 + np.arange(DIM, dtype=np.float32) / 8)).astype(np.float32)
    draw = generator(0, purpose="rows", index=at)
    rows = centres[draw.integers(0, CENTRES, count)]
    rows += draw.standard_normal((count, DIM), np.float32) * spread
    return np.clip(rows + 128, 0, 255).astype(np.uint8)


def write_vectors(path: Path, count: int) -> np.ndarray:
    """A file of vectors, memory-mapped."""
    rows = np.lib.format.open_memmap(path, "w+", np.uint8, (count, DIM))
    for at in range(0, count, BLOCK):
        rows[at : at + BLOCK] = block(at, min(BLOCK, count - at))
    rows.flush()
    del rows
    return np.load(path, mmap_mode="r")


def truth(vectors: np.ndarray, query: np.ndarray, passed: np.ndarray) -> float:
    """Squared distance of the k-th neighbour among the rows that pass."""
    rows, apart = np.flatnonzero(passed), []
    for at in range(0, len(rows), BLOCK):
        some = vectors[rows[at : at + BLOCK]].astype(np.float32) - query
        apart.append(np.sort(np.einsum("nd,nd->n", some, some))[:K])
    return float(np.sort(np.concatenate(apart))[K - 1])


def main() -> None:
    """Generate, build, save, load, search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vectors", type=int, default=10_000_000)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--queries", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.dir) as place:
        begin = time.perf_counter()
        vectors = write_vectors(Path(place) / "vectors.npy", given.vectors)
        print(f"wrote {given.vectors:,} vectors in {time.perf_counter() - begin:.0f} s", flush=True)
        draw = generator(0, purpose="attributes")
        values = {f"a{j}": draw.random(given.vectors, np.float32) for j in range(ATTRIBUTES)}
        index, begin = OSQIndex(4, given.parts), time.perf_counter()
        index.build(vectors, attributes=values, threads=given.threads)
        build_s = time.perf_counter() - begin
        sizes = index.memory()
        print(f"built in {build_s:.0f} s; bytes {sizes}", flush=True)
        saved = save_index(index, Path(place) / "osq")
        del index
        index = load_index(saved)
        queries, width = block(1 << 40, given.queries).astype(np.float32), SELECTIVITY**0.25
        seconds, found, exact = [], 0, 0
        for query in queries:
            low = draw.random(ATTRIBUTES) * (1 - width)
            where = reduce(
                and_, (col(f"a{j}").between(low[j], low[j] + width) for j in range(ATTRIBUTES))
            )
            last = truth(vectors, query, index.filter(where)) * (1 + 1e-5)
            options = {"beta": 1.3, "keep": 0.1, "rerank": 4.0}
            index.search(query, K, where=where, **options)  # pages of the file are in memory
            begin = time.perf_counter()
            hits = index.search(query, K, where=where, **options)
            seconds.append(time.perf_counter() - begin)
            found += int((hits.distances[0] <= last).sum())
            hits = index.search(query, K, where=where, mode="exact")
            exact += int((hits.distances[0] <= last).sum())
        share, most = found / (K * given.queries), peak_memory() / 1e9
        query_s = float(np.median(seconds))
        print(
            f"recall {share:.3f} (exact mode {exact / (K * given.queries):.3f}), "
            f"{query_s * 1e3:.2f} ms a query, {most:.1f} GB at most"
        )
    note = f"{given.vectors:,} vectors of {DIM} uint8, {given.parts} parts, 8 % of the rows pass"
    if not given.dry:
        record(
            [
                Row("osq build", build_s, "s", "<=", 600, note),
                Row("osq memory", most, "GB", "<=", 16, note),
                Row("osq query", query_s * 1e3, "ms", "<=", 100, note),
                Row("osq recall", share, "", ">=", 0.9, note),
            ]
        )


if __name__ == "__main__":
    main()

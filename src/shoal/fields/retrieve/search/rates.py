"""How fast this machine serves, compares vectors and looks up words: timed once, and kept."""

from __future__ import annotations

import tracemalloc

import numpy as np

from shoal.core.config import Value
from shoal.core.scratch import scratch_directory
from shoal.fields.rates import least_seconds, machine_rates
from shoal.ir import Machine

_DIM, _FLAT, _VECTORS, _DOCUMENTS, _QUERIES = 64, 4_000, 20_000, 4_000, 300
# FLOP/s of the core whose rates stand in for those of a machine that is only described.
_CORE = 1e11


class SearchRates(Value):
    """What one core takes.

    Args:
        request_s: seconds of a query over HTTP in a collection of a few points, client included.
        server_s: of these, seconds of the server, when several clients keep it busy.
        compare_s: seconds for a number of a vector that is compared.
        listed_s: seconds for an entry of Curator's lists.
        posting_s: seconds for a document that has a word of the query.
        hit_s: seconds for a point that is ranked: its payload, its place among others.
        point_s: seconds to add a point, in a batch of 100, without its words.
        word_s: seconds for a word of a text, embedded and entered.
        point_bytes: memory of a point beside its vector and text.
        word_bytes: memory of a word of a text in the lists of words.
        spread: half-width of the 90 % interval, as a share.
    """

    request_s: float
    server_s: float
    compare_s: float
    listed_s: float
    posting_s: float
    hit_s: float
    point_s: float
    word_s: float
    point_bytes: float
    word_bytes: float
    spread: float


_DESCRIBED = SearchRates(
    request_s=1.1e-3,
    server_s=0.75e-3,
    compare_s=1.5e-10,
    listed_s=2e-9,
    posting_s=2.6e-8,
    hit_s=2e-6,
    point_s=1.2e-4,
    word_s=4e-6,
    point_bytes=1000,
    word_bytes=30,
    spread=0.6,
)


def search_rates(machine: Machine) -> SearchRates:
    """The rates of a machine: timed if it is this one, else from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    return machine_rates(machine, "search.json", _DESCRIBED, _timed, _CORE)


def _timed() -> SearchRates:
    compare_s, listed_s = _vectors()
    posting_s, word_bytes = _words()
    request_s, server_s, point_s, word_s = _requests()
    point_bytes, hit_s = _points()
    return SearchRates(
        request_s=request_s, server_s=server_s, compare_s=compare_s, listed_s=listed_s,
        posting_s=posting_s, point_s=point_s, word_s=word_s, point_bytes=point_bytes,
        hit_s=hit_s,
        word_bytes=word_bytes, spread=0.35,
    )  # fmt: skip


def _vectors() -> tuple[float, float]:
    """Seconds of a compared number, and of an entry of a list."""
    from shoal.fields.retrieve.index.curator.index import CuratorIndex

    draw = np.random.default_rng(0)
    rows = draw.standard_normal((_VECTORS, _DIM)).astype(np.float32)
    flat, tree = CuratorIndex(_DIM, metric="ip"), CuratorIndex(_DIM, metric="ip")
    flat.train(rows[:1])  # has no more than its root, so every vector is compared
    tree.train(rows[:_FLAT])
    flat.add(np.arange(_FLAT), rows[:_FLAT], tenant=0)
    tree.add(np.arange(_VECTORS), rows, tenant=0)
    queries = rows[:20]
    flat_s, _ = least_seconds(lambda: flat.search(queries, 10, tenant=0))
    compare_s = flat_s / len(queries) / _FLAT / _DIM
    tree_s, hits = least_seconds(lambda: tree.search(queries, 10, tenant=0))
    compared, listed = (float(hits.stats[name].sum()) for name in ("compared", "listed"))
    rest = max(tree_s - compared * _DIM * compare_s, 0.05 * tree_s)
    return compare_s, rest / listed


def _words() -> tuple[float, float]:
    """Seconds of a posting, and bytes of a word."""
    from shoal.fields.retrieve.search.words import WordIndex

    draw = np.random.default_rng(0)
    texts = [" ".join(f"w{n}" for n in draw.zipf(1.3, 60) % 5000) for _ in range(_DOCUMENTS // 2)]
    tracemalloc.start()
    try:
        index = WordIndex()
        for at, text in enumerate(texts):
            index.add(at, text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    wanted = "w1 w2 w3 w4"
    seconds, _ = least_seconds(lambda: [index.search(wanted, 10) for _ in range(5)])
    postings = sum(index.frequency(word) for word in wanted.split())
    return seconds / 5 / postings, size / (60.0 * len(texts))


def _points() -> tuple[float, float]:
    """Bytes of a point without its vector and words, and seconds of one that is ranked."""
    from shoal.fields.retrieve.search.dense import DenseVectors
    from shoal.fields.retrieve.search.hybrid import fused
    from shoal.fields.retrieve.search.library import Library
    from shoal.fields.retrieve.search.protocols import SearchQuery
    from shoal.fields.retrieve.search.served import NewPoint

    count, row = 1000, [1.0] * 8
    with scratch_directory("rates") as directory:
        library = Library(directory)
        try:
            made = library.create("points", 8, text="none")
            tracemalloc.start()
            try:
                points = [NewPoint(at, row, {"text": f"{at:08d}"}) for at in range(count)]
                for first in range(0, count, 100):
                    made.upsert(points[first : first + 100], "")
                del points
                size, _ = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            query = SearchQuery(vector=row)

            def rank(k: int) -> float:
                ranked = DenseVectors().rank
                seconds, _ = least_seconds(lambda: fused([ranked(made, query, k)], k, 60), 9)
                return seconds

            hit_s = max(rank(510) - rank(10), 0.0) / 500
        finally:
            library.close()
    return size / count, hit_s


def _requests() -> tuple[float, float, float, float]:
    """Seconds of a query with one client, of one when four ask, of a point, and of a word."""
    from shoal.fields.retrieve.search.hashed import HashedWords
    from shoal.fields.retrieve.search.load import run_load
    from shoal.fields.retrieve.search.server import SearchOptions, running_search

    embedder = HashedWords(dim=64)
    results = []
    with scratch_directory("rates") as directory:
        for clients, words in ((1, 5), (4, 105)):
            documents = [
                (" ".join(f"w{(at * n) % 997}" for n in range(words)), "w1") for at in range(300)
            ]
            options = SearchOptions(directory=directory / str(clients), embedder=embedder, port=0)
            with running_search(options) as url:
                description = {
                    "url": url, "documents": documents, "dim": 64, "method": "dense", "k": 1,
                    "queries": _QUERIES, "clients": clients, "seed": 0,
                }  # fmt: skip
                results.append(run_load(description))
    alone, several = results
    word_s = max(several["upserts_s"] - alone["upserts_s"], 0.0) / 300 / 100
    point_s = max(alone["upserts_s"] / 300 - 5 * word_s, 1e-6)
    return (
        float(np.median(alone["query_s"])), several["queries_s"] / _QUERIES, point_s, word_s
    )  # fmt: skip

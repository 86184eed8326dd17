"""Reranking: documents sorted by similarity to a query."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytestmark = pytest.mark.multi

DOCUMENTS = ["blue whales eat krill", "the query itself", {"text": "krill"}, "the query itself"]


def rank(call, path="/v1/rerank", **options):
    body = {"model": "bytes", "query": "the query itself", "documents": DOCUMENTS, **options}
    status, data = call("POST", path, body)
    assert status == 200, data
    return json.loads(data)


@pytest.fixture(scope="module")
def tiny(model_directory):
    """The address of a server with a real model."""
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(model=str(model_directory), threads=1)
    with running(job, ServerOptions(port=0, name="bytes")) as server:
        yield server.url


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_scores_are_cosines_of_embeddings(caller, openai_of, tiny, pooling):
    texts = [
        "the query itself",
        *(one if isinstance(one, str) else one["text"] for one in DOCUMENTS),
    ]
    extra = {"pooling": pooling}
    made = openai_of(tiny).embeddings.create(model="bytes", input=texts, extra_body=extra)
    vectors = np.array([one.embedding for one in made.data])
    expected = vectors[1:] @ vectors[0]
    answer = rank(caller(tiny), pooling=pooling, return_documents=True)
    assert answer["model"] == "bytes"
    assert answer["usage"]["total_tokens"] == made.usage.total_tokens
    results = answer["results"]
    assert sorted(one["index"] for one in results) == [0, 1, 2, 3]
    for one in results:
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-5)
        assert one["document"] == {"text": texts[1 + one["index"]]}
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True)
    # The query is the most similar to itself.
    assert {one["index"] for one in results[:2]} == {1, 3}
    assert scores[0] == pytest.approx(1, abs=1e-5)


def test_the_best_and_both_paths(call):
    for path in ("/v1/rerank", "/rerank"):
        (best,) = rank(call, path, top_n=1)["results"]
        assert best == {"index": best["index"], "relevance_score": pytest.approx(1, abs=1e-6)}
        assert len(rank(call, path, top_n=0)["results"]) == len(DOCUMENTS)
        assert len(rank(call, path, top_n=99)["results"]) == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"query": ""}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": "word " * 200_000}, "query"),
        ({"documents": None}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": ["a"] * 257}, "documents"),
        ({"documents": ["a", 3]}, "documents[1]"),
        ({"documents": ["a", {"image": "b"}]}, "documents[1]"),
        ({"documents": ["a", "word " * 200_000]}, "documents[1]"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": "2"}, "top_n"),
        ({"return_documents": 1}, "return_documents"),
        ({"pooling": "max"}, "pooling"),
        ({"model": 3}, "model"),
    ],
)
def test_bad_input(call, change, param):
    body = {"model": "bytes", "query": "a", "documents": ["b"], **change}
    status, error = call.error("POST", "/v1/rerank", body)
    assert (status, error["param"]) == (400, param)

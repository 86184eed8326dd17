"""Served collections: the API beside an oracle, tenants, keys, bad input, crashes, clients."""

from __future__ import annotations

import math
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tests.fields.retrieve.search_client import DIM, KEYS, SHOP, WORDS, Client

from shoal.core.errors import StoreError
from shoal.fields.retrieve.collections import ScoredPoint, collection
from shoal.fields.retrieve.grank.text import terms
from shoal.fields.retrieve.search import EMBEDDERS, Library
from shoal.fields.retrieve.search.api import LIMITS, ROUTES
from shoal.fields.retrieve.search.hybrid import fused
from shoal.fields.retrieve.search.keys import KeyRights, KeyRing
from shoal.fields.retrieve.search.protocols import SearchError
from shoal.fields.retrieve.search.words import WordIndex
from shoal.serve.http.guard import AccessControl


@pytest.fixture
def client(tmp_path):
    made = Client(tmp_path / "collections")
    yield made
    made.close()


@pytest.fixture
def shop(client):
    client.ok("PUT", "/collections/shop", {"vectors": {"size": DIM, "distance": "Cosine"}})
    points = [
        {"id": n, "vector": [1.0, n, 0, 0], "payload": {"n": n, "text": f"{WORDS[n]} all"}}
        for n in range(6)
    ]
    client.ok("PUT", "/collections/shop/points?wait=true", {"points": points})
    return client


def bm25(documents, query, k):
    """Scores by the formula, of documents that have a word."""
    counts = {name: Counter(terms(text)) for name, text in documents.items()}
    mean = sum(one.total() for one in counts.values()) / max(len(counts), 1)
    scores = {}
    for word in terms(query):
        n = sum(word in one for one in counts.values())
        weight = math.log(1 + (len(counts) - n + 0.5) / (n + 0.5))
        for name, one in counts.items():
            if one[word]:
                norm = 1.5 * (0.25 + 0.75 * one.total() / mean)
                score = weight * one[word] * 2.5 / (one[word] + norm)
                scores[name] = scores.get(name, 0.0) + score
    return sorted(scores.items(), key=lambda one: (-round(one[1], 9), one[0]))[:k]


def test_words_that_come_and_go_score_as_the_formula():
    draw, index, documents = np.random.default_rng(0), WordIndex(), {}
    for step in range(600):
        name = int(draw.integers(40))
        if name in documents:
            index.remove(name, documents.pop(name))
        if draw.random() < 0.7:
            documents[name] = " ".join(draw.choice(WORDS, draw.integers(0, 9)))
            index.add(name, documents[name])
        if step % 5 == 0:
            query = " ".join(draw.choice([*WORDS, "other"], 3))
            among = np.array(sorted(draw.choice(40, 15, replace=False)))
            inside = [one for one in bm25(documents, query, 40) if one[0] in among]
            for given, wanted in ((None, bm25(documents, query, 7)), (among, inside[:7])):
                hits = index.search(query, 7, given)
                np.testing.assert_allclose(
                    [one[1] for one in hits], [one[1] for one in wanted], rtol=1e-9
                )
                same = {one for one in hits if one[1] > (wanted[-1][1] + 1e-9 if wanted else 0)}
                assert {one[0] for one in same} <= {one[0] for one in wanted}
    assert len(index) == len(documents) > 10


def test_every_route_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "retrieve" / "search.md").read_text()
    for method, path in ROUTES:
        last = path.removeprefix("/collections/{name}/points")
        assert f"{method} {path}`" in page or f".../{last[1:]}`" in page or (
            path.endswith("/snapshots") and f"`{method} ...`" in page
        ), (method, path)  # fmt: skip


def test_fusion_is_that_of_the_paper():
    def ranking(*ids):
        return [ScoredPoint(id=one, score=0.0, payload={}) for one in ids]

    hits = fused([ranking(1, 2, 3), ranking(3, 4)], 10, 60)
    scores = {3: 1 / 63 + 1 / 61, 1: 1 / 61, 2: 1 / 62, 4: 1 / 62}
    assert [one.id for one in hits] == [3, 1, 2, 4]
    assert all(one.score == pytest.approx(scores[one.id]) for one in hits)
    assert [one.id for one in fused([ranking(1, 2), ranking(2)], 1, 0)] == [2]


class Oracle:
    """What the points of one tenant are, by a dictionary."""

    def __init__(self):
        self.points = {}

    def chosen(self, where):
        return {
            one: (vector, payload)
            for one, (vector, payload) in self.points.items()
            if where is None or payload["price"] < where
        }

    def nearest(self, vector, where, k):
        some = self.chosen(where)
        cosine = {
            one: float(np.dot(v, vector) / np.linalg.norm(v) / np.linalg.norm(vector))
            for one, (v, _) in some.items()
        }
        return sorted(cosine.values(), reverse=True)[:k], cosine

    def words(self, text, where):
        fits = self.chosen(where)
        texts = {one: payload["text"] for one, (_, payload) in self.points.items()}
        every = bm25({str(one): text for one, text in texts.items()}, text, 10**6)
        return [one for one in every if any(str(name) == one[0] for name in fits)]


def random_operations(client, count):
    draw = np.random.default_rng(0)
    tenants = {"ann": "key-of-ann", "bob": "key-of-bob", "eve": "whole-key"}
    oracles = {name: Oracle() for name in tenants}
    ids = [*range(30), *(str(uuid.UUID(int=n)) for n in range(30))]
    where_of = {None: None}
    for bound in (20, 50, 80):
        where_of[bound] = {"must": [{"key": "price", "range": {"lt": bound}}]}
    client.ok("PUT", "/collections/c", {"vectors": {"size": DIM}}, key="whole-key")
    at = "/collections/c/points"
    for _ in range(count):
        name = str(draw.choice(list(tenants)))
        who = {"key": tenants[name], "tenant": name}
        oracle, what = oracles[name], draw.random()
        bound = [None, 20, 50, 80][draw.integers(4)]
        where = where_of[bound]
        if what < 0.3:
            points = []
            for n in draw.integers(0, len(ids), draw.integers(1, 4)):
                text = f"{name} " + " ".join(draw.choice(WORDS, 3))
                payload = {"price": int(draw.integers(100)), "text": text, "of": name}
                vector = draw.standard_normal(DIM)
                oracle.points[ids[n]] = (vector, payload)
                points.append({"id": ids[n], "vector": vector.tolist(), "payload": payload})
            client.ok("PUT", at, {"points": points}, **who)
        elif what < 0.42:
            some = [ids[n] for n in draw.integers(0, len(ids), 2)]
            for one in some:
                oracle.points.pop(one, None)
            client.ok("POST", f"{at}/delete", {"points": some}, **who)
        elif what < 0.44 and bound is not None:
            for one in oracle.chosen(bound):
                del oracle.points[one]
            client.ok("POST", f"{at}/delete", {"filter": where}, **who)
        elif what < 0.6:
            vector = draw.standard_normal(DIM)
            body = {"query": vector.tolist(), "limit": 7, "filter": where, "with_payload": True}
            hits = client.ok("POST", f"{at}/query", body, **who)["points"]
            scores, cosine = oracle.nearest(vector, bound, 7)
            np.testing.assert_allclose([one["score"] for one in hits], scores, atol=1e-5)
            for one in hits:
                assert one["score"] == pytest.approx(cosine[one["id"]], abs=1e-5)
                assert one["payload"] == oracle.points[one["id"]][1]
        elif what < 0.72:
            text = " ".join(draw.choice(WORDS, 2))
            body = {"query": {"text": text}, "using": "bm25", "limit": 5, "filter": where}
            hits = client.ok("POST", f"{at}/query", body, **who)["points"]
            wanted = oracle.words(text, bound)
            known = dict(wanted)
            np.testing.assert_allclose(
                [one["score"] for one in hits], [one[1] for one in wanted[:5]], rtol=1e-9
            )
            assert all(one["score"] == pytest.approx(known[str(one["id"])]) for one in hits)
        elif what < 0.8:
            body = {"ids": ids[:: draw.integers(1, 9)], "with_vector": bool(draw.random() < 0.2)}
            for one in client.ok("POST", at, body, **who):
                assert one["payload"] == oracle.points.get(one["id"])[1]
                if body["with_vector"]:
                    v = oracle.points[one["id"]][0]
                    np.testing.assert_allclose(one["vector"], v / np.linalg.norm(v), atol=1e-5)
        elif what < 0.9:
            following, seen = None, []
            while True:
                body = {"limit": 9, "filter": where, "offset": following}
                page = client.ok("POST", f"{at}/scroll", body, **who)
                seen += [one["id"] for one in page["points"]]
                following = page["next_page_offset"]
                if following is None:
                    break
            chosen = oracle.chosen(bound)
            assert seen == sorted(chosen, key=lambda one: (isinstance(one, str), one))
        else:
            count_ = client.ok("POST", f"{at}/count", {"filter": where}, **who)["count"]
            assert count_ == len(oracle.chosen(bound))
    return oracles


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_tenants_see_their_own_points_alone(tmp_path, count):
    """Random changes and searches of tenants that use the same ids, beside dictionaries."""
    rights = tuple(KeyRights(key=key, tenants=names) for key, names in KEYS.items())
    ring = KeyRing(rights)
    client = Client(tmp_path / "c", keys=ring, access=AccessControl(keys=ring.keys))
    oracles = random_operations(client, count)
    assert all(len(one.points) > 5 for one in oracles.values())
    client.close()
    again = Client(tmp_path / "c")
    for name, oracle in oracles.items():
        page = again.ok("POST", "/collections/c/points/scroll", {"limit": 1000}, tenant=name)
        assert {one["id"]: one["payload"] for one in page["points"]} == {
            one: payload for one, (_, payload) in oracle.points.items()
        }
    again.close()


def test_a_tenant_without_points_is_like_an_unknown_one(shop):
    """The same answers on every route, for one that has nothing left and one that never was."""
    shop.ok("PUT", "/collections/shop/points", {"points": [{"id": 1, "vector": [1, 0, 0, 0]}]},
            tenant="had")  # fmt: skip
    shop.ok("POST", "/collections/shop/points/delete", {"points": [1]}, tenant="had")
    at = "/collections/shop/points"
    asked = [
        ("GET", f"{at}/1", None), ("GET", "/collections/shop", None),
        ("POST", at, {"ids": [1]}), ("POST", f"{at}/scroll", {}), ("POST", f"{at}/count", {}),
        ("POST", f"{at}/query", {"query": [1, 0, 0, 0]}),
        ("POST", f"{at}/query", {"query": [1, 0]}),
        ("POST", f"{at}/query", {"query": {"text": "all"}, "using": "bm25"}),
        ("POST", f"{at}/query", {"query": {"nearest": [1, 0, 0, 0], "text": "all"},
                                 "using": "hybrid"}),
        ("POST", f"{at}/search", {"vector": [1, 0, 0, 0]}),
        ("POST", f"{at}/delete", {"points": [1]}), ("POST", f"{at}/delete", {"filter": {}}),
    ]  # fmt: skip
    for method, path, body in asked:
        assert shop(method, path, body, tenant="had") == shop(method, path, body, tenant="never")
    assert shop.ok("POST", f"{at}/count", {})["count"] == 6
    assert set(shop.library.get("shop")._tenants) == {""}


def test_hybrid_is_the_fusion_of_two_exact_rankings(shop):
    at = "/collections/shop/points/query"
    where = {"must": [{"key": "n", "range": {"gte": 2}}]}
    both = {"query": {"nearest": [1, 5, 0, 0], "text": "w2 w5 all"}, "using": "hybrid"}
    hits = shop.ok("POST", at, {**both, "filter": where})["points"]
    dense = shop.ok("POST", at, {"query": [1, 5, 0, 0], "filter": where})["points"]
    words = shop.ok("POST", at, {"query": {"text": "w2 w5 all"}, "using": "bm25", "filter": where})[
        "points"
    ]
    scores = Counter()
    for ranking in (dense, words):
        for rank, one in enumerate(ranking, 1):
            scores[one["id"]] += 1 / (60 + rank)
    assert {one["id"]: one["score"] for one in hits} == pytest.approx(dict(scores))
    assert {one["id"] for one in hits} == {2, 3, 4, 5}
    form = {
        "prefetch": [{"query": [1, 5, 0, 0]}, {"query": {"text": "w2 w5 all"}, "using": "bm25"}],
        "query": {"fusion": "rrf"}, "filter": where,
    }  # fmt: skip
    assert shop.ok("POST", at, form)["points"] == hits
    assert len(shop.ok("POST", at, {**both, "limit": 100})["points"]) == 6  # more than there are
    assert shop.ok("POST", at, {**form, "limit": 2, "offset": 1})["points"] == hits[1:3]
    short = shop.ok("POST", at, {"query": [1, 5, 0, 0], "score_threshold": 0.97})["points"]
    assert 0 < len(short) < 6 and all(one["score"] >= 0.97 for one in short)


def test_an_exact_search_of_many_points_misses_none(client, monkeypatch):
    monkeypatch.setattr(collection, "_TREE", 500)
    draw = np.random.default_rng(0)
    client.ok("PUT", "/collections/c", {"vectors": {"size": DIM, "distance": "Dot"}})
    rows = draw.standard_normal((3000, DIM))
    for tenant, own in (("ann", range(0, 3000, 2)), ("bob", range(1, 3000, 2))):
        for begin in range(0, len(own), 500):
            some = own[begin : begin + 500]
            points = [{"id": at, "vector": rows[at].tolist()} for at in some]
            client.ok("PUT", "/collections/c/points", {"points": points}, tenant=tenant)
    assert client.library.get("c").points._index.counts()["nodes"] > 1
    for query in draw.standard_normal((20, DIM)):
        wanted = np.sort(rows[::2] @ query)[::-1][:3]
        body = {"query": query.tolist(), "limit": 3, "params": {"exact": True}}
        hits = client.ok("POST", "/collections/c/points/query", body, tenant="ann")["points"]
        np.testing.assert_allclose([one["score"] for one in hits], wanted, rtol=1e-4)
        assert all(one["id"] % 2 == 0 for one in hits)


def test_texts_are_embedded_and_words_are_looked_for(client):
    client.ok("PUT", "/collections/docs", {"vectors": {"size": 8}, "text": "body"})
    at = "/collections/docs/points"
    points = [
        {"id": 1, "payload": {"body": "how to bake bread"}},
        {"id": 2, "vector": {"text": "the sea at night"}, "payload": {"body": "bread"}},
    ]
    client.ok("PUT", at, {"points": points})
    best = client.ok("POST", f"{at}/query", {"query": {"text": "sea at night"}, "limit": 1})
    assert [one["id"] for one in best["points"]] == [2]
    words = client.ok("POST", f"{at}/query", {"query": {"text": "Bread"}, "using": "bm25"})
    assert [one["id"] for one in words["points"]] == [2, 1]
    assert "expected a vector, or text" in client.fails(400, "PUT", at,
                                                        {"points": [{"id": 3}]})  # fmt: skip
    assert "expected words" in client.fails(
        400, "PUT", at, {"points": [{"id": 3, "payload": {"body": "..."}}]}
    )
    assert client.ok("POST", f"{at}/count", {})["count"] == 2


BAD = [
    ("PUT", SHOP, {"points": [{"id": 1, "vector": [1, 2]}]}, 400, "point 1: vectors"),
    ("PUT", SHOP, {"points": [{"id": 1, "vector": [0, 0, 0, 0]}]}, 400, "zero"),
    ("PUT", SHOP, {"points": [{"id": 1, "vector": [1e39, 0, 0, 0]}]}, 400, "not finite"),
    ("PUT", SHOP, b'{"points": [{"id": 1, "vector": [NaN, 0, 0, 0]}]}', 400, "not JSON"),
    ("PUT", SHOP, {"points": [{"id": 1, "vector": ["a", 0, 0, 0]}]}, 400, "vector"),
    ("PUT", SHOP, {"points": [{"id": -1, "vector": [1, 0, 0, 0]}]}, 400, "whole number"),
    ("PUT", SHOP, {"points": [{"id": "x", "vector": [1, 0, 0, 0]}]}, 400, "UUID"),
    ("PUT", SHOP, {"points": [{"id": True, "vector": [1, 0, 0, 0]}]}, 400, "whole number"),
    ("PUT", SHOP, {"points": [{"id": 1, "vector": [1, 0, 0, 0], "payload": {"$id": 3}}]}, 400,
     "reserved"),
    ("PUT", SHOP, {"points": [{"id": 1, "vector": [1, 0, 0, 0], "payload": {"a": "x" * 70_000}}]},
     400, "payload"),
    ("PUT", SHOP, {"points": [{"id": 1, "vec": [1, 0, 0, 0]}]}, 400, "vec"),
    ("PUT", SHOP, {}, 400, "points"),
    ("PUT", SHOP, b"{", 400, "not JSON"),
    ("PUT", SHOP, b"[1]", 400, "JSON object"),
    ("PUT", SHOP, b"[" * 5000, 400, "nested"),
    ("PUT", SHOP, b" " * (LIMITS.body_bytes + 1), 413, "at most"),
    ("POST", f"{SHOP}/query", {"query": [1, 0]}, 400, "vectors"),
    ("POST", f"{SHOP}/query", {"query": [0, 0, 0, 0]}, 400, "zero"),
    ("POST", f"{SHOP}/query", {"query": {"text": "a"}}, 400, "embedder makes vectors of 8"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "using": "bm25"}, 400, "expected a text"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "using": "best"}, 400, "best"),
    ("POST", f"{SHOP}/query", {"query": {"fusion": "rrf"}}, 400, "prefetch"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "limit": 0}, 400, "limit"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "limit": 10**6}, 400, "limit"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "filter": {"must": [{"key": "n"}]}}, 400,
     "expected match"),
    ("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "lookup_from": {}}, 400, "lookup_from"),
    ("POST", f"{SHOP}/delete", {}, 400, "points, or filter"),
    ("POST", f"{SHOP}/delete", {"points": ["x"]}, 400, "UUID"),
    ("GET", f"{SHOP}/77", None, 404, "77"),
    ("GET", f"{SHOP}/x", None, 400, "UUID"),
    ("POST", "/collections/none/points/query", {"query": [1]}, 404, "doesn't exist"),
    ("GET", "/collections/none", None, 404, "doesn't exist"),
    ("PUT", "/collections/shop", {"vectors": {"size": 4}}, 409, "already exists"),
    ("PUT", "/collections/..", {"vectors": {"size": 4}}, 400, "name"),
    ("PUT", "/collections/.hidden", {"vectors": {"size": 4}}, 400, "name"),
    ("PUT", "/collections/a%2Fb", {"vectors": {"size": 4}}, 400, "name"),
    ("PUT", "/collections/a\\b", {"vectors": {"size": 4}}, 400, "name"),
    ("PUT", f"/collections/{'a' * 200}", {"vectors": {"size": 4}}, 400, "name"),
    ("PUT", "/collections/a/b", {"vectors": {"size": 4}}, 404, "/collections/{name}"),
    ("PUT", "/collections/new", {"vectors": {"size": 0}}, 400, "size"),
    ("PUT", "/collections/new", {"vectors": {"size": 10**9}}, 400, "size"),
    ("PUT", "/collections/new", {"vectors": {"size": 4, "distance": "Manhattan"}}, 400, "distance"),
    ("PUT", "/collections/new", {"vectors": {"image": {"size": 4}}}, 400, "image"),
    ("PATCH", "/collections/shop", {}, 405, "another method"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "text"), BAD)
def test_bad_input_is_refused_by_name(shop, method, path, body, status, text):
    before = shop.ok("POST", f"{SHOP}/scroll", {"with_vector": True})
    options = {"raw": body} if isinstance(body, bytes) else {"body": body}
    error = shop.fails(status, method, path, **options)
    assert text in error and "Traceback" not in error
    assert shop.ok("POST", f"{SHOP}/scroll", {"with_vector": True}) == before
    assert shop.ok("GET", "/collections") == {"collections": [{"name": "shop"}]}


def test_what_is_not_there_is_passed_over(shop):
    shop.ok("POST", f"{SHOP}/delete", {"points": [77, str(uuid.uuid4())]})
    assert shop.ok("POST", SHOP, {"ids": [77, 2]})[0]["id"] == 2
    missing = {"must": [{"key": "nothing", "match": {"value": 1}}]}
    body = {"query": [1, 0, 0, 0], "filter": missing}
    assert shop.ok("POST", f"{SHOP}/query", body)["points"] == []
    few = shop.ok("POST", f"{SHOP}/query", {"query": [1, 0, 0, 0], "limit": 1000})["points"]
    assert len(few) == 6
    assert shop.ok("DELETE", "/collections/none") is False
    assert shop.ok("DELETE", "/collections/shop") is True
    assert shop.ok("GET", "/collections/shop/exists") == {"exists": False}


def test_a_batch_is_taken_whole_or_not_at_all(shop):
    points = [{"id": 10, "vector": [1, 0, 0, 0]}, {"id": 11, "vector": [1, 0, 0]}]
    shop.fails(400, "PUT", SHOP, {"points": points})
    assert shop.ok("POST", f"{SHOP}/count", {})["count"] == 6
    twice = [{"id": 10, "vector": [1, 0, 0, n], "payload": {"n": n}} for n in (8, 9)]
    shop.ok("PUT", SHOP, {"points": twice})
    assert shop.ok("GET", f"{SHOP}/10")["payload"] == {"n": 9}


def test_a_library_outlives_what_was_cut_short(tmp_path):
    place = tmp_path / "c"
    library = Library(place)
    library.create("kept", 2, text="body")
    library.create("gone", 2)
    made = library.get("gone")
    assert library.drop("gone") and not (place / "gone").exists()
    with pytest.raises(SearchError, match="deleted"):
        made.upsert([], "")
    with pytest.raises(StoreError, match="another process"):
        Library(place)
    library.close()
    (place / ".unfinished-new" / "points").mkdir(parents=True)
    (place / "other").mkdir()
    again = Library(place)
    assert again.names() == ["kept"] and again.get("kept").text == "body"
    assert not (place / ".unfinished-new").exists() and (place / "other").exists()
    again.close()
    (place / "kept" / "served.json").write_text("{")
    with pytest.raises(StoreError, match=r"served\.json"):
        Library(place)
    with pytest.raises(StoreError):
        (tmp_path / "file").write_text("")
        Library(tmp_path / "file")


def test_embedders(tmp_path):
    made = EMBEDDERS.build({"name": "hashed_words", "dim": 256})
    near, same, far = made.embed(["Reading a file", "file reading", "winter rain"])
    assert near @ same > 0.7 > 0.3 > abs(near @ far)
    np.testing.assert_allclose(np.linalg.norm(near), 1, rtol=1e-6)
    nowhere = EMBEDDERS.build(
        {"name": "embeddings_api", "url": "http://127.0.0.1:9", "timeout_s": 2}
    )
    library = Library(tmp_path / "c", nowhere)
    client = Client(tmp_path / "d")
    client.library._embedder = nowhere
    client.ok("PUT", "/collections/a", {"vectors": {"size": 2}})
    point = {"id": 1, "payload": {"text": "words"}}
    error = client.fails(502, "PUT", "/collections/a/points", {"points": [point]})
    assert "no vectors" in error
    assert client.ok("POST", "/collections/a/points/count", {})["count"] == 0
    client.close()
    library.close()

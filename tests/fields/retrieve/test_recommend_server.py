"""Recommendations over HTTP: what the ranker says, behind the guards of all servers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest

pytest.importorskip("torch")

from shoal.fields.retrieve.recommend import HSTURanker
from shoal.fields.retrieve.recommend.serving import recommend_server
from shoal.serve.http.app_server import AppOptions

KEY = "a-key-of-sixteen"


@pytest.fixture(scope="module")
def served():
    """A ranker's address, and another ranker with the same weights."""
    made = {"items": 30, "actions": 2, "length": 20, "dim": 8, "blocks": 1, "seed": 5}
    with recommend_server(HSTURanker(**made), AppOptions(port=0, key=KEY)) as url:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx2.Client(base_url=url, headers=headers, trust_env=False) as client:
            yield client, HSTURanker(**made)


def test_ranks_are_those_of_the_ranker(served):
    client, ranker = served
    for item, action in ((3, 1), (9, 0), (3, 1)):
        body = {"user": "ann", "item": item, "action": action}
        assert client.post("/v1/events", json=body).status_code == 200
        ranker.observe("ann", item, action)
    answer = client.post("/v1/recommend", json={"user": "ann", "k": 4}).json()
    wanted = ranker.rank("ann", 4)
    assert [one["item"] for one in answer["items"]] == [one.item for one in wanted]
    np.testing.assert_allclose(
        [one["score"] for one in answer["items"]], [one.score for one in wanted], rtol=1e-5
    )
    some = client.post("/v1/recommend", json={"user": "ann", "candidates": [7, 2]}).json()
    assert sorted(one["item"] for one in some["items"]) == [2, 7]
    fresh = client.post("/v1/recommend", json={"user": "bob", "k": 2}).json()
    assert all(one["popular"] for one in fresh["items"])


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/recommend", {}, "user"),
        ("/v1/recommend", {"user": "ann", "k": 0}, "k"),
        ("/v1/recommend", {"user": "ann", "candidates": []}, "candidates"),
        ("/v1/recommend", {"user": "ann", "candidates": [30]}, "from 0 to 29"),
        ("/v1/recommend", {"user": "ann", "candidates": [-1]}, "from 0"),
        ("/v1/recommend", {"user": "ann", "other": 1}, "other"),
        ("/v1/events", {"user": "ann", "item": 30, "action": 0}, "from 0 to 29"),
        ("/v1/events", {"user": "ann", "item": 1, "action": 2}, "from 0 to 1"),
        ("/v1/events", {"user": "ann", "item": 1, "action": 1, "time": -1.0}, "before"),
        ("/v1/events", {"user": "", "item": 1, "action": 1}, "user"),
    ],
)
def test_bad_requests_are_errors(served, path, body, says):
    answer = served[0].post(path, json=body)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_others_need_the_key_and_unknown_paths_are_none(served):
    client, _ = served
    wrong = {"Authorization": "Bearer another-key-of-it"}
    body = {"user": "ann"}
    assert client.post("/v1/recommend", json=body, headers=wrong).status_code == 401
    assert client.get("/health", headers=wrong).status_code == 200
    assert client.get("/v1/models").status_code == 404


def test_many_at_once_are_answered(served):
    client, _ = served

    def ask(at: int) -> int:
        body = {"user": f"user {at % 3}", "item": at % 30, "action": at % 2}
        assert client.post("/v1/events", json=body).status_code == 200
        return client.post("/v1/recommend", json={"user": body["user"]}).status_code

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(24))) == {200}

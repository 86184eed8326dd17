"""Servers of collections as processes: Qdrant's client, plans and loads, and kills."""

from __future__ import annotations

import json
import signal
import threading
import uuid

import httpx2
import numpy as np
import pytest

from own_home import own_home
from served_job import ServedJob
from shoal.core.errors import ConfigError, ServeError
from shoal.fields.retrieve.search import SearchOptions, running_search
from shoal.fields.retrieve.search.job import SearchJob
from shoal.fields.retrieve.search.keys import KeyRights, KeyRing
from shoal.fields.retrieve.search.kind import SearchKind
from shoal.machine import load


@pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection")
def test_the_client_of_qdrant(tmp_path):
    qdrant = pytest.importorskip("qdrant_client")
    models = qdrant.models
    ring = KeyRing((KeyRights(key="key-of-ann", tenants=("ann",)), KeyRights(key="whole-key")))
    options = SearchOptions(directory=tmp_path / "c", port=0, keys=ring)
    with running_search(options) as url:
        whole, ann = (
            qdrant.QdrantClient(url=url, api_key=key, check_compatibility=False)
            for key in ("whole-key", "key-of-ann")
        )
        params = models.VectorParams(size=4, distance=models.Distance.EUCLID)
        assert whole.create_collection("shop", vectors_config=params)
        assert [one.name for one in ann.get_collections().collections] == ["shop"]
        name = str(uuid.uuid4())
        points = [
            models.PointStruct(id=n, vector=[n, 1, 0, 0], payload={"n": n, "odd": n % 2 == 1})
            for n in range(20)
        ]
        done = ann.upsert("shop", [*points, models.PointStruct(id=name, vector=[99, 0, 0, 0])])
        assert done.status == models.UpdateStatus.COMPLETED
        assert ann.get_collection("shop").points_count == 21
        where = models.Filter(
            must=[models.FieldCondition(key="n", range=models.Range(gte=5, lt=15))],
            must_not=[models.FieldCondition(key="odd", match=models.MatchValue(value=True))],
        )
        hits = ann.query_points("shop", [0, 1, 0, 0], query_filter=where, limit=3).points
        assert [(one.id, one.score) for one in hits] == [(6, 6.0), (8, 8.0), (10, 10.0)]
        assert hits[0].payload == {"n": 6, "odd": False}
        page, following = ann.scroll("shop", limit=15, scroll_filter=where)
        assert [one.id for one in page] == [6, 8, 10, 12, 14] and following is None
        (one,) = ann.retrieve("shop", [name, 777], with_vectors=True)
        assert one.id == name and one.vector == pytest.approx([99, 0, 0, 0], abs=1e-4)
        single = httpx2.get(
            f"{url}/collections/shop/points/{name}", headers={"api-key": "whole-key"}
        )
        assert single.status_code == 404  # another tenant's
        single = httpx2.get(f"{url}/collections/shop/points/6", headers={"api-key": "key-of-ann"})
        assert single.json()["result"]["vector"] == pytest.approx([6, 1, 0, 0], abs=1e-4)
        ann.delete("shop", models.FilterSelector(filter=where))
        ann.delete("shop", [name, 0])
        assert ann.count("shop").count == 14 and whole.count("shop").count == 0
        made = whole.create_snapshot("shop")
        assert [one.name for one in whole.list_snapshots("shop")] == [made.name]
        fusion = models.FusionQuery(fusion=models.Fusion.RRF)
        both = [models.Prefetch(query=[1, 1, 0, 0]), models.Prefetch(query=[3, 1, 0, 0])]
        assert len(ann.query_points("shop", fusion, prefetch=both, limit=4).points) == 4
        with pytest.raises(Exception, match="403"):
            ann.delete_collection("shop")
        assert whole.delete_collection("shop") and not whole.collection_exists("shop")
        for client in (whole, ann):
            client.close()


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def test_plans(home):
    plans = SearchKind().plan(SearchJob(points=1_000_000, dim=768), load("laptop"))
    assert {one.job.method.name for one in plans} == {"dense", "bm25", "hybrid"}
    rates = [one.predicted["queries_per_s"].value for one in plans]
    assert rates == sorted(rates, reverse=True)
    assert plans[0].predicted["memory_bytes"].value > 4 * 384 * 1_000_000
    few = SearchKind().plan(SearchJob(points=1000), load("laptop"))[0]
    assert few.predicted["memory_bytes"].value < plans[0].predicted["memory_bytes"].value / 5
    with pytest.raises(ConfigError, match="method"):
        SearchJob(method="best")
    with pytest.raises(Exception, match="no file or directory"):
        SearchKind().plan(SearchJob(documents="/nowhere"), load("laptop"))


def test_a_server_that_may_not_be_leaves_nothing(home, tmp_path):
    for values, named in (
        ({"host": "0.0.0.0"}, "API key"),
        ({"keys": str(tmp_path / "none.yaml")}, "none.yaml"),
    ):
        job = SearchJob(data=str(tmp_path / "c"), points=10, method="dense", **values)
        (plan,) = SearchKind().plan(job, load("laptop"))
        with pytest.raises((ConfigError, ServeError), match=named):
            SearchKind().run(plan, tmp_path / "run")
    assert not (tmp_path / "run").exists() and not (tmp_path / "c").exists()


@pytest.mark.slow
def test_a_load_is_measured_and_scored(home, tmp_path):
    file = tmp_path / "some.jsonl"
    rows = [
        {"id": f"d{n}", "title": f"word{n}", "text": f"word{n}\nword{n} text"} for n in range(60)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    job = SearchJob(documents=str(file), queries=40, clients=2, method="hybrid")
    (plan,) = SearchKind().plan(job, load("laptop"))
    report = SearchKind().run(plan, tmp_path / "run")
    names = {"queries_per_s", "query_p50_s", "query_p99_s", "upserts_per_s", "memory_bytes"}
    assert set(report.measured) == names == set(report.errors)
    assert report.details == {"points": 60, "dim": 384, "queries": 40}
    assert report.measured["query_p50_s"] <= report.measured["query_p99_s"]


@pytest.mark.slow
def test_kill_9_loses_nothing_that_was_acknowledged(home, tmp_path):
    """Three kills of a server while it is written to over HTTP, then Ctrl-C."""
    place, draw = tmp_path / "c", np.random.default_rng(0)
    known, begun = {}, None  # what was acknowledged, and a change that may have come, or not
    for kill in range(4):
        again = ["--resume"] if kill else []
        served = ServedJob("search", str(place), tmp_path / "run", "--port", "0", *again)
        with httpx2.Client(base_url=served.url, timeout=20) as http:
            if kill == 0:
                http.put("/collections/c", json={"vectors": {"size": 2}}).raise_for_status()
            body = {"limit": 10_000}
            page = http.post("/collections/c/points/scroll", json=body).json()["result"]
            there = {one["id"]: one["payload"]["n"] for one in page["points"]}
            also = dict(known)
            if begun is not None:
                also.pop(begun[0], None)
                also |= {} if begun[1] is None else {begun[0]: begun[1]}
            assert there in (known, also)
            known, begun = there, None
            if kill == 3:
                out = served.stop()
                assert served.process.returncode == 0, out
                report = json.loads((tmp_path / "run" / "report.json").read_text())
                assert report["measured"]["memory_bytes"] > 0 and "Traceback" not in out
                assert report["errors"] == {}  # nothing was planned for so few points
                served = ServedJob(
                    "search", str(place), tmp_path / "run", "--port", "0", "--resume"
                )
                assert "Traceback" not in served.stop(signal.SIGTERM)
                break
            killer = threading.Timer(float(draw.uniform(0.1, 0.5)), served.process.kill)
            killer.start()
            for step in range(100_000):
                one = int(draw.integers(60))
                begun = (one, None if step % 4 == 3 else step + 1_000_000 * kill)
                try:
                    if begun[1] is None:
                        answer = http.post("/collections/c/points/delete", json={"points": [one]})
                    else:
                        point = {"id": one, "vector": [1, step], "payload": {"n": begun[1]}}
                        answer = http.put("/collections/c/points", json={"points": [point]})
                except httpx2.HTTPError:
                    break
                answer.raise_for_status()
                known.pop(one, None)
                known |= {} if begun[1] is None else {one: begun[1]}
            assert step > 10
            killer.join()
        served.process.communicate(timeout=10)

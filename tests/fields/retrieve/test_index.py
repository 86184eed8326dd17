"""The job ``index``: plans that tried, runs that measured, and indexes beside the truth."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest

from own_home import own_home
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import table
from shoal.fields.retrieve.index import write_dataset
from shoal.fields.retrieve.index.curator.index import CuratorIndex
from shoal.fields.retrieve.index.exact import exact_neighbours, recall
from shoal.fields.retrieve.index.job import IndexJob
from shoal.fields.retrieve.index.kind import IndexKind
from shoal.fields.retrieve.index.protocols import VectorIndexError
from shoal.machine import load


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", own_home(tmp_path / "home"))


def clustered(count, dim=16, seed=0):
    draw = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((50, dim)) * 2
    return (centres[draw.integers(0, 50, count)] + draw.standard_normal((count, dim))).astype("f4")


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_exact_neighbours_are_those_of_a_loop(metric):
    vectors, queries = clustered(500), clustered(20, seed=1)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    hits = exact_neighbours(vectors, queries, 7, metric)
    for query, ids, apart in zip(queries, hits.ids, hits.distances, strict=True):
        found = ((vectors - query) ** 2).sum(1) if metric == "l2" else -(vectors @ query)
        wanted = np.argsort(found, kind="stable")[:7]
        np.testing.assert_array_equal(ids, wanted)
        np.testing.assert_allclose(apart, found[wanted], rtol=1e-4)
    few = exact_neighbours(vectors[:3], queries, 7, metric)
    assert (few.ids[:, 3:] == -1).all() and recall(few, few) == 1.0
    assert recall(exact_neighbours(vectors[::2], queries, 7, metric), hits) < 0.8


@pytest.mark.parametrize("method", list(table("vector_index")))
@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_with_enough_effort_every_index_finds_nearly_all(method, metric):
    vectors, queries = clustered(3000), clustered(50, seed=1)
    if metric == "cosine":
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    part = table("vector_index").build(method)
    built = part.build(vectors, metric, seed=0, threads=1)
    truth = exact_neighbours(vectors, queries, 10, metric)
    hits = built.search(queries, 10, part.efforts[-1])
    if method == "ivf_pq":  # which knows its vectors by four bytes
        shared = [len(set(a) & set(b)) for a, b in zip(hits.ids, truth.ids, strict=True)]
        assert np.mean(shared) > 3 and sum(built.memory().values()) < 0.6 * vectors.nbytes
        return
    assert recall(hits, truth) > 0.99
    np.testing.assert_allclose(hits.distances[:, 0], truth.distances[:, 0], rtol=1e-3, atol=1e-5)
    assert sum(built.memory().values()) >= vectors.nbytes


def test_plan_then_run(tmp_path):
    np.save(tmp_path / "vectors.npy", clustered(3000))
    job = IndexJob(data=str(tmp_path / "vectors.npy"), queries=200, recall=0.9)
    plans = list(IndexKind().plan(job, load("laptop")))
    assert {plan.job.method.name for plan in plans} == set(table("vector_index"))
    assert all(plan.n == 2800 and plan.dim == 16 for plan in plans)
    reached = [plan for plan in plans if plan.predicted["recall"].value >= 0.9]
    assert plans[: len(reached)] == reached
    chosen = next(plan for plan in plans if plan.job.method.name == "curator")
    report = IndexKind().run(chosen, tmp_path / "run")
    assert report.measured["recall"] > 0.85
    assert report.measured["index_bytes"] == chosen.predicted["index_bytes"].value
    front = json.loads((tmp_path / "run" / "front.json").read_text())
    assert front == report.details["front"] and front[-1]["recall"] >= 0.9
    assert "<svg" in (tmp_path / "run" / "front.svg").read_text()
    index = CuratorIndex.load(tmp_path / "run" / "index.safetensors")
    assert len(index) == 2800 and index.broken() == 0
    lines = IndexKind().results(report, tmp_path / "run")
    assert lines[0].rows[-1][0] == f"{report.details['effort']:g}"


def test_a_file_of_ann_benchmarks(tmp_path):
    with h5py.File(tmp_path / "some.hdf5", "w") as file:
        file["train"], file["test"] = clustered(500), clustered(30, seed=1)
    job = IndexJob(data=str(tmp_path / "some.hdf5"), method="flat", queries=20)
    report = IndexKind().run(next(iter(IndexKind().plan(job, load("laptop")))), tmp_path / "run")
    assert report.measured["recall"] == 1.0 and report.plan.n == 500
    (tmp_path / "other.hdf5").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read"):
        IndexKind().plan(
            job.model_copy(update={"data": str(tmp_path / "other.hdf5")}), load("laptop")
        )
    with h5py.File(tmp_path / "less.hdf5", "w") as file:
        file["train"] = clustered(500)
    with pytest.raises(DataError, match="'train' and 'test'"):
        IndexKind().plan(
            job.model_copy(update={"data": str(tmp_path / "less.hdf5")}), load("laptop")
        )


@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_a_file_of_ann_benchmarks_is_written_and_read(metric, tmp_path):
    path = tmp_path / "made.hdf5"
    write_dataset(path, clustered(400), clustered(30, seed=1), metric=metric, k=5)
    with h5py.File(path) as file:
        assert (
            file.attrs["distance"] == {"l2": "euclidean", "ip": "dot", "cosine": "angular"}[metric]
        )
        gaps = file["train"][:][file["neighbors"][:]] - file["test"][:][:, None]
        if metric == "l2":
            np.testing.assert_allclose(np.linalg.norm(gaps, axis=2), file["distances"], rtol=1e-4)
        assert (np.diff(file["distances"], axis=1) >= 0).all()
    job = IndexJob(data=str(path), method="flat", queries=20, metric=metric, k=5)
    report = IndexKind().run(next(iter(IndexKind().plan(job, load("laptop")))), tmp_path / "run")
    assert report.measured["recall"] == 1.0
    with pytest.raises(VectorIndexError, match="expected 1 to 400"):
        write_dataset(path, clustered(400), clustered(30, seed=1), k=401)
    with pytest.raises(VectorIndexError, match="vectors: "):
        write_dataset(path, clustered(400)[0], clustered(30, seed=1))


def test_a_saved_index_answers_as_before_and_damage_is_refused(tmp_path):
    index, vectors = CuratorIndex(16, branching=8, shortlist=8), clustered(2000)
    index.train(vectors)
    index.add(np.arange(2000), vectors, tenant="a")
    index.grant(np.arange(0, 2000, 3), 7)
    index.remove(np.arange(0, 2000, 11))
    path = index.save(tmp_path / "index.safetensors")
    again = CuratorIndex.load(path)
    assert again.broken() == 0 and again.tenants() == index.tenants()
    for tenant in ("a", 7):
        np.testing.assert_array_equal(again.ids_of(tenant), index.ids_of(tenant))
        exact = {"tenant": tenant, "gamma2": 1e6}
        np.testing.assert_array_equal(
            again.search(vectors[:20], 5, **exact).ids, index.search(vectors[:20], 5, **exact).ids
        )
    text = path.read_bytes()
    for damaged in (text[: len(text) // 2], b"", text.replace(b"nodes", b"nodez")):
        path.write_bytes(damaged)
        with pytest.raises(VectorIndexError, match="not an index of curator"):
            CuratorIndex.load(path)
    with pytest.raises(VectorIndexError, match="not an index of curator"):
        CuratorIndex.load(tmp_path / "none")
    index.grant([1], ("a", "tuple"))
    with pytest.raises(VectorIndexError, match="text or numbers"):
        index.save(tmp_path / "other")


def test_a_file_whose_tree_is_none_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    index, vectors = CuratorIndex(16, branching=8), clustered(2000)
    index.train(vectors)
    index.add(np.arange(2000), vectors, tenant="a")
    path = index.save(tmp_path / "index.safetensors")
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        words = file.metadata()
    for row, column, value in (
        (0, 0, 3),
        (0, 1, 0),
        (1, 0, 2),
        (0, 2, 7),
        (5, 3, 0),
        (2, 1, 1),
        (3, 2, -4),
    ):
        arrays = load_file(path)
        arrays["nodes"] = arrays["nodes"].copy()
        arrays["nodes"][row, column] = value
        save_file(arrays, tmp_path / "wrong.safetensors", words)
        if (arrays["nodes"] == load_file(path)["nodes"]).all():
            continue
        # A first child of a node without children means nothing.
        if column == 1 and arrays["nodes"][row, 2] == 0:
            continue
        with pytest.raises(VectorIndexError, match="not a tree"):
            CuratorIndex.load(tmp_path / "wrong.safetensors")


def test_a_file_whose_owners_are_wrong_is_refused(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

    index, vectors = CuratorIndex(16), clustered(200)
    index.train(vectors)
    index.add(np.arange(200), vectors, tenant="a")
    path = index.save(tmp_path / "index.safetensors")
    with safe_open(path, "np") as file:
        words = file.metadata()
    for name, value in (("owners", -1), ("owners", 2), ("tenants", 1), ("tenants", -1)):
        arrays = load_file(path)
        arrays[name] = arrays[name].copy()
        arrays[name][3] = value
        save_file(arrays, tmp_path / "wrong.safetensors", words)
        with pytest.raises(VectorIndexError, match=r"owners: other|tenants: one"):
            CuratorIndex.load(tmp_path / "wrong.safetensors")


def test_too_few_vectors_and_unusable_ones(tmp_path):
    np.save(tmp_path / "few.npy", clustered(300))
    few = IndexJob(data=str(tmp_path / "few.npy"), queries=280)
    with pytest.raises(VectorIndexError, match="300 vectors, of which 280 are held out"):
        IndexKind().plan(few, load("laptop"))
    vectors = clustered(300)
    vectors[7] = np.nan
    np.save(tmp_path / "nan.npy", vectors)
    with pytest.raises(ConfigError, match="row 7"):
        IndexKind().plan(IndexJob(data=str(tmp_path / "nan.npy"), queries=50), load("laptop"))
    vectors[7] = 0
    np.save(tmp_path / "zero.npy", vectors)
    job = IndexJob(data=str(tmp_path / "zero.npy"), queries=50, metric="cosine")
    with pytest.raises(VectorIndexError, match="row 7 is zero"):
        IndexKind().plan(job, load("laptop"))
    with pytest.raises(VectorIndexError, match="900 cells for 250"):
        job = IndexJob(
            data=str(tmp_path / "few.npy"), queries=50, method={"name": "ivf_flat", "cells": 900}
        )
        IndexKind().plan(job, load("laptop"))

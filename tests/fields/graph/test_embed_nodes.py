"""The job ``embed_nodes``: plans, runs that measure, and vectors that other jobs read."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice, table
from shoal.fields.graph import CSRGraph, NodeLabels
from shoal.fields.graph.embedding.job import EmbedNodesJob
from shoal.fields.graph.embedding.kind import EmbedNodesKind
from shoal.fields.graph.embedding.picture import node_map, plane_of
from shoal.fields.retrieve.index.job import IndexJob
from shoal.fields.retrieve.index.kind import IndexKind
from shoal.machine import load


def test_plan_then_run_then_index(files, tmp_path):
    data, labels = files
    job = EmbedNodesJob(data=data, labels=labels, train_share=0.2)
    plans = EmbedNodesKind().plan(job, load("laptop"))
    assert [plan.job.method.name for plan in plans] == [
        "fastrp",
        "graphvite",
        "deepwalk",
    ]
    assert plans[0].num_nodes == 360 and plans[0].predicted["embed_s"].value > 0
    method = Choice(name="fastrp", options={"dim": 32, "beta": "tune"})
    [plan] = EmbedNodesKind().plan(job.model_copy(update={"method": method}), load("laptop"))
    report = EmbedNodesKind().run(plan, tmp_path / "run")
    assert report.measured["micro_f1"] > 0.9 and report.measured["macro_f1"] > 0.9
    assert report.measured["vector_bytes"] == plan.predicted["vector_bytes"].value
    assert report.measured["embed_s"] > 0 and "embed_s" in report.errors
    assert report.details["train"] == 72 and report.details["test"] == 288
    assert len(report.details["tried"]) <= 20
    vectors = np.load(tmp_path / "run" / "embedding.npy")
    assert vectors.shape == (360, 32) and vectors.dtype == np.float32
    assert np.load(tmp_path / "run" / "ids.npy").tolist() == list(range(1000, 1360))
    written = json.loads((tmp_path / "run" / "embedding.json").read_text())
    assert written["isolated_nodes"] == [] and written["beta"] == report.details["beta"]
    assert "group 0" in (tmp_path / "run" / "map.svg").read_text()
    results = EmbedNodesKind().results(report, tmp_path / "run")
    assert ("nodes", "360") in results[0].rows and "embedding.npy" in results[1]
    # The vectors are a source of the job index.
    index = IndexJob(data=str(tmp_path / "run" / "embedding.npy"), queries=60, method="flat")
    [plan] = IndexKind().plan(index, load("laptop"))
    assert IndexKind().run(plan, tmp_path / "index").measured["recall"] == 1.0


def test_without_labels_nothing_is_judged(tmp_path):
    CSRGraph.from_edges([0, 1, 2], [1, 2, 0], num_nodes=5).save(tmp_path / "graph")
    method = Choice(name="fastrp", options={"dim": 8})
    job = EmbedNodesJob(data=str(tmp_path / "graph"), method=method)
    [plan] = EmbedNodesKind().plan(job, load("laptop"))
    report = EmbedNodesKind().run(plan, tmp_path / "run")
    assert "micro_f1" not in report.measured and report.details["isolated"] == 2
    written = json.loads((tmp_path / "run" / "embedding.json").read_text())
    assert written["isolated_nodes"] == ["3", "4"]
    job = job.model_copy(update={"largest_component": True})
    [plan] = EmbedNodesKind().plan(job, load("laptop"))
    assert plan.num_nodes == 3


def test_what_cannot_be_done(files, tmp_path):
    data, _ = files
    kind, machine = EmbedNodesKind(), load("laptop")
    with pytest.raises(DataError, match="no such file"):
        kind.plan(EmbedNodesJob(data=str(tmp_path / "none")), machine)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="without nodes"):
        kind.plan(EmbedNodesJob(data=str(tmp_path / "empty.txt")), machine)
    with pytest.raises(DataError, match=r"none\.txt: cannot be read"):
        kind.plan(EmbedNodesJob(data=data, labels=str(tmp_path / "none.txt")), machine)
    (tmp_path / "few.txt").write_text("1000 a\n1001 b\n")
    with pytest.raises(ConfigError, match="labels = 2: expected at least 10"):
        kind.plan(EmbedNodesJob(data=data, labels=str(tmp_path / "few.txt")), machine)
    with pytest.raises(ConfigError, match="= 'fastpr': expected one of fastrp"):
        kind.plan(EmbedNodesJob(data=data, method="fastpr"), machine)
    method = Choice(name="fastrp", options={"beta": "tune"})
    [plan] = kind.plan(EmbedNodesJob(data=data, method=method), machine)
    with pytest.raises(ConfigError, match="no labels to tune by"):
        kind.run(plan, tmp_path / "run")
    assert not (tmp_path / "run" / "embedding.npy").exists()


def test_more_work_is_predicted_to_take_longer():
    from shoal.fields.graph.embedding.costs import rates_of
    from shoal.fields.graph.embedding.protocols import EmbedWork

    machine = load("laptop")
    work = EmbedWork(num_nodes=1000, nnz=8000, tuning=100, threads=1, rates=rates_of(machine))
    for name in table("node_embedder"):
        part = table("node_embedder").build(name)
        once = part.estimate(work, machine)
        assert sum(once.terms_s.values()) == pytest.approx(once.step_s.value)
        ten = work.model_copy(update={"num_nodes": 10_000, "nnz": 80_000})
        more = part.estimate(ten, machine)
        assert more.step_s.value == pytest.approx(10 * once.step_s.value)
        assert more.memory_total > 2 * once.memory_total
    tuned = table("node_embedder").build({"name": "fastrp", "beta": "tune"})
    plain = table("node_embedder").build("fastrp")
    a, b = (one.estimate(work, machine).step_s.value for one in (tuned, plain))
    assert 10 * b < a


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (5, 1), (40, 8)])
def test_pictures_of_few_nodes(shape):
    vectors = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "<svg" in node_map(vectors, None, 0)
        labels = NodeLabels.of([[str(i % 9)] if i % 3 else [] for i in range(shape[0])])
        assert "<svg" in node_map(vectors, labels, 0)
    places = plane_of(vectors)
    assert places.shape == (shape[0], 2) and np.isfinite(places).all()

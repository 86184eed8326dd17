"""The job ``train_gnn`` on sampled batches: losses, plans, what a run counts, and bad keys."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, DataError  # noqa: E402
from shoal.core.native import cpu_model  # noqa: E402
from shoal.core.parts import Choice, table  # noqa: E402
from shoal.fields.graph.gather.protocols import GatherRates  # noqa: E402
from shoal.fields.graph.gnn.batches import BatchTimes  # noqa: E402
from shoal.fields.graph.gnn.feeding import table_of  # noqa: E402
from shoal.fields.graph.gnn.inputs import classified_graph  # noqa: E402
from shoal.fields.graph.gnn.job import TrainGnnJob  # noqa: E402
from shoal.fields.graph.gnn.kind import TrainGnnKind  # noqa: E402
from shoal.fields.graph.gnn.protocols import GnnError, GnnRates  # noqa: E402
from shoal.fields.graph.gnn.training import train_network  # noqa: E402
from shoal.fields.graph.graph import GraphError  # noqa: E402
from shoal.machine import load  # noqa: E402

MEAN = Choice(name="mean")


def small(**changed):
    keys = {
        "data": "planted:400", "fanouts": (4, 3), "batch_size": 32, "epochs": 4, "hidden": 16,
        "feature_dim": 16, "train_share": 0.3, "learning_rate": 0.02, "dropout": 0.1,
        "aggregator": MEAN,
    }  # fmt: skip
    return TrainGnnJob.model_validate(keys | changed)


def test_losses_are_the_same_with_any_placement():
    job = small()
    data = classified_graph(job)
    features = data.features_of(job.feature_dim, job.seed)
    losses = {}
    for placement in [*table("feature_source"), {"name": "resident", "hot_by": "access"}]:
        for overlap in (True, False):
            choice = Choice.model_validate(placement)
            with table_of(job, choice, data, features, 0) as source:
                got = train_network(job, MEAN, data, features, 0, table=source, overlap=overlap)
                assert len(source.buffers) == 2 and source.counters().gathers == 16
            losses[str(choice), overlap] = (got.losses, got.test)
    [first, *others] = losses.values()
    assert len(first[0]) == 16 and first[0][-1] < first[0][0] and first[1] > 0.8
    assert all(one == first for one in others)


def test_plan_then_run(tmp_path):
    kind, machine = TrainGnnKind(), load("laptop")
    plans = kind.plan(small(), machine)
    assert {plan.job.placement.name for plan in plans} == set(table("feature_source"))
    seconds = [plan.predicted["epoch_s"].value for plan in plans]
    assert seconds == sorted(seconds) and "ms to gather" in plans[0].why
    measured = {}
    for plan in plans:
        name = plan.job.placement.name
        report = kind.run(plan, tmp_path / name)
        [row] = report.details["seeds"]
        counts = row["gathered"]
        moved = counts["host_read"] + counts["host_written"]
        assert report.measured["host_bytes"] == moved / 4 and row["placed"] == name
        # Epochs differ a little in the nodes that they draw.
        assert abs(report.errors["host_bytes"]) < 0.1
        measured[name] = report.measured
        assert f"features {name}" in kind.describe(plan)
    assert measured["staged"]["host_bytes"] == 3 * measured["direct"]["host_bytes"]
    assert measured["resident"]["host_bytes"] < measured["direct"]["host_bytes"]
    assert len({one["test_accuracy"] for one in measured.values()}) == 1


def test_the_slow_memory_decides_what_is_planned():
    machine = load("laptop")

    def seconds(**changed):
        plans = TrainGnnKind().plan(small(**changed), machine)
        return {plan.job.placement.name: plan.predicted["epoch_s"].value for plan in plans}

    fast, slow = seconds(), seconds(host_bytes_per_s=1e5)
    assert slow["staged"] == pytest.approx(3 * slow["direct"], rel=0.02)
    assert slow["resident"] < slow["direct"] and slow["direct"] > 3 * fast["direct"]
    times = BatchTimes(sample=1.0, gather=3.0, train=2.0, batches=5)
    assert times.epoch(2) == 6 + 4 * 3 == times.epoch(1)
    assert BatchTimes(sample=1.0, gather=1.0, train=2.0, batches=5).epoch(1) == 4 + 4 * 3


def test_batches_are_rehearsed_on_this_machine(monkeypatch):
    from shoal.fields.graph.gather import costs
    from shoal.fields.graph.gnn import planning

    gnn = GnnRates(flop_s=1e3, number_s=1e3, gather_s=1e3, call_s=1e3, step_s=1e3, spread=1.0)
    gather = GatherRates(
        pack_s=0, copy_s=0, direct_s=0, device_s=0, call_s=0, sample_s=0, spread=0.5
    )
    monkeypatch.setattr(planning, "rates_of", lambda machine: gnn)
    monkeypatch.setattr(costs, "machine_rates", lambda *given: gather)
    here = load("laptop").model_copy(update={"fingerprint": {"cpu": cpu_model()}})
    # By the rates a step would take years.
    for plan in TrainGnnKind().plan(small(), here):
        assert 1e-5 < plan.predicted["epoch_s"].value < 60 and "rehearsed" in plan.planner


def test_features_of_a_file(tmp_path):
    path = tmp_path / "features.npy"
    values = np.random.default_rng(0).standard_normal((400, 5), np.float32)
    np.save(path, values)
    data = classified_graph(small(features=str(path)))
    assert np.array_equal(data.features_of(16, 0), values)
    values[7, 2] = np.inf
    for wrong, said in [(values, "not finite, from row 0"), (values[:3], "3 rows; the graph has")]:
        np.save(path, wrong)
        with pytest.raises(DataError, match=said):
            classified_graph(small(features=str(path)))


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({"fanouts": (4, 0)}, GraphError, "fanouts = 0: expected at least 1, or -1"),
        ({"fanouts": (4,)}, GnnError, "one for each of 2 layers"),
        ({"neighbours": 3}, GnnError, "0 beside fanouts"),
        ({"fanouts": (), "placement": "direct"}, GnnError, "placement.*none without fanouts"),
        ({"fanouts": (), "host_bytes_per_s": 1.0}, GnnError, "host_bytes_per_s"),
        ({"placement": "pinned"}, ConfigError, "expected one of direct, staged, resident"),
        ({"features": "none.npy"}, DataError, "none.npy: cannot be read"),
    ],
)
def test_keys_that_do_not_fit(changed, error, said):
    with pytest.raises(error, match=said):
        TrainGnnKind().plan(small(**changed), load("laptop"))


def test_a_rate_that_is_too_high(tmp_path):
    job = small(learning_rate=1e30, placement="direct")
    [plan] = TrainGnnKind().plan(job, load("laptop"))
    with pytest.raises(GnnError, match="expected a lower rate"):
        TrainGnnKind().run(plan, tmp_path / "run")

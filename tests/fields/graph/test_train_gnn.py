"""The job ``train_gnn``: data, plans, runs that measure, and networks beside torch-geometric's."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, DataError  # noqa: E402
from shoal.core.parts import Choice, table  # noqa: E402
from shoal.core.random import seed64  # noqa: E402
from shoal.fields.graph.gnn.inputs import classified_graph  # noqa: E402
from shoal.fields.graph.gnn.job import TrainGnnJob  # noqa: E402
from shoal.fields.graph.gnn.kind import TrainGnnKind  # noqa: E402
from shoal.fields.graph.gnn.network import GraphSAGE, SAGEConv  # noqa: E402
from shoal.fields.graph.gnn.protocols import AggregateWork, GnnError  # noqa: E402
from shoal.fields.graph.gnn.training import train_network  # noqa: E402
from shoal.machine import load  # noqa: E402

PLANETOID = Path(os.environ.get("SHOAL_DATA", "nowhere"), "planetoid")


def citations(path, **changed):
    """A small graph in the form of Planetoid's: two classes, of which features say much."""
    draw = np.random.default_rng(0)
    labels = np.arange(60) % 2
    ends = draw.integers(0, 60, (400, 2))
    arrays = {
        "x_data": np.ones(60, np.float32), "x_indices": labels.astype(np.int32),
        "x_indptr": np.arange(61, dtype=np.int32), "x_shape": np.array([60, 4]),
        "labels": labels.astype(np.int16),
        "edges": ends[labels[ends[:, 0]] == labels[ends[:, 1]]].astype(np.int32),
        "train": np.arange(10), "val": np.arange(10, 30), "test": np.arange(30, 60),
    }  # fmt: skip
    arrays |= changed
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return str(path)


def test_plan_then_run(tmp_path):
    data = citations(tmp_path / "small.npz")
    job = TrainGnnJob(data=data, epochs=10, hidden=8, dropout=0.0, learning_rate=0.05, runs=2)
    plans = TrainGnnKind().plan(job, load("laptop"))
    assert {plan.job.aggregator.name for plan in plans} == set(table("aggregator"))
    seconds = [plan.predicted["epoch_s"].value for plan in plans]
    assert seconds == sorted(seconds)
    for plan in plans:
        name = plan.job.aggregator.name
        report = TrainGnnKind().run(plan, tmp_path / name)
        assert report.measured["test_accuracy"] > 0.9, name
        assert report.measured["epoch_s"] > 0 and {"epoch_s", "memory_bytes"} <= set(report.errors)
        assert [row["seed"] for row in report.details["seeds"]] == [0, 1]
        assert report.details["most_common"] == 0.5
        [table_of, common, files] = TrainGnnKind().results(report, tmp_path / name)
        assert len(table_of.rows) == 2 and "50.0%" in common and "model.safetensors" in files
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "lcm" / "model.safetensors")
    network = GraphSAGE(4, 8, 2, aggregator="lcm")
    network.load_state_dict(tensors)
    given = classified_graph(job)
    network.eval()
    scores = network(
        torch.from_numpy(given.features), torch.from_numpy(given.graph.indptr),
        torch.from_numpy(given.graph.indices.astype(np.int64)),
    )  # fmt: skip
    kept = np.load(tmp_path / "lcm" / "classes.npy")
    assert np.array_equal(scores.argmax(1).numpy(), kept)


def test_seeds_decide_everything(tmp_path):
    job = TrainGnnJob(
        data=citations(tmp_path / "small.npz"), epochs=3, hidden=8, neighbours=3, dropout=0.5
    )
    given = classified_graph(job)
    lcm = Choice(name="lcm")
    one, again, other = (train_network(job, lcm, given, given.features, seed) for seed in (0, 0, 1))
    same = zip(one.network.parameters(), again.network.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert not torch.equal(one.network.leave.weight, other.network.leave.weight)


def test_planted_communities_and_drawn_neighbours(tmp_path):
    method = Choice(name="lcm")
    job = TrainGnnJob(
        data="planted:300", epochs=10, hidden=16, neighbours=4, aggregator=method, feature_dim=16,
        train_share=0.3, learning_rate=0.02, dropout=0.1,
    )  # fmt: skip
    [plan] = TrainGnnKind().plan(job, load("laptop"))
    assert plan.depth == 2
    report = TrainGnnKind().run(plan, tmp_path / "run")
    assert report.measured["test_accuracy"] > report.details["most_common"] + 0.2
    assert report.details["features"] == 16 and report.details["classes"] == 3


def test_a_stopped_run_goes_on_with_the_next_seed(tmp_path, monkeypatch):
    from shoal.fields.graph.gnn import training

    seeds = []
    original = training.train_network

    def stopping(job, choice, data, features, seed, watch, *, table):
        seeds.append(seed)
        if seeds == [0, 1]:
            watch(1)
            raise KeyboardInterrupt
        return original(job, choice, data, features, seed, watch)

    monkeypatch.setattr(training, "train_network", stopping)
    data = citations(tmp_path / "small.npz")
    job = TrainGnnJob(data=data, epochs=2, hidden=4, runs=3, aggregator=Choice(name="mean"))
    [plan] = TrainGnnKind().plan(job, load("laptop"))
    with pytest.raises(KeyboardInterrupt):
        TrainGnnKind().run(plan, tmp_path / "run")
    report = TrainGnnKind().run(plan, tmp_path / "run", resume=True)
    assert seeds == [0, 1, 1, 2]
    assert [row["seed"] for row in report.details["seeds"]] == [0, 1, 2]


def test_more_neighbours_are_predicted_to_take_longer():
    from shoal.fields.graph.gnn.costs import rates_of

    machine = load("laptop")
    work = AggregateWork(
        segments=1000, entries=8000, largest=100, width=64, rates=rates_of(machine)
    )
    for name in table("aggregator"):
        part = table("aggregator").build(name)
        once = part.estimate(work, machine)
        assert sum(once.terms_s.values()) == pytest.approx(once.step_s.value)
        ten = part.estimate(work.model_copy(update={"entries": 80_000}), machine)
        assert ten.step_s.value > 2 * once.step_s.value and ten.memory_total > once.memory_total
        hub = part.estimate(work.model_copy(update={"largest": 8000}), machine)
        waits = part.depth(8000) > 1000
        assert (hub.step_s.value > 3 * once.step_s.value) == waits


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edges": None}, "cannot be read"),
        ({"edges": np.array([[0, 60]])}, "target = 60"),
        ({"edges": np.array([0, 1, 2])}, "not a graph of Planetoid"),
        ({"x_indices": np.full(60, 9, np.int32)}, "not a graph of Planetoid"),
        ({"x_shape": np.array([60])}, "not a graph of Planetoid"),
        ({"x_data": np.full(60, np.nan, np.float32)}, "features that are not finite"),
        ({"labels": np.zeros(59, np.int16)}, "59 labels of 60 nodes"),
        ({"labels": np.full(60, -1, np.int16)}, "no label"),
        ({"train": np.array([60])}, "does not exist"),
        ({"val": np.zeros(0, int)}, "a division without nodes"),
        ({"edges": np.array([[None, None]], object)}, "cannot be read"),
    ],
)
def test_damaged_files(tmp_path, changed, said):
    data = citations(tmp_path / "small.npz", **changed)
    with pytest.raises(DataError, match=said):
        classified_graph(TrainGnnJob(data=data))


def test_what_cannot_be_done(tmp_path, monkeypatch):
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    kind, machine = TrainGnnKind(), load("laptop")
    with pytest.raises(DataError, match="SHOAL_DATA"):
        kind.plan(TrainGnnJob(data="planetoid/cora.npz"), machine)
    edges = tmp_path / "edges.txt"
    edges.write_text("".join(f"{a} {a + 1}\n" for a in range(30)))
    with pytest.raises(GnnError, match="labels of at least 10"):
        kind.plan(TrainGnnJob(data=str(edges)), machine)
    several = tmp_path / "labels.txt"
    several.write_text("".join(f"{a} x\n{a} y{a % 2}\n" for a in range(30)))
    with pytest.raises(GnnError, match="several labels"):
        kind.plan(TrainGnnJob(data=str(edges), labels=str(several)), machine)
    several.write_text("".join(f"{a} y{a % 2}\n" for a in range(30)))
    with pytest.raises(GnnError, match=r"val_share = 0\.5: expected less than 0\.5"):
        kind.plan(
            TrainGnnJob(data=str(edges), labels=str(several), train_share=0.5, val_share=0.5),
            machine,
        )
    edges.write_text("".join(f"{a} {a + 1} 2.0\n" for a in range(30)))
    with pytest.raises(GnnError, match="has weights"):
        kind.plan(TrainGnnJob(data=str(edges), labels=str(several)), machine)
    data = citations(tmp_path / "small.npz")
    with pytest.raises(GnnError, match="the file has labels"):
        kind.plan(TrainGnnJob(data=data, labels=str(several)), machine)
    with pytest.raises(ConfigError, match="expected one of mean"):
        kind.plan(TrainGnnJob(data=data, aggregator="median"), machine)
    job = TrainGnnJob(data=data, aggregator="sum", learning_rate=1e30, epochs=5)
    [plan] = kind.plan(job, machine)
    with pytest.raises(GnnError, match="expected a lower rate"):
        kind.run(plan, tmp_path / "run")
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_a_convolution_is_that_of_torch_geometric(name):
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    ours, theirs = SAGEConv(6, 5, name), geometric.SAGEConv(6, 5, aggr=name)
    with torch.no_grad():
        theirs.lin_l.weight.copy_(ours.of_pooled.weight)
        theirs.lin_l.bias.copy_(ours.of_pooled.bias)
        theirs.lin_r.weight.copy_(ours.of_self.weight)
    sizes = torch.tensor([0, 3, 1, 8, 2])
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    x, neighbours = torch.randn(5, 6), torch.randint(5, (int(ptr[-1]),))
    edges = torch.stack([neighbours, torch.repeat_interleave(torch.arange(5), sizes)])
    torch.testing.assert_close(ours(x, ptr, neighbours), theirs(x, edges))


@pytest.mark.parametrize("name", ["lcm", "gru", "max"])
def test_an_aggregator_in_networks_of_torch_geometric(name):
    geometric = pytest.importorskip("torch_geometric.nn")
    from shoal.fields.graph.gnn.pyg import PooledAggregation

    torch.manual_seed(0)
    aggregation = PooledAggregation(6, name)
    assert isinstance(aggregation, geometric.Aggregation)
    conv = geometric.SAGEConv(6, 5, aggr=aggregation)
    x, edges = torch.randn(9, 6), torch.randint(9, (2, 40))
    conv.eval()
    order = torch.argsort(edges[1], stable=True)
    sizes = edges[1].bincount(minlength=9)
    ptr = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    # Our convolution in eval mode with the same modules.
    wanted = conv.lin_l(aggregation.pool(x[edges[0, order]], ptr)) + conv.lin_r(x)
    torch.testing.assert_close(conv(x, edges), wanted)
    conv.train()
    before = conv(x, edges).sum() + aggregation.penalty()
    before.backward()
    assert all(one.grad is not None for one in conv.lin_l.parameters())
    weights = [one.clone() for one in aggregation.parameters()]
    conv.reset_parameters()
    if name == "gru":
        assert not torch.equal(weights[0], next(aggregation.parameters()))
    conv.eval()
    torch.testing.assert_close(aggregation(x), aggregation.pool(x, torch.tensor([0, 9])))
    with pytest.raises(GnnError, match=r"expected \[n, width\]"):
        aggregation(x[None], torch.zeros(9, dtype=torch.int64))


class TheirNetwork(torch.nn.Module):
    """The same layers, with torch-geometric's convolutions."""

    def __init__(self, ours):
        from torch_geometric.nn import SAGEConv as TheirConv

        super().__init__()
        self.enter, self.leave = copy.deepcopy(ours.enter), copy.deepcopy(ours.leave)
        self.convs = torch.nn.ModuleList()
        for one in ours.convs:
            conv = TheirConv(*one.of_self.weight.shape[::-1], aggr="mean")
            conv.lin_l.load_state_dict(one.of_pooled.state_dict())
            conv.lin_r.load_state_dict(one.of_self.state_dict())
            self.convs.append(conv)

    def forward(self, x, edges):
        x = torch.relu(self.enter(x))
        for conv in self.convs:
            x = torch.relu(conv(x, edges))
        return self.leave(x)


@pytest.mark.slow
@pytest.mark.skipif(not PLANETOID.is_dir(), reason="no planetoid in SHOAL_DATA")
def test_cora_is_learned_as_by_torch_geometric():
    """From the same parameters and without dropout, epoch by epoch."""
    pytest.importorskip("torch_geometric")
    job = TrainGnnJob(data="planetoid/cora.npz", epochs=25, hidden=32, dropout=0.0)
    given = classified_graph(job)
    x, classes = torch.from_numpy(given.features), torch.from_numpy(given.classes)
    ours = train_network(job, Choice(name="mean"), given, given.features, 0)
    torch.manual_seed(seed64(0, purpose="graph network"))
    theirs = TheirNetwork(GraphSAGE(x.shape[1], 32, given.num_classes, dropout=0.0))
    rows, columns = given.graph.edges()
    edges = torch.from_numpy(np.stack([columns, rows]))
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01, weight_decay=5e-4)
    best, tested = -1.0, 0.0
    for _ in range(job.epochs):
        optimizer.zero_grad()
        scores = theirs(x, edges)[given.train]
        torch.nn.functional.cross_entropy(scores, classes[given.train]).backward()
        optimizer.step()
        with torch.no_grad():
            right = (theirs(x, edges).argmax(1) == classes).numpy()
        if right[given.val].mean() > best:
            best, tested = right[given.val].mean(), right[given.test].mean()
    assert tested > 0.65
    assert abs(ours.test - tested) < 0.01 and abs(ours.val - best) < 0.01


@pytest.mark.skipif(not PLANETOID.is_dir(), reason="no planetoid in SHOAL_DATA")
@pytest.mark.parametrize(
    ("name", "nodes", "edges"), [("cora", 2708, 5278), ("citeseer", 3327, 4552)]
)
def test_citation_graphs(name, nodes, edges):
    given = classified_graph(TrainGnnJob(data=f"planetoid/{name}.npz"))
    assert given.graph.num_nodes == nodes and given.graph.nnz == 2 * edges
    assert len(given.val) == 500 and len(given.test) == 1000
    assert given.classes[given.train].min() == 0
    np.testing.assert_allclose(np.linalg.norm(given.features, axis=1).max(), 1, rtol=1e-5)

"""Deep networks on ranks: equal to one process, and to old vectors where they should be old."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pymetis")

import shoal  # noqa: E402
from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import ConfigError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.fields.graph import CSRGraph  # noqa: E402
from shoal.fields.graph.deep.job import TrainDeepGnnJob  # noqa: E402
from shoal.fields.graph.deep.network import ALPHA, GCNII, beta  # noqa: E402
from shoal.fields.graph.deep.partition import LocalRows, NodeDivision, divided_nodes, normalised  # noqa: E402
from shoal.fields.graph.deep.protocols import DeepGnnError, RankGrid  # noqa: E402
from shoal.fields.graph.deep.ranks import DeepGnnRank  # noqa: E402

LAYERS, WIDTH, FEATURES, CLASSES = 6, 5, 7, 3


def some_graph(nodes: int = 60) -> CSRGraph:
    """A random graph with a hub, an isolated node, and an edge from a node to itself."""
    draw = np.random.default_rng(0)
    a, b = draw.integers(0, nodes - 1, (2, 3 * nodes))
    hub = np.stack([np.zeros(nodes // 2, int), np.arange(nodes // 2)])
    return CSRGraph.from_edges(np.append(a, hub[0]), np.append(b, hub[1]), num_nodes=nodes)


class Setting:
    """A graph with features and classes, and networks that are equal on all ranks."""

    def __init__(self) -> None:
        self.graph = some_graph()
        self.matrix = normalised(self.graph).astype(np.float64)
        draw = np.random.default_rng(1)
        self.x = torch.from_numpy(draw.normal(size=(60, FEATURES)))
        self.classes = torch.from_numpy(draw.integers(0, CLASSES, 60))
        self.learn = torch.from_numpy(draw.random(60) < 0.4)

        # Ranks are threads, which share the generator of parameters.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self._network = GCNII(FEATURES, WIDTH, CLASSES, LAYERS).double()

    def network(self) -> GCNII:
        return copy.deepcopy(self._network)

    def rank(self, comm, grid: RankGrid, division: NodeDivision, network: GCNII) -> DeepGnnRank:
        rows = LocalRows.of(self.matrix, division, comm.rank % grid.parts, grid)
        own = rows.own
        return DeepGnnRank(
            comm, grid, network, rows, self.x[own], self.classes[own], self.learn[own],
            int(self.learn.sum()),
        )  # fmt: skip

    def gradients(self, grid: RankGrid, exact: list[bool]) -> tuple[list[dict], list[float]]:
        """By rank, gradients after some epochs without updates; and the loss of each epoch."""
        division = NodeDivision.of(self.graph, grid)

        def work(comm):
            network = self.network()
            rank = self.rank(comm, grid, division, network)
            losses = [float(rank.epoch(at, 0, exact=one)) for at, one in enumerate(exact, 1)]
            said = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
            return said, losses

        ranks = run_ranks(grid.world, work)
        losses = zip(*(loss for _, loss in ranks), strict=True)
        return [one for one, _ in ranks], [sum(each) for each in losses]

    def reference(self) -> tuple[dict, float]:
        """Gradients and loss by autograd, with a dense matrix."""
        network, matrix = self.network(), torch.from_numpy(self.matrix.toarray())
        h = h0 = torch.relu(network.enter(self.x))
        for layer, weight in enumerate(network.weights, 1):
            s = (1 - ALPHA) * matrix @ h + ALPHA * h0
            h = torch.relu((1 - beta(layer)) * s + beta(layer) * s @ weight)
        scores = network.leave(h)
        torch.testing.assert_close(network(self.x, self.matrix), scores.detach())
        loss = torch.nn.functional.cross_entropy(scores[self.learn], self.classes[self.learn])
        loss.backward()
        return {n: p.grad for n, p in network.named_parameters()}, loss.item()


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 2, 1), (2, 2, 4)])
def test_exact_epochs_equal_autograd(grid):
    setting = Setting()
    shape = RankGrid(stages=grid[0], parts=grid[1], chunks=grid[2])
    ranks, (loss,) = setting.gradients(shape, [True])
    wanted, expected = setting.reference()
    assert loss == pytest.approx(expected, rel=1e-9)
    assert set().union(*ranks) == set(wanted)
    for rank in ranks:
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("grid", [(1, 1, 5), (2, 2, 4)])
def test_old_vectors_become_exact_where_weights_are_frozen(grid):
    setting = Setting()
    shape = RankGrid(stages=grid[0], parts=grid[1], chunks=grid[2])
    wanted, expected = setting.reference()
    # Vectors take an epoch a layer, gradients as many after them.
    ranks, losses = setting.gradients(shape, [False] * (2 * LAYERS + 2))
    assert abs(losses[0] - expected) > 1e-6
    assert losses[LAYERS] == pytest.approx(expected, rel=1e-12)
    assert losses[LAYERS] == pytest.approx(losses[-1], rel=1e-14)
    for rank in ranks:
        for name, gradient in rank.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12)
    # After an exact epoch, the next one is exact too.
    _, (exact, stale) = setting.gradients(shape, [True, False])
    assert exact == pytest.approx(stale, rel=1e-12)


def test_edges_between_chunks_are_not_dropped():
    setting = Setting()
    shape = RankGrid(stages=1, parts=1, chunks=6)
    division = NodeDivision.of(setting.graph, shape)
    rows = LocalRows.of(setting.matrix, division, 0, shape)
    assert sum(chunk.entries for chunk in rows.chunks) == setting.matrix.nnz
    source, target = setting.graph.edges()
    assert (division.chunk[source] != division.chunk[target]).any()


def test_labels_of_other_nodes_do_not_matter():
    setting = Setting()
    shape = RankGrid(stages=2, parts=1, chunks=4)
    before, _ = setting.gradients(shape, [True, False])
    setting.classes[~setting.learn] = (setting.classes[~setting.learn] + 1) % CLASSES
    after, _ = setting.gradients(shape, [True, False])
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("parts", [1, 2, 7, 60])
def test_no_set_of_nodes_is_empty(parts):
    of = divided_nodes(some_graph(), parts)
    assert np.bincount(of, minlength=parts).min() > 0


def test_rows_of_others_are_counted():
    graph = CSRGraph.from_edges(np.array([0, 1, 2, 3]), np.array([1, 2, 3, 0]), num_nodes=4)
    division = NodeDivision(np.array([0, 0, 1, 1]), np.zeros(4, int))
    assert division.replicas(graph) == 4
    assert NodeDivision(np.zeros(4, int), np.zeros(4, int)).replicas(graph) == 0


def test_splits_and_graphs_that_do_not_fit_are_errors():
    split = table("graph_split").build({"name": "hybrid", "parts": 3})
    with pytest.raises(DeepGnnError, match="a multiple of 3"):
        split.grid(4)
    for wrong in ({"chunks": 0}, {"chunks": "some"}):
        with pytest.raises(ConfigError):
            table("graph_split").build({"name": "pipe", **wrong})
    with pytest.raises(DeepGnnError, match="4 stages; expected a layer for each"):
        shoal.plan(
            {"job": "train_deep_gnn", "data": "planted:50", "layers": 2, "split": "pipe"}, "laptop"
        )
    with pytest.raises(DeepGnnError, match="expected at least as many"):
        divided_nodes(some_graph(), 61)
    for wrong in ({"layers": 0}, {"ranks": 0}, {"exact_epochs": 0}, {"split": "rows"}):
        with pytest.raises(ConfigError):
            shoal.plan({"job": "train_deep_gnn", "data": "planted:50", **wrong}, "laptop")


def test_the_plan_offers_every_split_and_counts_their_bytes():
    plans = shoal.plan({"job": "train_deep_gnn", "data": "planted:400", "hidden": 16}, "laptop")
    assert {str(plan.job.split).partition("(")[0] for plan in plans} >= {"pipe", "nodes", "hybrid"}
    by_name = {str(plan.job.split).partition("(")[0]: plan for plan in plans}
    assert by_name["pipe"].replicas == 0 < by_name["nodes"].replicas
    memory = by_name["pipe"].predicted["memory_bytes"].value
    assert memory > 4 * 400 * 16 * 4


def test_exact_epochs_come_first_and_every_so_often():
    job = TrainDeepGnnJob(data="planted:50", exact_epochs=2, refresh=3)
    assert [epoch for epoch in range(1, 13) if job.exact(epoch)] == [1, 2, 5, 8, 11]
    assert not TrainDeepGnnJob(data="planted:50").exact(2)
    plain, refreshed = (
        shoal.plan(
            {"job": "train_deep_gnn", "data": "planted:3000", "split": "pipe", "refresh": refresh},
            "laptop",
        )[0].predicted["epoch_s"].value
        for refresh in (0, 4)
    )  # fmt: skip
    assert refreshed > 1.2 * plain


@pytest.mark.slow
@pytest.mark.parametrize("split", ["pipe", "nodes", "hybrid"])
def test_a_job_trains_on_processes_and_sends_what_is_predicted(tmp_path, split):
    job = TrainDeepGnnJob(
        data="planted:400", split=split, epochs=12, layers=8, hidden=16, learning_rate=0.02,
        train_share=0.3,
    )  # fmt: skip
    report = shoal.run(job, machine="laptop", directory=tmp_path / "run")
    predicted = report.plan.predicted["sent_bytes"].value
    assert report.measured["sent_bytes"] == pytest.approx(predicted, rel=0.02)
    assert report.measured["memory_bytes"] > 4 * 100e6  # of all ranks
    (seed,) = report.details["seeds"]
    assert seed["loss"][-1] < seed["loss"][0]
    assert report.measured["test_accuracy"] > report.details["most_common"]
    classes = np.load(tmp_path / "run" / "classes.npy")
    assert classes.shape == (400,)

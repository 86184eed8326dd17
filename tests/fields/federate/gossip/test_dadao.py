"""DADAO: its flow, what exchanges conserve, its limit; the methods that it is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.linalg import expm

from shoal.claims.lab.synchronous_gossip import adom_plus, gradient_tracking
from shoal.core.parts import table
from shoal.fields.federate.gossip.dadao import Dadao, DadaoConstants, DadaoFlow, DadaoNode
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.gossip.protocols import Spot
from shoal.fields.federate.gossip.rates import uniform_rates
from shoal.fields.federate.gossip.virtual import VirtualGossip
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError


class _Quadratic:
    """x^T H x / 2 - b^T x of one node."""

    def __init__(self, H: np.ndarray, b: np.ndarray) -> None:
        self.H, self.b, self.size = H, b, len(b)
        self.layout = (("x", b.shape),)

    def start(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(self.size)

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        return model, 0.0

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        result: np.ndarray = self.H @ model - self.b
        return result

    def curvature(self) -> tuple[float, float]:
        values = np.linalg.eigvalsh(self.H)
        return float(values[0]), float(values[-1])


def _works(nodes: int, size: int = 4, condition: float = 8.0) -> list[_Quadratic]:
    draw = np.random.default_rng(3)
    works = []
    for _ in range(nodes):
        Q = np.linalg.qr(draw.standard_normal((size, size)))[0]
        H = Q @ np.diag(np.geomspace(1, condition, size)) @ Q.T
        works.append(_Quadratic(H, draw.standard_normal(size)))
    return works


def _limit(works: list[_Quadratic]) -> np.ndarray:
    result: np.ndarray = np.linalg.solve(sum(one.H for one in works), sum(one.b for one in works))
    return result


def _nodes(
    graph: NodeGraph, works: list[_Quadratic], policy: Dadao, **spot: Any
) -> list[DadaoNode]:
    shared = policy.share(graph, works)
    return [
        policy.node(
            Spot(me=me, graph=graph, seed=1, start=me, rounds=10**6, shared=shared, **spot), work
        )
        for me, work in enumerate(works)
    ]


@pytest.mark.parametrize("condition", [1.0, 5.0, 93.0, 800.0])
def test_flow_is_the_exponential_of_the_matrix(condition: float) -> None:
    fixed = DadaoConstants(mu=0.1, smoothness=0.1 * condition, chi1=2.0)
    flow = DadaoFlow(fixed)
    for t in (0.0, 0.01, 1.0, 40.0):
        np.testing.assert_allclose(flow(t), expm(fixed.matrix() * t), rtol=1e-9, atol=1e-11)


def test_flow_is_many_small_steps() -> None:
    fixed = DadaoConstants(mu=1.0, smoothness=10.0, chi1=2.0)
    state = np.random.default_rng(0).standard_normal((6, 3))
    A, step = fixed.matrix(), 1e-6
    slow, count = state.copy(), 200_000
    once = step * A
    for _ in range(count):
        slow += once @ slow
    np.testing.assert_allclose(DadaoFlow(fixed)(step * count) @ state, slow, atol=1e-6)


@pytest.mark.parametrize("topology", ["cycle", "star"])
def test_the_limit_is_the_centralized_solution(topology: str) -> None:
    works = _works(5)
    graph = table("topology").build(topology).graph(5, 0)
    nodes = _nodes(graph, works, Dadao(l2=0.0))
    clock = VirtualGossip(nodes, [0.0] * 5)
    clock.begin()
    while clock.now < 600:
        clock.step()
    for node in nodes:
        np.testing.assert_allclose(node.model(clock.now), _limit(works), atol=1e-6)
    # Every unit of time has a gradient of each node, and as many exchanges as the rates say.
    assert sum(node.count for node in nodes) == pytest.approx(5 * 600, rel=0.1)
    total = sum(nodes[0]._spot.shared["rates"])
    assert clock.exchanges == pytest.approx(total * 600, rel=0.1)


def test_exchanges_conserve_the_sum_of_z() -> None:
    works = _works(4)
    nodes = _nodes(table("topology").build("cycle").graph(4, 0), works, Dadao(l2=0.0))
    clock = VirtualGossip(nodes, [0.0] * 4)
    clock.begin()
    for _ in range(400):
        clock.step()
        now = [node._flow(node._read(clock.now) - node._at) @ node.state for node in nodes]
        total = np.sum(now, axis=0)[4:]
        assert np.abs(total).max() <= 1e-9 * max(1.0, np.abs(now).max())
    assert np.abs(now).max() > 0


def test_the_unit_of_time_is_only_a_unit() -> None:
    works, graph = _works(3), table("topology").build("cycle").graph(3, 0)
    ends = []
    for unit in (1.0, 0.004):
        nodes = _nodes(graph, works, Dadao(l2=0.0), unit_s=unit)
        clock = VirtualGossip(nodes, [0.0] * 3)
        clock.begin()
        while clock.now < 20.5 * unit:
            clock.step()
        clock.now = 20.5 * unit
        ends.append(np.stack([node.model(clock.now) for node in nodes]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-6)


def test_l2_is_part_of_the_loss() -> None:
    works, graph = _works(3), table("topology").build("complete").graph(3, 0)
    nodes = _nodes(graph, works, Dadao(l2=2.0))
    clock = VirtualGossip(nodes, [0.0] * 3)
    clock.begin()
    while clock.now < 400:
        clock.step()
    ridge = np.linalg.solve(
        sum(one.H + 2 * np.eye(4) for one in works), sum(one.b for one in works)
    )
    np.testing.assert_allclose(nodes[1].model(clock.now), ridge, atol=1e-6)


def test_a_clock_stands_still_at_an_exchange_that_is_refused() -> None:
    works, graph = _works(3), table("topology").build("cycle").graph(3, 0)
    node, same = (_nodes(graph, works, Dadao(l2=0.0))[0] for _ in range(2))
    for one in (node, same):
        one._gradient_at = 100.0
    due = node.exchange_due(0.0)
    assert due is not None
    at, peer = due
    node.offer(peer, at)
    node.postpone(peer, at + 3)
    again = node.exchange_due(at + 5)
    assert again is not None
    assert again[1] == peer
    assert at + 3 < again[0] <= at + 5
    assert node.progress(at + 5) == pytest.approx(at)
    theirs = {"m": np.zeros(4), "t": np.array([at])}
    node.settle(peer, node.offer(peer, at + 5), theirs, at + 6)
    same.settle(peer, same.offer(peer, at), theirs, at)
    # What happened is what would have happened in time.
    np.testing.assert_allclose(node.state, same.state)
    assert node._next == same._next
    assert node.progress(at + 6 + 1e-3) > at


def test_a_clock_that_is_ahead_waits() -> None:
    works, graph = _works(3), table("topology").build("cycle").graph(3, 0)
    node = _nodes(graph, works, Dadao(l2=0.0))[2]  # which begins no exchange itself
    node._gradient_at = 100.0
    theirs = {"m": np.zeros(4), "t": np.array([4.0])}
    node.settle(0, node.offer(0, 10.0), theirs, 12.0)
    # Held from 10 to 12, and 6 more.
    for now, clock in ((12.0, 10.0), (18.0, 10.0), (19.0, 11.0)):
        assert node.progress(now) == pytest.approx(clock)
    assert node.due(19.0) == pytest.approx(108.0)


def test_a_message_that_is_wrong_changes_nothing() -> None:
    works, graph = _works(3), table("topology").build("cycle").graph(3, 0)
    node = _nodes(graph, works, Dadao(l2=0.0))[0]
    mine = node.offer(1, 0.5)
    before = node.state.copy()
    time = np.zeros(1)
    for wrong in (
        {},
        {"m": np.zeros(3), "t": time},
        {"m": np.full(4, np.nan), "t": time},
        {"m": np.zeros(4), "t": np.array([np.inf])},
    ):
        with pytest.raises(UpdateRefusedError, match="finite numbers"):
            node.settle(1, mine, wrong, 0.5)
    assert np.array_equal(node.state, before)


@pytest.mark.parametrize(
    "options", [{"l2": 0.0, "mu": 2.0, "smoothness": 1.0}, {"l2": 0.0, "smoothness": 1.0}]
)
def test_losses_that_are_not_strongly_convex(options: dict[str, float]) -> None:
    flat = [_Quadratic(np.zeros((2, 2)), np.zeros(2)) for _ in range(3)]
    with pytest.raises(FederationError, match="0 < mu <= L"):
        Dadao(**options).share(table("topology").build("cycle").graph(3, 0), flat)


def test_a_graph_that_changes() -> None:
    """A cycle and a star take turns of 5 units; both are used with the larger chi1."""
    works = _works(5)
    graphs = [table("topology").build(name).graph(5, 0) for name in ("cycle", "star")]
    both = [uniform_rates(graph) for graph in graphs]
    worst = max(one.chi1 for one in both)
    policy = Dadao(l2=0.0)
    shared = {**policy.share(graphs[0], works), "chi1": worst}
    nodes = [
        policy.node(
            Spot(me=me, graph=graphs[0], seed=1, start=me, rounds=10**6, shared=shared), work
        )
        for me, work in enumerate(works)
    ]
    clock = VirtualGossip(nodes, [0.0] * 5)
    clock.begin()
    used = set()
    for turn in range(120):
        graph, rates = graphs[turn % 2], both[turn % 2].rates
        for me, node in enumerate(nodes):
            ends = zip(graph.edges, rates, strict=True)
            node.use({j: rate for (i, j), rate in ends if i == me}, clock.now)
            used.update((me, peer) for peer in node._next)
        clock.refresh()
        while clock.now < 5 * (turn + 1):
            clock.step()
    assert used == {*graphs[0].edges, *graphs[1].edges}
    for node in nodes:
        np.testing.assert_allclose(node.model(clock.now), _limit(works), atol=1e-5)


def test_gradients_of_batches_have_a_noise_floor() -> None:
    """Noise of deviation 0.05 keeps the models away from the optimum, and near it."""
    works = _works(4)
    draw = np.random.default_rng(5)
    asked = []

    class Noisy(_Quadratic):
        def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
            asked.append(number)
            return super().gradient(model) + 0.05 * draw.standard_normal(len(model))

    noisy = [Noisy(one.H, one.b) for one in works]
    graph = table("topology").build("cycle").graph(4, 0)
    nodes = _nodes(graph, noisy, Dadao(l2=0.0, stochastic=True))
    clock = VirtualGossip(nodes, [0.0] * 4)
    clock.begin()
    while clock.now < 150:
        clock.step()
    far = np.mean([np.abs(node.model(clock.now) - _limit(works)).mean() for node in nodes])
    assert 1e-4 < far < 0.1
    assert min(asked) == 1


def test_the_synchronous_methods_find_the_same() -> None:
    works = _works(6)
    graph = table("topology").build("cycle").graph(6, 0)
    H, b = np.stack([one.H for one in works]), np.stack([one.b for one in works])

    def gradients(x: np.ndarray) -> np.ndarray:
        result: np.ndarray = np.einsum("nde,ne->nd", H, x) - b
        return result

    x = np.random.default_rng(0).standard_normal((6, 4))
    for method, count in (
        (adom_plus(graph, gradients, x, 1.0, 8.0), 1400),
        (gradient_tracking(graph, gradients, x, 0.004), 4000),
    ):
        for _ in range(count):
            models, made, used = next(method)
        np.testing.assert_allclose(models, np.tile(_limit(works), (6, 1)), atol=1e-6)
        assert made >= 6 * count
        assert used % len(graph.edges) == 0

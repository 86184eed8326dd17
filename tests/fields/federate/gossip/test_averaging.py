"""Averages: variances, identities, what is refused; nodes that wait and nodes that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.parts import table
from shoal.fields.federate.gossip.averaging import AveragingNode, PlainAverage, merged, spread
from shoal.fields.federate.gossip.graphs import NodeGraph, graph_of
from shoal.fields.federate.gossip.partitioned import Partitioned
from shoal.fields.federate.gossip.protocols import Push, Spot
from shoal.fields.federate.gossip.variance_corrected import VarianceCorrected
from shoal.fields.federate.gossip.virtual import VirtualGossip
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError

_TRIANGLE = graph_of(3, [(0, 1), (1, 2), (0, 2)])


def _models(k: int, shape: tuple[int, ...], seed: int = 0) -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(seed)
    return [
        {
            "weight": draw.normal(0.1, 0.5, shape).astype(np.float32),
            "bias": draw.normal(0, 1, shape[:1]).astype(np.float32),
        }
        for _ in range(k)
    ]


@pytest.mark.parametrize("scope", ["tensor", "channel"])
def test_identical_models_stay(scope: Any) -> None:
    one = _models(1, (20, 30))[0]
    result = merged(VarianceCorrected(scope=scope, until=1.0), [one] * 5)
    for name, tensor in one.items():
        np.testing.assert_allclose(result[name], tensor, rtol=1e-5)


def test_independent_models() -> None:
    models = _models(5, (200, 300))
    own = np.mean([one["weight"].var() for one in models])
    plain, kept = merged(PlainAverage(), models), merged(VarianceCorrected(), models)
    assert plain["weight"].var() == pytest.approx(own / 5, rel=0.05)
    assert kept["weight"].var() == pytest.approx(own, rel=1e-5)
    assert kept["weight"].mean() == pytest.approx(plain["weight"].mean(), abs=1e-6)
    # A bias is averaged, and nothing more.
    assert np.array_equal(kept["bias"], plain["bias"])


def test_every_channel_keeps_its_variance() -> None:
    models = _models(4, (6, 500))
    for at, one in enumerate(models):
        one["weight"] *= np.linspace(1, 3, 6, dtype=np.float32)[:, None] * (1 + at)
    kept = merged(VarianceCorrected(scope="channel"), models)["weight"]
    target = np.mean([one["weight"].var(axis=1) for one in models], axis=0)
    np.testing.assert_allclose(kept.var(axis=1), target, rtol=1e-5)


def test_it_is_linear_in_scale() -> None:
    models = _models(3, (40, 50))
    scaled = [{name: 7 * one for name, one in model.items()} for model in models]
    once, again = merged(VarianceCorrected(), models), merged(VarianceCorrected(), scaled)
    np.testing.assert_allclose(again["weight"], 7 * once["weight"], rtol=1e-5, atol=1e-6)


def test_weights() -> None:
    models = _models(3, (40, 50))
    weights = [0.5, 0.3, 0.2]
    kept = merged(VarianceCorrected(), models, weights)["weight"]
    target = sum(w * one["weight"].var() for w, one in zip(weights, models, strict=True))
    assert kept.var() == pytest.approx(target, rel=1e-5)
    for wrong in ([0.5, 0.3, 0.1], [1.2, -0.3, 0.1], [0.5, 0.5]):
        with pytest.raises(FederationError, match="weights"):
            merged(PlainAverage(), models, wrong)


def test_correlated_models_are_not_corrected() -> None:
    base = _models(1, (50, 60))[0]["weight"]
    near = [{"w": base + 0.01 * one["weight"]} for one in _models(3, (50, 60), seed=1)]
    assert np.array_equal(
        merged(VarianceCorrected(until=0.9), near)["w"], merged(PlainAverage(), near)["w"]
    )
    assert not np.array_equal(
        merged(VarianceCorrected(until=1.0), near)["w"], merged(PlainAverage(), near)["w"]
    )


def test_cancelling_models_and_single_numbers() -> None:
    one = _models(1, (5, 6))[0]
    opposite = {name: -tensor for name, tensor in one.items()}
    assert not merged(VarianceCorrected(), [one, opposite])["weight"].any()
    single = [{"w": np.full((1, 1), value, np.float32)} for value in (1.0, 3.0)]
    assert merged(VarianceCorrected(), single)["w"].item() == 2.0


def test_spread_measures_correlation() -> None:
    draw = np.random.default_rng(0)
    common = draw.standard_normal((300, 300))
    stack = np.stack([common + draw.standard_normal((300, 300)) for _ in range(4)])
    said = spread(stack, stack.mean(axis=0))
    pairs = [
        np.corrcoef(stack[i].ravel(), stack[j].ravel())[0, 1] for i in range(4) for j in range(i)
    ]
    assert said["correlation"] == pytest.approx(np.mean(pairs), abs=0.01)
    assert said["merged"] == pytest.approx(said["plain"])


def test_other_architectures_are_refused() -> None:
    with pytest.raises(FederationError, match=r"tensor weight of model 1 is \[4, 5\]"):
        merged(PlainAverage(), [_models(1, (5, 4))[0], _models(1, (4, 5))[0]])


class _Work:
    """A model of one matrix and a bias that training leaves as it is."""

    layout = (("weight", (4, 5)), ("bias", (4,)))
    size = 24

    def start(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal(24).astype(np.float32)

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        return model, 0.0

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        return model

    def curvature(self) -> tuple[float, float]:
        return 1.0, 1.0


def _nodes(policy: PlainAverage, graph: NodeGraph, rounds: int) -> list[AveragingNode]:
    return [
        policy.node(
            Spot(me=me, graph=graph, seed=0, start=me, rounds=rounds, work_s=1.0 + me), _Work()
        )
        for me in range(graph.nodes)
    ]


def test_nodes_that_wait_agree() -> None:
    nodes = _nodes(PlainAverage(), _TRIANGLE, 2)
    mean = np.mean([node.model(0) for node in nodes], axis=0)
    clock = VirtualGossip(nodes, [0.5] * 3)
    clock.begin()
    while clock.step():
        pass
    for node in nodes:
        assert (node.count, node.progress(clock.now)) == (2, 2.0)
        np.testing.assert_allclose(node.model(0), mean, rtol=1e-5, atol=1e-6)
    # The slowest node, which waits for no one, needs 3 s a round; its messages take 0.5 s.
    assert clock.now == pytest.approx(6.5)
    assert clock.messages == 12


def test_nodes_that_do_not_wait_go_on() -> None:
    nodes = _nodes(PlainAverage(peers=1, buffer=1), _TRIANGLE, 6)
    clock = VirtualGossip(nodes, [0.5] * 3)
    clock.begin()
    while clock.step():
        pass
    assert [node.count for node in nodes] == [6, 6, 6]
    # Nobody waits: all are done when the slowest has made its rounds and its last message came.
    assert clock.now == pytest.approx(18.5)


def test_a_neighbour_that_is_gone_is_not_waited_for() -> None:
    node = _nodes(PlainAverage(), _TRIANGLE, 5)[0]
    pushes = node.finish(node.compute(node.begin(1.0)), 1.0)
    assert [push.to for push in pushes] == [1, 2]
    assert node.due(2.0) is None
    node.receive(1, Push(to=0, tensors=pushes[0].tensors, round=1), 1.5)
    assert node.due(2.0) is None
    node.gone(2, 2.0)
    assert node.due(2.0) == 3.0
    assert {"round": 1, "gone": 2} in node.notes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_that_is_not_finite_is_dropped(value: float) -> None:
    node = _nodes(PlainAverage(), _TRIANGLE, 5)[0]
    before = node.model(0).copy()
    node.finish(node.compute(node.begin(1.0)), 1.0)
    bad = {"weight": np.full((4, 5), value, np.float32), "bias": np.zeros(4, np.float32)}
    for peer in (1, 2):
        node.receive(peer, Push(to=0, tensors=bad, round=1), 1.5)
    assert np.array_equal(node.model(0), before)
    assert [note["dropped"] for note in node.notes if "dropped" in note] == [1, 2]
    assert node.due(2.0) is not None


def test_a_model_of_another_shape_is_dropped_and_strangers_are_refused() -> None:
    node = _nodes(PlainAverage(), graph_of(3, [(0, 1), (1, 2)]), 5)[0]
    node.finish(node.compute(node.begin(1.0)), 1.0)
    push = Push(to=0, tensors={"weight": np.zeros((5, 4), np.float32)}, round=1)
    with pytest.raises(UpdateRefusedError, match="no neighbour"):
        node.receive(2, push, 1.5)
    node.receive(1, push, 1.5)
    assert "none of this architecture" in str(node.notes[0]["why"])


def test_a_part_of_the_tensors() -> None:
    policy = Partitioned(fraction=0.5)
    tensors = {name: np.zeros(1) for name in "abcd"}
    draws = [policy.sent(tensors, np.random.default_rng(seed)) for seed in range(20)]
    assert {len(one) for one in draws} == {2}
    assert {name for one in draws for name in one} == set("abcd")
    # Of a tensor that a message lacks, the own one stays.
    own, other = _models(2, (4, 5))
    result = merged(policy, [own, {"bias": other["bias"]}])
    assert np.array_equal(result["weight"], own["weight"])
    np.testing.assert_allclose(result["bias"], (own["bias"] + other["bias"]) / 2, rtol=1e-6)


def test_more_peers_than_neighbours() -> None:
    policy = table("gossip_policy").build({"name": "plain", "peers": 3})
    with pytest.raises(FederationError, match="only 2 neighbours"):
        policy.share(_TRIANGLE, [_Work()] * 3)

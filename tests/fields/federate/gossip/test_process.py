"""Nodes behind sockets: exchanges that both ends count or neither, and those who may not speak."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shoal.fields.federate.gossip.dadao import Dadao, DadaoNode
from shoal.fields.federate.gossip.graphs import graph_of
from shoal.fields.federate.gossip.process import NodeRunner
from shoal.fields.federate.gossip.protocols import Spot
from shoal.fields.federate.gossip.wire import NodeLine

_PAIR = graph_of(2, [(0, 1)])
_KEY = "k" * 32


class _Quadratic:
    """|x - c|^2 / 2."""

    layout = (("x", (3,)),)
    size = 3

    def __init__(self, centre: float) -> None:
        self._centre = centre

    def start(self, seed: int) -> np.ndarray:
        return np.zeros(3)

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        return model, 0.0

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        return model - self._centre

    def curvature(self) -> tuple[float, float]:
        return 1.0, 1.0


@contextlib.contextmanager
def _listening(unit_s: float) -> Iterator[list[NodeRunner]]:
    """Two nodes that listen, and do not work yet."""
    works, policy = [_Quadratic(1.0), _Quadratic(3.0)], Dadao(l2=0.0)
    shared = policy.share(_PAIR, works)
    made = []
    for me, work in enumerate(works):
        spot = Spot(me=me, graph=_PAIR, seed=0, start=0, rounds=10**6, unit_s=unit_s, shared=shared)
        made.append(NodeRunner(me, policy.node(spot, work), _KEY, 64, timeout_s=0.3))
    for runner in made:
        runner.ports = {one.me: one.port for one in made}
        runner.begun = time.monotonic()
        runner.listen()
    try:
        yield made
    finally:
        for runner in made:
            runner.stop()


@pytest.fixture
def runners() -> Iterator[list[NodeRunner]]:
    """Nodes for whom no time passes."""
    with _listening(1e9) as made:
        yield made


def _state(runner: NodeRunner) -> np.ndarray:
    node = runner.node
    assert isinstance(node, DadaoNode)
    return node.state.copy()


def _settled(runner: NodeRunner) -> int:
    node = runner.node
    assert isinstance(node, DadaoNode)
    return node.exchanges


def _give(runner: NodeRunner, m: float) -> None:
    """Something to offer."""
    node = runner.node
    assert isinstance(node, DadaoNode)
    node.state[2] = m


def test_an_exchange_moves_both_ends(runners: list[NodeRunner]) -> None:
    one, other = runners
    _give(one, 5.0)
    assert one._exchange(1)
    assert (_settled(one), _settled(other)) == (1, 1)
    z = [_state(runner)[4] for runner in runners]
    np.testing.assert_allclose(z[0], -2.5, rtol=1e-5)
    np.testing.assert_allclose(z[0], -z[1], rtol=1e-5)


def test_a_busy_node_refuses(runners: list[NodeRunner]) -> None:
    one, other = runners
    with other._busy:
        assert not one._exchange(1)
    assert (one.refused, _settled(one), _settled(other)) == (1, 0, 0)
    assert one._exchange(1)


@pytest.mark.parametrize("until", ["offer", "silent"])
def test_the_answering_end_is_left_as_it_was(runners: list[NodeRunner], until: str) -> None:
    """The one that asked dies, or says nothing more, before it commits."""
    other = runners[1]
    before = _settled(other)
    with NodeLine.to(other.port, 64, 0, _KEY, 1.0) as line:
        line.send("offer", {}, {"m": np.ones(3), "t": np.zeros(1)})
        assert line.receive(1.0)[0] == "accept"
        if until == "offer":
            line.close()
        give_up = time.monotonic() + 3
        while other._busy.locked() and time.monotonic() < give_up:
            time.sleep(0.01)
    assert not other._busy.locked()
    assert _settled(other) == before
    assert not _state(other)[4:].any()


@pytest.mark.parametrize("said", ["accept", "nothing"])
def test_the_asking_end_is_left_as_it_was(runners: list[NodeRunner], said: str) -> None:
    """The one that answers dies after it has accepted, or at once."""
    one = runners[0]
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        line = NodeLine(listener.accept()[0], 1 << 10)
        line.receive(1.0)
        line.receive(1.0)
        if said == "accept":
            line.send("accept", {}, {"m": np.ones(3), "t": np.zeros(1)})
            line.receive(1.0)
        line.close()

    thread = threading.Thread(target=answer)
    thread.start()
    one.ports = {**one.ports, 1: listener.getsockname()[1]}
    _give(one, 5.0)
    assert not one._exchange(1)
    thread.join()
    listener.close()
    assert (_settled(one), one.failed) == (0, 1)
    assert not _state(one)[4:].any()
    assert not one._busy.locked()


def test_a_neighbour_that_is_not_there_is_gone_after_a_few_tries(runners: list[NodeRunner]) -> None:
    one, other = runners
    other.stop()
    listener = socket.create_server(("127.0.0.1", 0))
    one.ports = {**one.ports, 1: listener.getsockname()[1]}
    listener.close()
    for _ in range(3):
        assert not one._exchange(1)
    assert one.node.exchange_due(1.0) is None
    assert [note["gone"] for note in one.node.notes] == [1]


def test_another_key_is_not_answered(runners: list[NodeRunner]) -> None:
    with NodeLine.to(runners[1].port, 64, 0, "wrong", 1.0) as line, pytest.raises(OSError):
        for _ in range(2):
            line.send("look", {})
            line.receive(1.0)
    assert _settled(runners[1]) == 0


def test_messages_that_are_none(runners: list[NodeRunner]) -> None:
    other = runners[1]
    # More than a message of this run may have: the line is closed, the node goes on.
    with NodeLine.to(other.port, 1 << 20, 0, _KEY, 1.0) as line, pytest.raises(OSError):
        line.send("offer", {}, {"m": np.ones(1 << 17)})
        line.receive(1.0)
    # A vector that is not finite: both ends let go.
    with NodeLine.to(other.port, 1 << 20, 0, _KEY, 1.0) as line:
        line.send("offer", {}, {"m": np.full(3, np.nan), "t": np.zeros(1)})
        assert line.receive(1.0)[0] == "accept"
        line.send("commit", {})
        assert line.receive(1.0)[0] == "refuse"
    assert _settled(other) == 0
    assert runners[0]._exchange(1)


def test_two_nodes_agree() -> None:
    with _listening(0.004) as runners:
        for runner in runners:
            runner.start()
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            time.sleep(0.05)
            models = [runner._look()[1]["model"] for runner in runners]
            if max(np.abs(model - 2.0).max() for model in models) < 1e-3:
                break
        np.testing.assert_allclose(models, 2.0, atol=1e-3)
        assert _settled(runners[0]) > 0

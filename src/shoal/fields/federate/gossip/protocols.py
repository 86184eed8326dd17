"""What the parts of a training without a server promise each other; no torch, no sockets.

A *node* is an object whose methods are called with events and times. It works for itself (steps of
an optimizer, or one gradient), *pushes* messages to neighbours that take them in when they come,
and *exchanges* messages in pairs, which both ends count or neither. The same object is driven by a
clock on the wall, with processes and sockets, and by a virtual clock.

Messages are named tensors. Nodes are numbers from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.learn.protocols import Examples

Tensors = Mapping[str, np.ndarray]
"""A message: name -> tensor."""

Layout = tuple[tuple[str, tuple[int, ...]], ...]
"""Name and shape of each tensor in a vector, in their order."""


@runtime_checkable
class Topology(Protocol):
    """Which nodes are neighbours."""

    def graph(self, nodes: int, seed: int) -> NodeGraph:
        """The graph of so many nodes.

        Raises:
            FederationError: there is none, or it is not connected.
        """


class LocalWork(Protocol):
    """What a node computes on its own examples.

    Attributes:
        layout: of the vector.
    """

    layout: Layout

    @property
    def size(self) -> int:
        """Numbers of the vector, P."""

    def start(self, seed: int) -> np.ndarray:
        """A model to begin with, [P]."""

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        """The model after the local steps of a round, and their mean loss."""

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        """Of the mean loss of the node's examples, float64 [P].

        Args:
            model: [P].
            number: of a random batch, from 1; 0 for all examples.
        """

    def curvature(self) -> tuple[float, float]:
        """Mu and L: bounds of the curvature of that loss, from below and from above.

        Raises:
            FederationError: none are known.
        """


@dataclass(frozen=True, kw_only=True)
class Spot:
    """The place of a node in a run.

    Args:
        me: its number.
        graph: of all nodes.
        seed: of the run.
        start: seed of its first model.
        rounds: length of the run; a unit of time is a round for policies that count in units.
        work_s: seconds that its work takes on a virtual clock; 0 on the wall, where it takes what
            it takes.
        unit_s: seconds of a unit of time.
        shared: numbers that are the same for all nodes, from the policy's ``share``.
    """

    me: int
    graph: NodeGraph
    seed: int
    start: int
    rounds: int
    work_s: float = 0.0
    unit_s: float = 1.0
    shared: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peers(self) -> tuple[int, ...]:
        """Its neighbours."""
        return self.graph.neighbours[self.me]


@dataclass(frozen=True, kw_only=True)
class Push:
    """A message for a neighbour, which takes it in when it comes.

    Args:
        to: the neighbour.
        tensors: the message.
        round: number of the sender's work after which it was sent.
    """

    to: int
    tensors: Tensors
    round: int


class GossipNode(Protocol):
    """A node at work; only :meth:`compute` takes long, and it changes nothing.

    Attributes:
        count: pieces of work that are done.
        notes: what it has noticed, one entry for each, JSON.
    """

    count: int
    notes: list[dict[str, Any]]

    def due(self, now: float) -> float | None:
        """When its work is done, s, as far as is known now; None while it waits for messages."""

    def begin(self, now: float) -> np.ndarray:
        """The model from which its work begins."""

    def compute(self, model: np.ndarray) -> Any:
        """Do the work; called by one thread while others tell the node of messages."""

    def finish(self, result: Any, now: float) -> Sequence[Push]:
        """Its work is done."""

    def receive(self, sender: int, message: Push, now: float) -> None:
        """A message has come.

        Raises:
            UpdateRefusedError: it is not one of this policy.
        """

    def gone(self, peer: int, now: float) -> None:
        """A neighbour is no more."""

    def exchange_due(self, now: float) -> tuple[float, int] | None:
        """When, as far as is known now, it wants to exchange messages next, s, and with whom.

        None for not at all.
        """

    def postpone(self, peer: int, now: float) -> None:
        """An exchange with a neighbour was offered or was due, and did not happen."""

    def offer(self, peer: int, now: float) -> Tensors:
        """Its message of an exchange."""

    def settle(self, peer: int, mine: Tensors, theirs: Tensors, now: float) -> None:
        """Both messages of an exchange are known at both ends.

        Raises:
            UpdateRefusedError: the neighbour's message is not one of this policy.
        """

    def progress(self, now: float) -> float:
        """Rounds that are done."""

    def model(self, now: float) -> np.ndarray:
        """The model that the node would use, [P]."""


@runtime_checkable
class GossipPolicy(Protocol):
    """What nodes send to each other, when, and what they do with it."""

    def share(self, graph: NodeGraph, works: Sequence[LocalWork]) -> dict[str, Any]:
        """What all nodes must know before they begin, JSON.

        Raises:
            FederationError: its options do not fit the graph or the work.
        """

    def node(self, spot: Spot, work: LocalWork) -> GossipNode:
        """A node that begins."""

    def message_bytes(self, size: int) -> float:
        """Bytes of the tensors of a message, on average."""

    def work_steps(self, steps: int, batch: int, samples: int) -> float:
        """Optimizer steps that one piece of a node's work is worth.

        Args:
            steps: of a round, as the job says.
            batch: examples of a step.
            samples: examples of the node.
        """

    def unit_s(self, graph: NodeGraph, gradient_s: float, exchange_s: float) -> float:
        """Seconds of a unit of time in which all keep up.

        Args:
            graph: of the nodes.
            gradient_s: seconds of a node's work.
            exchange_s: seconds of an exchange, where all nodes share a machine.
        """


@runtime_checkable
class ConvexLearner(Protocol):
    """A learner whose loss is convex, with known bounds of its curvature."""

    def curvature(self, examples: Examples) -> tuple[float, float]:
        """Mu and L of the mean loss of some examples, wherever the model is."""

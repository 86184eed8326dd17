"""What the parts of a federation promise each other; no torch, no sockets.

A model is one flat vector of float32 ``[P]``. A *scheduler* decides who works, how long, and when
updates are aggregated: it is a pure function of events and times, so the same object is driven by
the clock on the wall, with processes and sockets, and by a virtual clock. A *server step* turns the
updates of an aggregation into the next model.

Source of the division: Kairouz et al., Advances and Open Problems in Federated Learning, 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import numpy as np

from shoal.core.errors import ShoalError
from shoal.ir import Machine


class FederationError(ShoalError):
    """A federation cannot be run as it is described, or one of its members broke a rule."""


class UpdateRefusedError(FederationError):
    """An update that is not taken; the federation goes on without it.

    Args:
        message: what is wrong with it.
        reason: in a word, under which such updates are counted.
    """

    def __init__(self, message: str, reason: str = "malformed") -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientInfo:
    """A client, as it says of itself when it joins.

    Args:
        name: unique in the federation.
        samples: examples that it has.

    Raises:
        FederationError: it has none.
    """

    name: str
    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise FederationError(
                f"client {self.name!r}: {self.samples} examples; a client has at least one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalJob:
    """What a client is asked to do.

    Args:
        number: of all jobs of the run; an update quotes it.
        client: who does it.
        version: of the model from which it starts.
        steps: optimizer steps.
        started: time at which it was assigned, s.
    """

    number: int
    client: str
    version: int
    steps: int
    started: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Update:
    """What a client has learned in one job.

    Args:
        number: of the job.
        client: whose it is.
        delta: the model that it received minus the one that it has now, float32 [P]; or what an
            aggregation plane calls it that keeps the numbers elsewhere.
        loss: mean training loss of the job.
    """

    number: int
    client: str
    delta: Any
    loss: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Assign:
    """Give a client work, from the newest model."""

    client: str
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AggregateUpdates:
    """Make the next version of the model.

    Args:
        weights: number of a job whose update has arrived -> its weight.
        mixed: a client's model is mixed with the newest one, not with the one it started from.
    """

    weights: Mapping[int, float]
    mixed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SetTimer:
    """Call ``on_timer(tag)`` at a time, s."""

    at: float
    tag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DropUpdate:
    """Forget an update that has arrived and will not be used."""

    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FoldUpdate:
    """Say what an update will weigh that has arrived, beside the others of its aggregation.

    Where the rule is a sum, it is added at once and not kept. The weights of the
    ``AggregateUpdates`` are these times one number; updates that are folded are all in it.
    """

    number: int
    weight: float


Action = Assign | AggregateUpdates | SetTimer | DropUpdate | FoldUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationInfo:
    """What a scheduler knows of the federation from the start.

    Args:
        clients: all that are expected, in the order of their names.
        steps: that a client makes in a job unless the scheduler says otherwise.
        seed: of its random choices.
    """

    clients: tuple[ClientInfo, ...]
    steps: int
    seed: int

    @property
    def samples(self) -> int:
        """Examples of all clients."""
        return sum(client.samples for client in self.clients)


class Scheduling(Protocol):
    """A scheduler at work on one federation: a pure function of events and times.

    A client has one job at a time. The version of the model grows by one with each
    :class:`AggregateUpdates`; jobs are assigned after it, in the order of the actions.
    """

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """A client is there, for the first time or again."""

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """The update of a job has arrived."""

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """A client is gone, and its job with it."""

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """A time that the scheduler has set has come."""

    def state(self) -> dict[str, Any]:
        """All it remembers, as JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""


@dataclass(frozen=True, kw_only=True)
class FederateWork:
    """What the planner knows of a federation before it runs.

    Args:
        info: the clients, by name, with the examples of each.
        step_s: client -> seconds of an optimizer step, its slow-down included.
        up_s: client -> seconds in which an update reaches the server.
        down_s: client -> seconds in which a model reaches the client.
        up_bytes: of an update.
        merge_s: seconds in which the server adds one update to a model.
        rounds: the work of the run: steps of all clients in so many rounds.
    """

    info: FederationInfo
    step_s: Mapping[str, float]
    up_s: Mapping[str, float]
    down_s: Mapping[str, float]
    up_bytes: float
    merge_s: float
    rounds: int


@runtime_checkable
class ClientScheduler(Protocol):
    """Who works, how many steps, and when updates are aggregated."""

    needs_majority: ClassVar[bool]
    """Whether each aggregation has the updates of most clients, which a robust rule wants."""

    @classmethod
    def candidates(cls, work: FederateWork, machine: Machine) -> Iterator[Self]:
        """With which options it is worth trying here."""

    def start(self, info: FederationInfo) -> Scheduling:
        """Begin a federation.

        Raises:
            FederationError: its options do not fit it.
        """


@runtime_checkable
class DrawsClients(Protocol):
    """A scheduler that draws the clients of a round at random, whatever they have and are."""

    def drawn_from(self, updates: int) -> int:
        """Least number of clients of which a round of so many is drawn; ``updates`` if none is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrived:
    """The updates of one aggregation.

    Args:
        deltas: K updates, each float32 [P].
        weights: of each, float64 [K].
        jobs: that they answer.
        report: what the rule has to say about them, as JSON; it becomes part of the event
            ``aggregate``.
    """

    deltas: Sequence[np.ndarray]
    weights: np.ndarray
    jobs: Sequence[LocalJob]
    report: dict[str, Any] = field(default_factory=dict)


class ServerState(Protocol):
    """A server step at work: it may keep moments between aggregations."""

    def apply(self, model: np.ndarray, direction: np.ndarray) -> None:
        """Move a model float32 [P] in place, against the direction float32 [P]."""

    def state(self) -> dict[str, np.ndarray]:
        """What it keeps, by name."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from such a state."""


@runtime_checkable
class ServerOptimizer(Protocol):
    """How the combined update moves the model of the server."""

    def start(self, size: int) -> ServerState:
        """Begin with a model of so many parameters."""


@runtime_checkable
class RobustRule(Protocol):
    """How K updates become one, where some of them may be wrong."""

    linear: ClassVar[bool]
    """Whether it is the weighted sum. Any other rule compares updates: it needs those of most
    clients in each aggregation, and updates that the server can read."""
    folds: ClassVar[bool]
    """Whether updates may be added up as they arrive, wherever that is."""

    def covers(self, count: int) -> int:
        """How many of ``count`` updates may be wrong.

        Raises:
            FederationError: they are too few for the rule.
        """

    def combine(self, arrived: Arrived) -> np.ndarray:
        """The combined update, float32 [P], in the scale of one update times the sum of weights.

        Raises:
            FederationError: there are too few updates for the rule.
        """


@runtime_checkable
class UpdateCompressor(Protocol):
    """An update in fewer bits; the key is shared by both ends and costs none.

    Attributes:
        kind: ``unbiased``: E Q(x) = x and E|Q(x)|^2 <= omega |x|^2; ``contractive``:
            E|C(x) - x|^2 <= (1 - 1/omega) |x|^2, whose client sends later what it left out.
    """

    kind: ClassVar[Literal["unbiased", "contractive"]]

    def omega(self, size: int) -> float:
        """The constant of its kind, q or delta, for a vector of so many numbers."""

    def bits(self, size: int) -> int:
        """Of the tensors of a vector of so many numbers."""

    def encode(self, x: np.ndarray, key: int) -> Mapping[str, np.ndarray]:
        """A vector float32 [P] as tensors by name."""

    def decode(self, tensors: Mapping[str, np.ndarray], size: int, key: int) -> np.ndarray:
        """The vector float32 [P] that they stand for.

        Raises:
            UpdateRefusedError: they are not what :meth:`encode` writes.
        """

"""Secure aggregation: the server learns the sum of the updates of a round, and no update.

Two clients agree on a stream of random integers; one adds it to its update, the other subtracts
it, and in the sum it is gone. Every client adds a stream of its own, too. The secrets of all
streams are shared among the clients. At the end those that are left open, of each client whose
update has arrived, its own stream; of each that is gone, its streams with others.

Source: Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning,
2017, figure 4, for a server that follows the protocol: keys are not signed.

A round has four exchanges: keys, shares, masked updates, opening. All are jobs of the federation,
those without training have no steps, so the protocol has no messages, routes or clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal.fields.federate.protocols import (
    Action,
    AggregateUpdates,
    Arrived,
    Assign,
    ClientInfo,
    DropUpdate,
    FederationError,
    FederationInfo,
    LocalJob,
    Scheduling,
    SetTimer,
    UpdateRefusedError,
)
from shoal.fields.federate.secure.masks import agree, expand, from_fixed
from shoal.fields.federate.secure.party import KEYS, SHARES, TRAIN, UNMASK
from shoal.fields.federate.secure.shamir import SHARE_BYTES, recover


class SecureRound:
    """What the server knows of a round.

    Args:
        names: clients of the round that have sent keys, by their numbers.
        keys: their public keys.

    Attributes:
        boxes: sealed shares by sender, uint8 [n, bytes].
        masked: updates under masks.
        opened: shares by the client that revealed them.
        closed: updates that come now are too late.
    """

    def __init__(self, names: Sequence[str], keys: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self.names = tuple(names)
        self.number = {name: at for at, name in enumerate(names)}
        self.keys = {name: keys[name] for name in names}
        self.boxes: dict[str, np.ndarray] = {}
        self.masked: dict[str, np.ndarray] = {}
        self.opened: dict[str, np.ndarray] = {}
        self.closed = False

    @property
    def needed(self) -> int:
        """Clients that must be left at the end."""
        return len(self.names) // 2 + 1

    def total(self) -> np.ndarray:
        """Sum of the updates that have arrived, float64 [P].

        Raises:
            FederationError: what was revealed does not open it.
        """
        result = np.zeros_like(next(iter(self.masked.values())))
        for masked in self.masked.values():
            result += masked
        helpers = sorted(self.opened, key=self.number.__getitem__)[: self.needed]
        if len(helpers) < self.needed:
            raise FederationError(
                f"secure: {len(helpers)} clients are left to open the sum; {self.needed} are needed"
            )
        for name in self.boxes:
            at = self.number[name]
            shares = {self.number[one]: bytes(self.opened[one][at]) for one in helpers}
            try:
                secret = recover(shares, 32)
            except OverflowError as cause:
                raise FederationError(
                    f"secure: the shares of a secret of {name} do not fit together"
                ) from cause
            if name in self.masked:
                result -= expand(secret, len(result))
                continue
            for other in self.masked:
                there = bytes(self.keys[other]["mask"])
                stream = expand(agree(secret, there, "mask"), len(result))
                result = result - stream if self.number[other] < at else result + stream
        return from_fixed(result, len(self.names))


class SecureServer:
    """The server's end of all rounds.

    Args:
        samples: client -> examples; an update counts by its share of the largest.
    """

    def __init__(self, samples: Mapping[str, int]) -> None:
        most = max(samples.values(), default=1)
        self.share = {name: count / most for name, count in samples.items()}
        self.keys: dict[str, Mapping[str, np.ndarray]] = {}
        self.round: SecureRound | None = None
        # The round whose sum is aggregated; the next one may have begun.
        self.ended: SecureRound | None = None
        # What each client was asked for last, and in which round.
        self.asked: dict[str, tuple[int, SecureRound | None]] = {}

    def attach(self, client: str) -> dict[str, np.ndarray]:
        """What a client needs to know for its job."""
        phase, at = self.asked[client]
        given: dict[str, Any] = {"phase": [phase]}
        if at is not None:
            given["me"] = [at.number[client]]
        if phase == SHARES:
            assert at is not None
            for kind in ("box", "mask"):
                given[kind] = np.stack([at.keys[name][kind] for name in at.names])
        elif phase == TRAIN:
            assert at is not None
            given["share"] = [self.share[client]]
            given["present"] = np.array([name in at.boxes for name in at.names])
            empty = np.zeros_like(next(iter(at.boxes.values()))[0])
            given["boxes"] = np.stack(
                [
                    at.boxes[name][at.number[client]] if name in at.boxes else empty
                    for name in at.names
                ]
            )
        elif phase == UNMASK:
            assert at is not None
            given["arrived"] = np.array([name in at.masked for name in at.names])
        return {name: np.asarray(one) for name, one in given.items()}

    def take(self, client: str, tensors: Mapping[str, np.ndarray], size: int) -> None:
        """What a client has answered.

        Raises:
            UpdateRefusedError: it is not what it was asked for.
        """
        phase, at = self.asked[client]
        if phase == KEYS:
            self.keys[client] = _checked(tensors, box=(np.uint8, (32,)), mask=(np.uint8, (32,)))
            return
        assert at is not None
        count = len(at.names)
        if phase == SHARES:
            form = (count, 2 * SHARE_BYTES + 16)
            at.boxes[client] = _checked(tensors, boxes=(np.uint8, form))["boxes"]
        elif phase == TRAIN:
            masked = _checked(tensors, masked=(np.uint32, (size,)))["masked"]
            if not at.closed:
                at.masked[client] = masked
        else:
            form = (count, SHARE_BYTES)
            at.opened[client] = _checked(tensors, shares=(np.uint8, form))["shares"]


def _checked(
    tensors: Mapping[str, np.ndarray], **wanted: tuple[Any, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    found = {name: (one.dtype, one.shape) for name, one in tensors.items()}
    if found != {name: (np.dtype(kind), form) for name, (kind, form) in wanted.items()}:
        raise UpdateRefusedError(f"secure: tensors {found}; expected {wanted}", reason="shape")
    return dict(tensors)


class SecureScheduling:
    """A scheduler of rounds, with the exchanges of secure aggregation around its jobs.

    Args:
        inner: assigns a round's jobs at once, and aggregates them once.
        server: where the answers arrive.
        info: of the federation.
    """

    def __init__(self, inner: Scheduling, server: SecureServer, info: FederationInfo) -> None:
        self._inner, self._server = inner, server
        self._phase = TRAIN
        self._steps: dict[str, int] = {}
        # Who has been asked and has not answered; who has.
        self._open: set[str] = set()
        self._done: set[str] = set()
        self._aggregate: AggregateUpdates | None = None
        self._later: list[Assign] = []

    def on_join(self, client: ClientInfo, now: float) -> Sequence[Action]:
        """As the scheduler."""
        return self._around(self._inner.on_join(client, now))

    def on_update(self, job: LocalJob, now: float) -> Sequence[Action]:
        """Of training as the scheduler; other answers are for the next exchange."""
        if self._server.asked[job.client][0] == TRAIN:
            return self._around(self._inner.on_update(job, now))
        self._open.discard(job.client)
        self._done.add(job.client)
        return [DropUpdate(number=job.number), *self._next()]

    def on_leave(self, client: str, now: float) -> Sequence[Action]:
        """An exchange does not wait for who is gone."""
        self._open.discard(client)
        actions = [*self._around(self._inner.on_leave(client, now))]
        return (
            actions if any(isinstance(one, Assign) for one in actions) else actions + self._next()
        )

    def on_timer(self, tag: str, now: float) -> Sequence[Action]:
        """As the scheduler."""
        return self._around(self._inner.on_timer(tag, now))

    def _around(self, actions: Sequence[Action]) -> list[Action]:
        """Jobs wait until there are masks, an aggregation until it can be opened."""
        kept: list[Action] = [one for one in actions if isinstance(one, DropUpdate | SetTimer)]
        begun = [one for one in actions if isinstance(one, Assign)]
        for one in actions:
            if isinstance(one, AggregateUpdates):
                self._aggregate, self._later = one, begun
                at = self._server.round
                assert at is not None
                at.closed = True
                if len(at.masked) < at.needed:
                    return kept + self._finish()
                return kept + self._ask(UNMASK, [name for name in at.names if name in at.masked])
        if not begun:
            return kept
        if self._aggregate is not None:
            self._later = begun
            return kept
        return kept + self._begin(begun)

    def _begin(self, jobs: Sequence[Assign]) -> list[Action]:
        self._steps = {job.client: job.steps for job in jobs}
        self._server.round, self._server.keys = None, {}
        return self._ask(KEYS, list(self._steps))

    def _ask(self, phase: int, names: Sequence[str]) -> list[Action]:
        """Let clients answer; only training has steps."""
        self._phase, self._done = phase, set()
        self._open = set() if phase == TRAIN else set(names)
        for name in names:
            self._server.asked[name] = phase, self._server.round
        steps = self._steps if phase == TRAIN else dict.fromkeys(names, 0)
        return [Assign(client=name, steps=steps[name]) for name in names]

    def _next(self) -> list[Action]:
        """The exchange after this one, if all have answered."""
        if self._open or self._phase == TRAIN:
            return []
        server, done = self._server, sorted(self._done)
        if self._phase == UNMASK:
            return self._finish()
        if len(done) < 3:
            raise FederationError(
                f"secure: {len(done)} clients are left in the round; a sum of fewer than 3 hides "
                "no update"
            )
        if self._phase == KEYS:
            server.round = SecureRound(done, server.keys)
            return self._ask(SHARES, done)
        return self._ask(TRAIN, done)

    def _finish(self) -> list[Action]:
        """Aggregate what can be opened, and begin the next round."""
        at, held, later = self._server.round, self._aggregate, self._later
        assert at is not None and held is not None
        self._phase, self._aggregate, self._later = TRAIN, None, []
        self._server.ended = at
        ends: list[Action] = [held]
        if len(at.opened) < at.needed:
            ends = [DropUpdate(number=number) for number in held.weights]
        return ends + (self._begin(later) if later else [])

    def state(self) -> dict[str, Any]:
        """Secrets of clients are in no file, so a round cannot go on in another process."""
        return {"secure": True}

    def load(self, state: Mapping[str, Any]) -> None:
        """Not possible.

        Raises:
            FederationError: always.
        """
        raise FederationError(
            "secure: a run with secure aggregation cannot go on where it was stopped, since its "
            "secrets are in no file; start it anew"
        )


class SecureSum:
    """The weighted mean of the updates of a round, from their opened sum.

    Args:
        server: of the rounds.
    """

    linear: ClassVar = True
    folds: ClassVar = False

    def __init__(self, server: SecureServer) -> None:
        self._server = server

    def covers(self, count: int) -> int:
        """None."""
        return 0

    def combine(self, arrived: Arrived) -> np.ndarray:
        """The sum over the sum of what each update counts.

        Raises:
            FederationError: it cannot be opened, or the weights are not by examples.
        """
        at = self._server.ended
        assert at is not None
        counts = np.array([self._server.share[job.client] for job in arrived.jobs])
        weights = arrived.weights / arrived.weights.sum()
        if {job.client for job in arrived.jobs} != set(at.masked) or not np.allclose(
            counts / counts.sum(), weights
        ):
            raise FederationError(
                "secure: a sum cannot be weighted anew; its updates count by their examples"
            )
        factor = float(arrived.weights.sum()) / float(counts.sum())
        return (at.total() * factor).astype(np.float32)

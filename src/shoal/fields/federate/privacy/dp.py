"""Differential privacy of clients: bounded updates, normal noise, and an account of both.

Two runs whose data differ in one client, whatever it has, give models that are hard to tell apart:
for every set of models, the probability in one run is at most e^epsilon times that in the other,
plus delta.

Source: McMahan et al., Learning Differentially Private Recurrent Language Models, 2018; accounting:
Mironov, Renyi Differential Privacy, 2017, and Wang, Balle, Kasiviswanathan, Subsampled Renyi
Differential Privacy and Analytical Moments Accountant, 2019, through the package dp-accounting.
"""

from __future__ import annotations

import functools
import math
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.privacy.protocols import PrivacyWork
from shoal.fields.federate.protocols import Arrived, FederationError, LocalJob

# Of Renyi divergences; the one with the smallest epsilon counts.
_ORDERS = (*(1 + at / 10 for at in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)


@part
class DifferentialPrivacy:
    """Shorten every update to a length, and add normal noise to their sum.

    Args:
        clip: largest length of an update, L2.
        noise: standard deviation of the noise of a sum, in lengths ``clip`` of one update.
        by: who adds it: the ``server``, which sees updates without noise; or each of the
            ``clients`` a share of it, so that the server needs no trust but the clients do.
        delta: probability with which the promise may fail; below 1 / clients.
        epsilon: budget; the run ends before it is exceeded. None for no limit.
        spent: epsilon of earlier runs on the same data, which counts against the budget.
        repeatable: noise follows from the job's seed, for tests. It protects from nobody who knows
            the seed.
    """

    clip: Annotated[float, Gt(0)] = 1.0
    noise: Annotated[float, Gt(0)] = 1.0
    by: Literal["server", "clients"] = "server"
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    epsilon: Annotated[float, Gt(0)] | None = None
    spent: Annotated[float, Ge(0)] = 0.0
    repeatable: bool = False

    def start(self, names: tuple[str, ...], seed: int) -> DpState:
        """With an empty account."""
        return DpState(self, names, seed)

    def predict(self, work: PrivacyWork) -> tuple[float, int]:
        """Epsilon of a run whose updates have equal weights, and aggregations that are allowed.

        Raises:
            FederationError: earlier runs, or the first aggregation, spend the budget.
        """
        allowed = work.aggregations
        if self.epsilon is not None:
            if (first := self._after(work, 1)) > self.epsilon:
                raise FederationError(
                    f"privacy: a budget of epsilon = {self.epsilon:g}, of which earlier runs have "
                    f"spent {self.spent:g}, is exceeded by the first aggregation, with which it "
                    f"is {first:.3g}; take more noise, fewer clients in a round or a larger budget"
                )
            allowed = bisect_right(
                range(1, work.aggregations), self.epsilon, key=lambda n: self._after(work, n)
            )
            if self._after(work, work.aggregations) <= self.epsilon:
                allowed = work.aggregations
        return self._after(work, allowed), allowed

    def _after(self, work: PrivacyWork, aggregations: int) -> float:
        strength = self.strength(np.ones(work.updates), work.clients)
        account = Account()
        if work.pool > work.updates:
            account.drawn[work.updates, work.pool, strength] = aggregations
        else:
            # A client takes part in its share of the aggregations.
            times = math.ceil(aggregations * work.updates / work.clients)
            account.own["any"] = times / strength**2
        return self.epsilon_of(account)

    def strength(self, weights: np.ndarray, clients: int) -> float:
        """Deviation of the noise over what one client can change, if another takes its place."""
        noise = self.noise
        if self.by == "clients":
            noise *= math.sqrt(float((weights**2).sum()) / clients) / float(weights.max())
        # Rounded down to three digits, so that aggregations which cost the same are known to.
        unit = 10.0 ** (math.floor(math.log10(noise / 2)) - 2)
        return math.floor(noise / 2 / unit) * unit

    def epsilon_of(self, account: Account) -> float:
        """Epsilon of an account; earlier runs included."""
        costs = [count * _cost(*key) for key, count in account.drawn.items()]
        if most := max(account.own.values(), default=0.0):
            # Normal noises of strengths s_i add up to one of strength 1 / sqrt(sum of 1 / s_i^2).
            costs.append(_cost(1, 1, most**-0.5))
        if not costs:
            return self.spent
        epsilon, _ = _package().rdp.compute_epsilon(_ORDERS, sum(costs), self.delta)
        return self.spent + float(epsilon)


def _package() -> Any:
    return import_extra("dp_accounting", extra="fields", purpose="accounts of privacy")


@functools.lru_cache(4096)
def _cost(updates: int, pool: int, strength: float) -> np.ndarray:
    """Renyi divergences of an aggregation, of each order; those of several add up."""
    package = _package()
    account = package.rdp.RdpAccountant(_ORDERS, package.NeighboringRelation.REPLACE_ONE)
    noise = package.GaussianDpEvent(strength)
    drawn = package.SampledWithoutReplacementDpEvent(pool, updates, noise)
    account.compose(drawn if pool > updates else noise)
    cost: np.ndarray = account.rdp
    return cost


@dataclass
class Account:
    """What has been charged.

    Args:
        own: client -> sum of 1 / strength^2 of the aggregations that charged it alone.
        drawn: updates, pool and strength -> aggregations that charged every client.
    """

    own: dict[str, float] = field(default_factory=dict)
    drawn: dict[tuple[int, int, float], int] = field(default_factory=dict)

    def charged(self, clients: Sequence[str], pool: int, strength: float) -> Account:
        """With one aggregation more."""
        own, drawn = dict(self.own), dict(self.drawn)
        if pool > len(clients):
            key = len(clients), pool, strength
            drawn[key] = drawn.get(key, 0) + 1
        else:
            own |= {name: own.get(name, 0.0) + strength**-2 for name in clients}
        return Account(own, drawn)


class DpState:
    """An account at work.

    A round whose clients were drawn at random charges every client a little; one whose clients
    were not charges those that took part. Epsilon is that of the client that was charged most.
    """

    def __init__(self, part: DifferentialPrivacy, names: tuple[str, ...], seed: int) -> None:
        self._part, self._seed, self._names = part, seed, names
        self.reads = part.by == "server"
        self._account = Account()
        self._last: tuple[Sequence[str], int, float] | None = None
        self._epsilon, self._releases = part.spent, 0
        # After how many releases, and epsilon with one more.
        self._next: tuple[int, float] | None = None

    # A client

    def share(self, delta: np.ndarray, job: LocalJob) -> np.ndarray:
        """Of a client that adds noise itself: bounded, with its share."""
        part = self._part
        if part.by == "server":
            return delta
        deviation = part.noise * part.clip / math.sqrt(len(self._names))
        noise = self._draw(len(delta), deviation, "client", job.number)
        shared: np.ndarray = self.clipped(delta) + noise
        return shared

    # The server

    def bound(self, delta: np.ndarray) -> np.ndarray:
        """Not longer than ``clip``, whatever the client has sent."""
        return self.clipped(delta) if self._part.by == "server" else delta

    def clipped(self, delta: np.ndarray) -> np.ndarray:
        """The same direction, at most ``clip`` long."""
        length = float(np.linalg.norm(delta.astype(np.float64)))
        if not math.isfinite(length) or length <= self._part.clip:
            return delta
        # Rounding must not make it longer.
        shorter: np.ndarray = delta * np.float32(self._part.clip / length * (1 - 1e-6))
        return shorter

    def release(self, direction: np.ndarray, arrived: Arrived, pool: int) -> np.ndarray:
        """The direction under noise; it is charged to the clients.

        Raises:
            FederationError: the budget does not allow it; nothing is released.
        """
        part, weights = self._part, arrived.weights
        event = [job.client for job in arrived.jobs], pool, part.strength(weights, len(self._names))
        account = self._account.charged(*event)
        epsilon = part.epsilon_of(account)
        if part.epsilon is not None and epsilon > part.epsilon:
            raise FederationError(self._spent(epsilon))
        if part.by == "server":
            deviation = part.noise * part.clip * float(weights.max())
            direction = direction + self._draw(len(direction), deviation, "sum", self._releases)
        self._account, self._epsilon, self._last = account, epsilon, event
        self._releases += 1
        return direction

    def _draw(self, size: int, deviation: float, what: str, number: int) -> np.ndarray:
        if self._part.repeatable:
            draw = generator(self._seed, purpose=f"noise of a {what}", step=number)
        else:
            draw = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        return draw.standard_normal(size, np.float32) * np.float32(deviation)

    # The account

    def measured(self) -> dict[str, float]:
        """Epsilon so far, and its delta."""
        return {"epsilon": self._epsilon, "delta": self._part.delta}

    def refusal(self) -> str:
        """Why nothing more may be released; empty while something may.

        The next aggregation is expected to cost as much as the last.
        """
        part = self._part
        if part.epsilon is None:
            return ""
        if part.spent >= part.epsilon:
            return (
                f"privacy: earlier runs have spent epsilon = {part.spent:g} of a budget of "
                f"{part.epsilon:g}; nothing is left for this one"
            )
        if self._last is None:
            return ""
        if self._next is None or self._next[0] != self._releases:
            self._next = self._releases, part.epsilon_of(self._account.charged(*self._last))
        return self._spent(self._next[1]) if self._next[1] > part.epsilon else ""

    def _spent(self, after: float) -> str:
        return (
            f"privacy: the budget is spent: epsilon = {self._epsilon:.3g} after {self._releases} "
            f"aggregations, {after:.3g} after one more, of {self._part.epsilon:g}; take more "
            "noise, fewer rounds or a larger budget"
        )

    # State

    def state(self) -> dict[str, np.ndarray]:
        """The account."""
        rows = [(*key, count) for key, count in self._account.drawn.items()]
        last: list[float] = []
        if self._last is not None:
            clients, pool, strength = self._last
            last = [pool, strength, *map(self._names.index, clients)]
        return {
            "own": np.array([self._account.own.get(name, 0.0) for name in self._names]),
            "drawn": np.array(rows, np.float64).reshape(len(rows), 4),
            "releases": np.array([self._releases]),
            "last": np.array(last, np.float64),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on with it."""
        own = zip(self._names, state["own"].tolist(), strict=True)
        self._account = Account(
            {name: charged for name, charged in own if charged},
            {
                (int(updates), int(pool), float(strength)): int(count)
                for updates, pool, strength, count in state["drawn"]
            },
        )
        self._releases = int(state["releases"][0])
        if len(last := state["last"]):
            clients = [self._names[int(at)] for at in last[2:]]
            self._last = clients, int(last[0]), float(last[1])
        self._epsilon = self._part.epsilon_of(self._account)

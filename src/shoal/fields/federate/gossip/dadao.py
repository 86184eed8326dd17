"""DADAO: gradients and exchanges at independent random times, both accelerated.

Every node has six vectors that move by a linear differential equation between events. A gradient
event, at rate 1 in a unit of time, moves three of them; an exchange with a neighbour, at the rate
of the edge, moves two by the difference of one vector of each end. No node waits for a round.

Source: Nabli and Oyallon, DADAO: Decoupled Accelerated Decentralized Asynchronous Optimization,
2023, algorithm 1 and appendix F.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.core.random import generator
from shoal.fields.federate.gossip.graphs import NodeGraph
from shoal.fields.federate.gossip.protocols import LocalWork, Push, Spot, Tensors
from shoal.fields.federate.gossip.rates import EdgeRates, optimal_rates, uniform_rates
from shoal.fields.federate.protocols import FederationError, UpdateRefusedError

# Units of time after which an exchange is tried again that was refused.
_AGAIN = 0.1
# Units of time by which an event may be early.
_ROUNDED = 1e-9
# Places of the six vectors.
_X, _XT, _Y, _YT, _Z, _ZT = range(6)


@dataclass(frozen=True, kw_only=True)
class DadaoConstants:
    """What follows from the curvatures of the losses.

    Args:
        mu: of strong convexity.
        smoothness: L.
        chi1: of the rates in use.
    """

    mu: float
    smoothness: float
    chi1: float

    def __post_init__(self) -> None:
        if not (0 < self.mu <= self.smoothness < math.inf):
            raise FederationError(
                f"dadao: mu = {self.mu:g} and L = {self.smoothness:g}; strongly convex losses have "
                "0 < mu <= L: set l2 above 0, or mu and smoothness"
            )

    @property
    def nu(self) -> float:
        """Half of mu."""
        return self.mu / 2

    @property
    def s(self) -> float:
        """sqrt(nu / L)."""
        return math.sqrt(self.nu / self.smoothness)

    @property
    def beta(self) -> float:
        """By which an exchange moves z~."""
        return 2 * self.chi1 / self.s

    def matrix(self) -> np.ndarray:
        """A of d/dt (x, x~, y, y~, z, z~) = A (x, x~, y, y~, z, z~), float64 [6, 6]."""
        alpha, slow, theta = self.s / 4, self.s / 8, 1 / (2 * self.s)
        A = np.zeros((6, 6))
        A[_X, [_X, _XT]] = -slow, slow
        A[_XT, [_X, _XT]] = slow, -slow
        A[_Y, [_Y, _YT]] = -alpha, alpha
        A[_YT, [_XT, _Y, _Z]] = -theta * self.nu, -theta, -theta
        A[_Z, [_Z, _ZT]] = -alpha, alpha
        A[_ZT, [_Z, _ZT]] = slow, -slow
        return A


class DadaoFlow:
    """exp(A t) for any t.

    A has the eigenvalue 0 twice, so that its eigenvectors are written down, not computed: two that
    stay, one each that fades with x - x~ and with z - z~, and the plane of y and y~, which swings.

    Args:
        fixed: the constants of A.
    """

    def __init__(self, fixed: DadaoConstants) -> None:
        alpha, slow, theta, nu = fixed.s / 4, fixed.s / 8, 1 / (2 * fixed.s), fixed.nu
        self._fade = np.array([0.0, 0.0, -(alpha + slow), -2 * slow])

        def driven(force: float, fade: float) -> tuple[float, float]:
            y = theta * force / (-fade - fade**2 / alpha - theta)
            return y, y * (1 + fade / alpha)

        T = np.zeros((6, 6))
        T[:, 0] = 1, 1, -nu, -nu, 0, 0
        T[:, 1] = 0, 0, -1, -1, 1, 1
        T[:, 2] = 0, 0, *driven(alpha, self._fade[2]), alpha, -slow
        T[:, 3] = 1, -1, *driven(-nu, self._fade[3]), 0, 0
        T[_Y, 4] = T[_YT, 5] = 1
        self._basis, self._back = T, np.linalg.inv(T)
        self._alpha = alpha
        self._turn = math.sqrt(alpha * theta - alpha**2 / 4)
        self._swing = np.array([[-alpha / 2, alpha], [-theta, alpha / 2]]) / self._turn

    def __call__(self, t: float) -> np.ndarray:
        """exp(A t), float64 [6, 6]."""
        middle = np.zeros((6, 6))
        np.fill_diagonal(middle[:4, :4], np.exp(self._fade * t))
        turned = math.cos(self._turn * t) * np.eye(2) + math.sin(self._turn * t) * self._swing
        middle[4:, 4:] = math.exp(-self._alpha * t / 2) * turned
        result: np.ndarray = self._basis @ middle @ self._back
        return result


@part
class Dadao:
    """Independent random clocks for gradients and for exchanges, accelerated in both.

    It needs losses that are smooth and strongly convex, such as logistic regression with l2.

    Args:
        rates: of the edges: ``uniform``, or ``optimal`` (the least exchanges; needs Clarabel).
        l2: weight of half the squared length of x, which is added to every node's loss.
        mu: of strong convexity of the losses, l2 included; 0 to bound it from the data.
        smoothness: L of the losses, l2 included; 0 to bound it from the data.
        stochastic: gradients are of random batches; the models then end as far from the optimum as
            the noise of batches takes them.
    """

    rates: Literal["uniform", "optimal"] = "uniform"
    l2: Annotated[float, Ge(0)] = 1e-2
    mu: Annotated[float, Ge(0)] = 0.0
    smoothness: Annotated[float, Ge(0)] = 0.0
    stochastic: bool = False

    def edge_rates(self, graph: NodeGraph) -> EdgeRates:
        """With chi1 chi2 = 1/2.

        Raises:
            MissingExtraError: optimal rates without Clarabel.
        """
        return optimal_rates(graph) if self.rates == "optimal" else uniform_rates(graph)

    def share(self, graph: NodeGraph, works: Sequence[LocalWork]) -> dict[str, Any]:
        """Rates and curvatures, the largest of all nodes.

        Raises:
            FederationError: the losses are not strongly convex.
        """
        rates = self.edge_rates(graph)
        mu, smooth = self.mu, self.smoothness
        if not (mu and smooth):
            least, most = zip(*(work.curvature() for work in works), strict=True)
            mu, smooth = mu or min(least) + self.l2, smooth or max(most) + self.l2
        fixed = DadaoConstants(mu=mu, smoothness=smooth, chi1=rates.chi1)
        return {
            "rates": rates.rates.tolist(),
            "mu": fixed.mu,
            "smoothness": fixed.smoothness,
            "chi1": fixed.chi1,
        }

    def node(self, spot: Spot, work: LocalWork) -> DadaoNode:
        """All vectors are 0 but x."""
        return DadaoNode(self, spot, work)

    def message_bytes(self, size: int) -> float:
        """One vector of float64."""
        return 8.0 * size

    def work_steps(self, steps: int, batch: int, samples: int) -> float:
        """A gradient."""
        return 1.0 if self.stochastic else max(1.0, samples / batch)

    def unit_s(self, graph: NodeGraph, gradient_s: float, exchange_s: float) -> float:
        """As long as a gradient, or as the exchanges of a unit where they take longer."""
        return max(gradient_s, self.edge_rates(graph).total * exchange_s)


class DadaoNode:
    """Six vectors, a clock, and the times of events to come.

    The clock counts units of time. It follows the driver's, but stands still at an event of the
    node's own until that has happened, while messages of an exchange are on their way, and after an
    exchange for as long as it was ahead of the neighbour's. So every event happens at its time, as
    on the virtual clock, and a machine that is too slow for the rates makes time slower, not
    exchanges rarer.

    Attributes:
        count: gradients.
        exchanges: that were settled.
        state: x, x~, y, y~, z, z~: float64 [6, P], as of the last event.
    """

    def __init__(self, part: Dadao, spot: Spot, work: LocalWork) -> None:
        shared = spot.shared
        self.fixed = DadaoConstants(
            mu=shared["mu"], smoothness=shared["smoothness"], chi1=shared["chi1"]
        )
        self._part, self._spot, self._work = part, spot, work
        self._flow = DadaoFlow(self.fixed)
        self.state = np.zeros((6, work.size))
        self.state[_X] = work.start(spot.start)
        self.count, self.exchanges = 0, 0
        self.notes: list[dict[str, Any]] = []
        # The clock, the driver's time from which it goes on, and the clock of the state.
        self._clock = self._then = self._at = 0.0
        self._held = False
        # The smaller number of an edge has its clock.
        self._rates = {
            j: rate
            for (i, j), rate in zip(spot.graph.edges, shared["rates"], strict=True)
            if i == spot.me and rate > 0
        }
        self._gradients = generator(spot.seed, purpose="times of gradients", index=spot.me)
        self._exchanges = generator(spot.seed, purpose="times of exchanges", index=spot.me)
        self._gradient_at = float(self._gradients.exponential())
        self._next = {peer: self._wait(peer) for peer in self._rates}
        # Until when an exchange that was refused is not tried again, in the driver's time.
        self._pause = 0.0

    def use(self, rates: Mapping[int, float], now: float) -> None:
        """Use other edges from now on, in a graph that changes.

        The constants stay, so chi1 of the run must be that of the worst graph, and the rates of
        each such that chi1 chi2 <= 1/2.

        Args:
            rates: neighbour -> rate; of those with smaller numbers nothing is used here.
            now: s.
        """
        self._go(now)
        self._rates = {j: rate for j, rate in rates.items() if j > self._spot.me and rate > 0}
        # The waits of a Poisson clock have no memory, so they may begin anew.
        self._next = {peer: self._clock + self._wait(peer) for peer in self._rates}

    def _wait(self, peer: int) -> float:
        wait: float = self._exchanges.exponential() / self._rates[peer]
        return wait

    def _read(self, now: float) -> float:
        """The clock."""
        if self._held:
            return self._clock
        stop = min((self._gradient_at, *self._next.values()))
        free = self._clock + max(0.0, now - self._then) / self._spot.unit_s
        return max(self._clock, free if free < stop - _ROUNDED else stop)

    def _go(self, now: float) -> None:
        """Let the clock go on."""
        self._clock, self._then = self._read(now), max(now, self._then)

    def _move(self, now: float) -> None:
        """The differential equation, up to the clock."""
        self._go(now)
        if self._clock > self._at:
            self.state = self._flow(self._clock - self._at) @ self.state
            self._at = self._clock

    def _when(self, event: float, now: float) -> float:
        """At which time of the driver the clock is there, if nothing stops it."""
        self._go(now)
        return self._then + (event - self._clock) * self._spot.unit_s

    def due(self, now: float) -> float | None:
        """The next gradient."""
        return self._when(self._gradient_at, now)

    def begin(self, now: float) -> np.ndarray:
        """x, now."""
        self._move(now)
        x: np.ndarray = self.state[_X].copy()
        return x

    def compute(self, model: np.ndarray) -> np.ndarray:
        """The gradient of the loss minus nu |x|^2 / 2, float64 [P]."""
        gradient = self._work.gradient(model, self.count + 1 if self._part.stochastic else 0)
        result: np.ndarray = gradient + (self._part.l2 - self.fixed.nu) * model
        return result

    def finish(self, result: np.ndarray, now: float) -> Sequence[Push]:
        """A jump of x, x~ and y~; nothing is sent."""
        self._move(now)
        fixed = self.fixed
        d = result - self.state[_YT]
        self.state[_X] -= d / (4 * fixed.smoothness)
        self.state[_XT] -= d / (4 * math.sqrt(fixed.nu * fixed.smoothness))
        self.state[_YT] += (1 + fixed.s / 4) * d
        self.count += 1
        self._gradient_at += float(self._gradients.exponential())
        return ()

    def receive(self, sender: int, message: Push, now: float) -> None:
        """Nothing is pushed."""
        raise UpdateRefusedError(f"dadao: node {sender} pushed a message; it exchanges them")

    def gone(self, peer: int, now: float) -> None:
        """Its edge is used no more."""
        self._go(now)
        self._next.pop(peer, None)
        self.notes.append({"gone": peer, "now": now})

    def exchange_due(self, now: float) -> tuple[float, int] | None:
        """The next edge whose clock is here."""
        if not self._next:
            return None
        at, peer = min((at, peer) for peer, at in self._next.items())
        return max(self._when(at, now), self._pause), peer

    def postpone(self, peer: int, now: float) -> None:
        """Its clock goes on, up to where the exchange was due; that is tried again soon."""
        self._held, self._then = False, max(now, self._then)
        self._pause = now + _AGAIN * self._spot.unit_s

    def offer(self, peer: int, now: float) -> Tensors:
        """Y + z, and the clock, which stands still until the exchange has an end."""
        self._move(now)
        self._held = True
        return {"m": self.state[_Y] + self.state[_Z], "t": np.array([self._clock])}

    def settle(self, peer: int, mine: Tensors, theirs: Tensors, now: float) -> None:
        """A jump of z and z~; that of the neighbour is its negative."""
        for name, own in mine.items():
            other = theirs.get(name)
            if other is None or other.shape != own.shape or not np.isfinite(other).all():
                raise UpdateRefusedError(
                    f"dadao: {name} in the message of node {peer} is not {own.shape} finite numbers"
                )
        self._move(now)
        ahead = max(0.0, self._clock - float(theirs["t"][0])) * self._spot.unit_s
        self._held, self._then = False, max(now + ahead, self._then)
        difference = mine["m"] - theirs["m"]
        self.state[_Z] -= difference / 2
        self.state[_ZT] -= self.fixed.beta * difference
        self.exchanges += 1
        if peer in self._next:
            self._next[peer] += self._wait(peer)

    def progress(self, now: float) -> float:
        """Units of time."""
        return self._read(now)

    def model(self, now: float) -> np.ndarray:
        """x, now; the state stays."""
        result: np.ndarray = self._flow(self._read(now) - self._at)[_X] @ self.state
        return result

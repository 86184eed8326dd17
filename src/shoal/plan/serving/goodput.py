"""Goodput: the highest rate at which enough requests meet their targets, and how it is found.

A *setting* is served in virtual time at one rate after another, always with the same requests,
whose times between arrivals are drawn once (Poisson) and stretched; so what differs between two
rates is the rate. The rates that may be the answer are those of doubling and then of halving. How
far a simulation was from the targets says which of them to simulate next: the *load* at a rate is
the largest share of its targets that a request of the wanted share takes, it grows smoothly with
the rate, and it is 1 at the rate that is looked for. A simulation goes on until the question is
decided: enough requests have met their targets, or too many cannot meet them any more.

Source: Zhong et al., DistServe, 2024, section 4 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pydantic
from pydantic import PositiveFloat

from shoal.core.config import Value, parse
from shoal.core.counts import duration
from shoal.core.errors import require
from shoal.cost.serving.fleet import SimulatedFleet
from shoal.cost.serving.simulator import ServedRequest
from shoal.cost.workloads.drawing import times
from shoal.ir import Arrival

FEWEST_REQUESTS = 500
_MOST_DOUBLINGS = 40
# A rate that is expected from those on one side of it is at most so much away, in logarithms.
_FARTHEST = math.log(2.0)
# Down from one that is too much, twice as far each time: a rate that fails is decided early, and
# one that passes takes nearly a whole simulation.
_FIRST_BACK = 0.03


class Slo(Value):
    """Latency targets of requests.

    Args:
        ttft: most s to the first token.
        tpot: most s a token after it, on average over a request.
        share: share of the requests that must meet both.
    """

    ttft: PositiveFloat
    tpot: PositiveFloat
    share: float = pydantic.Field(default=0.9, gt=0, le=1)


def targets_of(text: str) -> Slo:
    """The targets of a text such as ``ttft=0.25,tpot=0.03``.

    Raises:
        ConfigError: one is missing, unknown or no number above 0.
    """
    words = [word.strip().partition("=") for word in text.split(",")]
    values = {name: duration(value, f"--slo {name}") for name, _, value in words}
    return parse(Slo, values, where="--slo")


def poisson(requests: Sequence[Arrival], count: int, seed: int) -> list[Arrival]:
    """``count`` requests of these lengths, one a second on average, at random times.

    Args:
        requests: whose prompts and outputs are taken in turn.
        count: how many.
        seed: of the times.
    """
    require(bool(requests), "requests", 0, expected="at least one", hint="give a workload with one")
    at = times(count, 1.0, 1.0, seed)
    results = []
    for index in range(count):
        one = requests[index % len(requests)]
        results.append(Arrival(at[index], one.prompt, one.output_tokens, one.session))
    return results


def replicas(rate: float, goodput: float) -> int:
    """Copies of a setting that serve ``rate`` requests per second: ``ceil(rate / goodput)``."""
    require(rate > 0, "rate", rate, expected="more than 0")
    require(
        goodput > 0,
        "goodput",
        goodput,
        expected="more than 0",
        hint="no number of copies meets targets that one never meets",
    )
    return math.ceil(rate / goodput - 1e-9)


@dataclass(slots=True)
class _Tally:
    """Requests of a rate that met their targets, that cannot, and of which it is not certain."""

    came: int = 0
    met: int = 0
    missed: int = 0
    open: list[tuple[ServedRequest, Arrival]] = field(default_factory=list)


def _load(one: ServedRequest, arrival: Arrival, now: float, slo: Slo) -> float:
    """How much of its targets a request takes at least: more than 1 is certain to miss them.

    It takes the larger one of its two shares: of the time to its first token, and of the time for
    each of those after it. At best, what is missing comes now.
    """
    first = one.first if one.n_output else now
    last, rest = one.finish, one.n_output
    if math.isnan(last):
        last, rest = now, arrival.output_tokens
    load = (first - one.arrival) / slo.ttft
    if rest > 1:
        load = max(load, (last - first) / (rest - 1) / slo.tpot)
    return load


class Goodput:
    """Lazily simulated rates of one setting; each rate is simulated once.

    Args:
        serve: arrivals -> the simulation that serves them.
        arrivals: one a second on average.
        devices: of the setting; rates are per device.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[Arrival]], SimulatedFleet],
        arrivals: Sequence[Arrival],
        devices: int = 1,
    ) -> None:
        self._serve, self._arrivals = serve, arrivals
        self.devices = devices
        self._seen: dict[float, SimulatedFleet] = {}
        # By rate and targets: what is certain.
        self._tallies: dict[tuple[float, float, float], _Tally] = {}

    def _at(self, rate: float) -> SimulatedFleet:
        """The simulation at ``rate`` a second and device."""
        if rate not in self._seen:
            factor = 1.0 / (rate * self.devices)
            self._seen[rate] = self._serve(
                [
                    Arrival(one.at * factor, one.prompt, one.output_tokens, one.session)
                    for one in self._arrivals
                ]
            )
        return self._seen[rate]

    def _judged(self, rate: float, slo: Slo) -> tuple[int, int]:
        """Requests that met both targets until now, and those that cannot any more."""
        fleet = self._at(rate)
        tally = self._tallies.setdefault((rate, slo.ttft, slo.tpot), _Tally())
        served, came = fleet.seen.served, tally.came
        open_ = [*tally.open, *zip(served[came:], self._arrivals[came:], strict=False)]
        tally.came, tally.open = len(served), []
        for one, arrival in open_:
            if _load(one, arrival, fleet.now, slo) > 1:
                tally.missed += 1
            elif math.isnan(one.finish):
                tally.open.append((one, arrival))
            else:
                tally.met += 1
        return tally.met, tally.missed

    def attained(self, rate: float, slo: Slo) -> float:
        """Share of requests that meet both targets."""
        met, missed = self._judged(rate, slo)
        while met + missed < len(self._arrivals):
            self._at(rate).advance()
            met, missed = self._judged(rate, slo)
        return met / len(self._arrivals)

    def passes(self, rate: float, slo: Slo) -> bool:
        """Whether enough requests meet both targets; simulated until that is certain."""
        total = len(self._arrivals)
        while True:
            met, missed = self._judged(rate, slo)
            if met / total >= slo.share or (total - missed) / total < slo.share:
                return met / total >= slo.share
            self._at(rate).advance()

    def curve(self, slo: Slo, rates: Sequence[float]) -> list[tuple[float, float]]:
        """(rate, attainment) of each rate, lowest first; below one that all meet, all meet it."""
        whole = 0.0
        for rate in sorted(self._seen, reverse=True):
            if not self._judged(rate, slo)[1] and self.attained(rate, slo) == 1:
                whole = rate
                break
        results = []
        for rate in sorted(rates, reverse=True):
            share = self.attained(rate, slo) if rate > whole else 1.0
            whole = max(whole, rate) if share == 1 else whole
            results.append((rate, share))
        return results[::-1]

    def load(self, rate: float, slo: Slo) -> float:
        """How much of its targets the worst request of the wanted share takes; more than 1 fails.

        By what was simulated: a queue that grows does so evenly until the last request has come.
        """
        fleet = self._at(rate)
        came = zip(fleet.seen.served, self._arrivals, strict=False)
        loads = sorted(_load(one, arrival, fleet.now, slo) for one, arrival in came)
        load = loads[max(1, math.ceil(slo.share * len(loads) - 1e-9)) - 1]
        return load * len(self._arrivals) / len(loads) if load > 1 else load

    def find(
        self,
        slo: Slo,
        *,
        tolerance: float = 0.05,
        relative: float = 0.0,
        start: float = 1.0,
        near: float | None = None,
        most: float | None = None,
    ) -> float:
        """The highest rate per device that is good enough, less than the tolerance too low.

        Below one request a second, ``tolerance`` is a share of the rate. 0 if even a thousandth
        of ``start`` is too much. Two simulations prove it: the rate is good enough, and the next
        one is not.

        Args:
            slo: what is good enough.
            tolerance: of the rate, requests per second and device.
            relative: of the rate, as a share; the larger of both counts.
            start: whose doubles and halves are looked at; the same start has the same rates.
            near: where it is expected; ``start`` if nothing is known.
            most: rates from here on count as too much, and are not simulated.
        """
        require(tolerance > 0, "goodput.tolerance", tolerance, expected="more than 0")
        require(start > 0, "goodput.start", start, expected="more than 0")
        passed, failed = 0.0, start * 2.0**_MOST_DOUBLINGS if most is None else most
        guess = start if near is None else near
        width = math.inf
        while True:
            guess = min(max(guess, passed), failed)
            low, high = _between(guess, start, tolerance, relative)
            if low > passed:
                rate = low
            elif high < failed:
                rate = high
            else:
                break
            if self.passes(rate, slo):
                passed = rate
            else:
                failed = rate
            if passed >= failed:
                break
            before, width = width, failed / passed if passed else math.inf
            guess = self._next(slo, passed, failed, halve=width > math.sqrt(before))
        return max(low, passed)

    def _next(self, slo: Slo, passed: float, failed: float, *, halve: bool) -> float:
        """Where the load is expected to be 1, from rates that passed and rates that failed."""
        below = sorted(rate for rate in self._seen if rate <= passed)
        above = sorted(rate for rate in self._seen if rate >= failed)
        between = bool(below and above)
        ends = [below[-1], above[0]] if between else below[-2:] or above[:2]
        loads = [(math.log(rate), math.log(max(self.load(rate, slo), 1e-9))) for rate in ends]
        # The power of the rate with which the load grows, from two points; one is near a queue.
        power = 2.0
        if len(loads) == 2:
            power = (loads[1][1] - loads[0][1]) / (loads[1][0] - loads[0][0])
        if between and (halve or power <= 0):
            return math.sqrt(passed * failed)
        x, y = loads[0] if above else loads[-1]
        back = min(_FARTHEST, _FIRST_BACK * 2.0 ** (len(above) - 1))
        return math.exp(x + min(_FARTHEST, max(-back, -y / max(power, 0.2))))


def _between(
    threshold: float, start: float, tolerance: float, relative: float
) -> tuple[float, float]:
    """The neighbours of a threshold among the rates that doubling and halving look at."""
    low = high = start
    if threshold >= start:
        while high <= threshold:
            low, high = high, 2 * high
    else:
        while low > threshold:
            high, low = low, low / 2
            if low < start / 1000:
                return 0.0, high
    while high - low > max(tolerance * min(1.0, high), relative * high):
        middle = (low + high) / 2
        if middle <= threshold:
            low = middle
        else:
            high = middle
    return low, high

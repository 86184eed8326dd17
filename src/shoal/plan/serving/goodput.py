"""Goodput: the highest rate at which enough requests meet their targets, and how it is found.

A *setting* is served in virtual time at one rate after another, always with the same requests,
whose times between arrivals are drawn once (Poisson) and stretched; so what differs between two
rates is the rate. The highest rate at which the wanted share of requests meets both targets is
found by doubling and then by halving.

Source: Zhong et al., DistServe, 2024, section 4 and algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from pydantic import Field, PositiveFloat

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.cost.serving.fleet import attainment
from shoal.cost.serving.simulator import Served
from shoal.cost.workloads.drawing import times
from shoal.ir import Arrival

__all__ = ["FEWEST_REQUESTS", "Goodput", "Slo", "poisson", "replicas"]

FEWEST_REQUESTS = 500
_MOST_DOUBLINGS = 40


class Slo(Value):
    """What requests shall meet.

    Args:
        ttft: most s to the first token.
        tpot: most s a token after it, on average over a request.
        share: of the requests that must meet both.
    """

    ttft: PositiveFloat
    tpot: PositiveFloat
    share: float = Field(default=0.9, gt=0, le=1)


def poisson(requests: Sequence[Arrival], count: int, seed: int) -> list[Arrival]:
    """``count`` requests of these lengths, one a second on average, at random times.

    Args:
        requests: whose prompts and outputs are taken in turn.
        count: how many.
        seed: of the times.
    """
    require(bool(requests), "requests", 0, expected="at least one", hint="give a workload with one")
    at = times(count, 1.0, 1.0, seed)
    found = []
    for index in range(count):
        one = requests[index % len(requests)]
        found.append(Arrival(at[index], one.prompt, one.output_tokens, one.session))
    return found


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


class Goodput:
    """Rates of one setting, each simulated once, whatever is asked of it.

    Args:
        serve: arrivals -> what happened to each.
        arrivals: one a second on average.
        devices: of the setting; rates are per device.
    """

    def __init__(
        self,
        serve: Callable[[Sequence[Arrival]], Sequence[Served]],
        arrivals: Sequence[Arrival],
        devices: int = 1,
    ) -> None:
        self._serve, self._arrivals = serve, arrivals
        self.devices = devices
        self._seen: dict[float, Sequence[Served]] = {}

    def served(self, rate: float) -> Sequence[Served]:
        """What happens to every request at ``rate`` a second and device."""
        if rate not in self._seen:
            factor = 1.0 / (rate * self.devices)
            self._seen[rate] = self._serve(
                [
                    Arrival(one.at * factor, one.prompt, one.output_tokens, one.session)
                    for one in self._arrivals
                ]
            )
        return self._seen[rate]

    def attained(self, rate: float, slo: Slo) -> float:
        """Share of requests that meet both targets."""
        return attainment(self.served(rate), ttft=slo.ttft, tpot=slo.tpot)

    def curve(self, slo: Slo, rates: Sequence[float]) -> list[tuple[float, float]]:
        """(rate, attainment) of each rate."""
        return [(rate, self.attained(rate, slo)) for rate in rates]

    def find(
        self, slo: Slo, *, tolerance: float = 0.05, relative: float = 0.0, start: float = 1.0
    ) -> float:
        """The highest rate per device that is good enough, less than the tolerance too low.

        Below one request a second, ``tolerance`` is a share of the rate. 0 if even a thousandth
        of ``start`` is too much.

        Args:
            slo: what is good enough.
            tolerance: of the rate, requests per second and device.
            relative: of the rate, as a share; the larger of both counts.
            start: where to begin; the same start asks for the same rates again.
        """
        require(tolerance > 0, "goodput.tolerance", tolerance, expected="more than 0")
        require(start > 0, "goodput.start", start, expected="more than 0")
        low = high = start
        if self.attained(start, slo) >= slo.share:
            for _ in range(_MOST_DOUBLINGS):
                high = 2 * low
                if self.attained(high, slo) < slo.share:
                    break
                low = high
        else:
            while self.attained(low, slo) < slo.share:
                high, low = low, low / 2
                if low < start / 1000:
                    return 0.0
        while high - low > max(tolerance * min(1.0, high), relative * high):
            middle = (low + high) / 2
            if self.attained(middle, slo) >= slo.share:
                low = middle
            else:
                high = middle
        return low

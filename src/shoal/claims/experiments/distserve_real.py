"""What claim [40] DistServe runs for real: two engine processes, predicted and then served.

The processes are profiled where they will serve: the first alone, then both at once, which tells
how much they slow each other. A short trace of other requests tells what steps take in the loop,
where something is around them and caches are warm. Before each rate a few steps are timed again,
so that a machine that has become slower or faster since is predicted as it is now. The prediction
is made before the requests are sent.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.config import Value
from shoal.core.parts import table
from shoal.cost.serve_fleet import Instance, Wire, attainment, simulate_fleet
from shoal.cost.serve_sim import Served, quantities
from shoal.cost.step_cost.fitted import FEATURES, Fitted, Sample, fit
from shoal.ir import Arrival, Disagg, Limits, ServeJob
from shoal.plan.batching.dispatch import LeastLoaded
from shoal.plan.goodput import Goodput, Slo, poisson

if TYPE_CHECKING:
    from shoal.serve.disagg import DisaggEngine

__all__ = ["Point", "Real", "alone"]

_LIMITS = Limits(max_running=32, max_step_tokens=256, max_position=1024)
_KV_TOKENS = 8192
_RATES = (0.4, 0.7, 0.9, 1.1, 1.4)
# Copying within the memory of a host; the prediction hardly feels it.
_COPY_BANDWIDTH = 1e9
_AGAIN = 8


class Point(Value):
    """One rate.

    Args:
        system: disaggregated or colocated.
        rate: requests per second.
        attained: share within both targets: (measured, predicted, alone).
        throughput: requests per second: (measured, predicted, alone).
        moved: bytes of keys and values: (measured, by the formula).
        slower: steps now over steps when they were profiled.
    """

    system: str
    rate: float
    attained: tuple[float, float, float]
    throughput: tuple[float, float, float]
    moved: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0


def alone(cost: Fitted, arrivals: Sequence[Arrival]) -> list[Served]:
    """What a prediction without queues and company says: each request by itself."""
    found = []
    for index, one in enumerate(arrivals):
        size = len(one.prompt)
        first = one.at + cost.seconds([(0, size)])
        rest = (one.output_tokens - 1) * cost.seconds([(size + one.output_tokens // 2, 1)])
        served = Served(str(index), one.at, size, first, first + rest, one.output_tokens)
        found.append(served)
    return found


class Real:
    """Both systems on two processes of one core each.

    Args:
        model: its directory.
        seconds: that each rate takes, about.
        seed: of the requests.
        scale: by which lengths of the workload ``code`` are divided.
    """

    def __init__(self, model: Path, *, seconds: float, seed: int, scale: float = 2.0) -> None:
        self.job = ServeJob(
            model=str(model),
            kv_tokens=_KV_TOKENS,
            threads=1,
            max_running=_LIMITS.max_running,
            max_step_tokens=_LIMITS.max_step_tokens,
            max_position=_LIMITS.max_position,
            disagg=Disagg(),
        )
        self._seconds, self._seed = seconds, seed
        self._workload = table("workload").build({"name": "code", "scale": scale})
        self.cost: Fitted | None = None
        self.crowding = 0.0
        self.slo: Slo | None = None
        # Steps of a trace over what the fitted line says of them, in sum.
        self.around = 1.0

    def points(self) -> list[Point]:
        """All rates of both systems."""
        found = []
        for system in ("disaggregated", "colocated"):
            found += self._system(system)
        return found

    def _system(self, system: str) -> list[Point]:
        from shoal.serve.disagg import DisaggEngine, replay
        from shoal.serve.profile import spread

        colocated = 2 if system == "colocated" else 0
        with DisaggEngine(self.job, colocated=colocated, pin=True) as engine:
            shapes = spread(_LIMITS, _KV_TOKENS)
            engine.profile(shapes, seconds=1.0, together=True)  # warm
            (own,) = engine.profile(shapes, seconds=4.0, together=False)
            company = engine.profile(shapes, seconds=4.0, together=True)
            ratios = [_slower(one, own) for one in company]
            self.crowding = max(0.0, statistics.mean(ratios) - 1)
            few = shapes[:: max(1, len(shapes) // _AGAIN)]
            before = company[0][:: max(1, len(shapes) // _AGAIN)]
            self._around(engine, own)
            assert self.cost is not None
            best = self._goodput(system, engine.token_bytes)
            found = []
            for share in _RATES:
                rate = share * best
                count = max(60, round(rate * self._seconds))
                arrivals = self._arrivals(rate, count)
                now = engine.profile(few, seconds=0.8, together=True)[0]
                slower = _slower(now, before)
                assert self.slo is not None
                said = self._predict(system, arrivals, engine.token_bytes, slower)
                moved = len(engine.moved)
                seen = replay(engine, arrivals)
                slo = {"ttft": self.slo.ttft, "tpot": self.slo.tpot}
                three = (seen, said, alone(self.cost, arrivals))
                going_on = sum(len(a.prompt) for a in arrivals if a.output_tokens > 1)
                bytes_due = 0.0 if colocated else float(going_on * engine.token_bytes)
                found.append(
                    Point(
                        system=system,
                        rate=rate,
                        attained=tuple(attainment(one, **slo) for one in three),
                        throughput=tuple(quantities(one)["requests_per_s"] for one in three),
                        moved=(float(sum(m.nbytes for m in engine.moved[moved:])), bytes_due),
                        slower=slower,
                    )
                )
        return found

    def _around(self, engine: DisaggEngine, own: Sequence[Sample]) -> None:
        """Fit the cost to profiled steps and to those of a trace, whose sum it then meets.

        A step in the loop has something around it, finds its caches warm, and is interrupted now
        and then: the mean counts, for whoever waits waits for all of it.
        """
        from shoal.serve.disagg import replay

        rate = 0.6 / fit(own).seconds([(0, 82)])
        engine.record(on=True)
        replay(engine, self._arrivals(rate, 200, self._seed + 1))
        steps = [step for one in engine.record(on=False) for step in one]
        cost = fit([*own, *steps])
        took = sum(one.seconds for one in steps)
        self.around = took / sum(cost.seconds(one.chunks) for one in steps)
        self.cost = _scaled(cost, self.around)

    def _arrivals(self, rate: float, count: int, seed: int | None = None) -> list[Arrival]:
        seed = self._seed if seed is None else seed
        lengths = self._workload.arrivals(
            count=count, vocab_size=4096, max_position=_LIMITS.max_position, seed=seed
        )
        return [dataclasses.replace(one, at=one.at / rate) for one in poisson(lengths, count, seed)]

    def _goodput(self, system: str, token_bytes: int) -> float:
        """The predicted one; the targets are a few times what a request alone takes."""
        assert self.cost is not None
        if self.slo is None:
            company = 1 + self.crowding
            ttft = 4 * company * self.cost.seconds([(0, 82)])
            tpot = 2 * company * self.cost.seconds([(96, 1)] * 4)
            self.slo = Slo(ttft=ttft, tpot=tpot)
        rates = Goodput(
            lambda arrivals: self._predict(system, arrivals, token_bytes, 1.0),
            self._arrivals(1.0, 300),
        )
        return rates.find(self.slo, relative=0.05)

    def _predict(
        self, system: str, arrivals: Sequence[Arrival], token_bytes: int, slower: float
    ) -> list[Served]:
        assert self.cost is not None
        cost = _scaled(self.cost, slower)

        def instance(kind: str, name: str) -> Instance:
            kv = table("kv").build("paged").build(_KV_TOKENS)
            return Instance(table(kind).build(name).build(kv, _LIMITS), cost)

        if system == "colocated":
            both = [instance("scheduler", "fcfs") for _ in range(2)]
            return simulate_fleet(both, [], LeastLoaded(2), arrivals, crowding=self.crowding).served
        return simulate_fleet(
            [instance("phase", "prefill")],
            [instance("phase", "decode")],
            LeastLoaded(1, 1),
            arrivals,
            wire=Wire(bandwidth=_COPY_BANDWIDTH, token_bytes=token_bytes),
            crowding=self.crowding,
        ).served


def _scaled(cost: Fitted, factor: float) -> Fitted:
    """A cost times a factor."""
    return cost.model_copy(update={name: factor * getattr(cost, name) for name in FEATURES})


def _slower(now: Sequence[Sample], before: Sequence[Sample]) -> float:
    """Median ratio of steps of the same shapes."""
    return statistics.median(a.seconds / b.seconds for a, b in zip(now, before, strict=True))

"""What claim [40] DistServe runs for real: two engine processes, predicted and then served.

A profile of steps and a rehearsal with other requests are where predictions begin; then every step
that an instance takes is recorded and fitted, so that nothing measured at a rate is part of its own
prediction. Fixed steps are timed before and after every run. A rate during which they changed by
more than 5 %, or other processes had more than 5 % of the cores, is predicted and served again,
three times at most, whatever the prediction was worth, and nothing is learned from it. All attempts
are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shoal.core.config import Value
from shoal.core.measure import BackgroundLoad
from shoal.core.parts import table
from shoal.cost.serving.fleet import KVTransferLink, SimulatedFleet, SimulatedInstance, attainment
from shoal.cost.serving.simulator import ServedRequest, quantities
from shoal.cost.step_cost.cooling import Cooling, Warmth, fit_cooling
from shoal.cost.step_cost.fitted import FittedStepCost, StepSample, fit, scaled
from shoal.ir import Arrival, Disagg, SchedulerLimits, ServeJob
from shoal.plan.batching.dispatch import LeastLoadedDispatcher
from shoal.plan.serving.goodput import Goodput, Slo, poisson
from shoal.serve.bench.rehearse import OTHERS, PULSE, STEADY, spread_of

if TYPE_CHECKING:
    from shoal.serve.cluster.disagg import DisaggEngine

_T = TypeVar("_T")

_LIMITS = SchedulerLimits(max_running=32, max_step_tokens=256, max_position=1024)
_KV_TOKENS = 8192
_RATES = (0.4, 0.7, 0.9, 1.1, 1.4)
_REHEARSED = (0.7, 1.4)
# Of a rate, at most.
_ATTEMPTS = 3


class RatePoint(Value):
    """One rate.

    Args:
        system: disaggregated or colocated.
        rate: requests per second.
        attained: share within both targets: (measured, predicted, alone).
        throughput: requests per second: (measured, predicted, alone).
        moved: bytes of keys and values: (measured, by the formula).
        tpot_s: median time per token after the first: (measured, predicted).
        drift: phase -> steps as they were over what the prediction said of them, in sum.
        changed: by which share fixed steps took longer or shorter after it than before.
        others: share of the cores that other processes had.
        swing: by how much the predicted share changes where all steps take 5 % less or more, which
            is still the same machine.
    """

    system: str
    rate: float
    attained: tuple[float, float, float]
    throughput: tuple[float, float, float]
    moved: tuple[float, float] = (0.0, 0.0)
    tpot_s: tuple[float, float]
    drift: dict[str, float]
    changed: float
    others: float
    swing: float = 0.0

    @property
    def steady(self) -> bool:
        """Whether the machine was the same all the time."""
        return self.changed <= STEADY and self.others <= OTHERS

    def __str__(self) -> str:
        """Where predictions go wrong: in what is attained, and in what steps take."""
        drift = ", ".join(f"{name} {value:.2f}" for name, value in self.drift.items())
        return (
            f"{self.system} at {self.rate:.1f}/s: {self.attained[0]:.2f} attained, "
            f"{self.attained[1]:.2f} predicted, steps over those predicted: {drift}, median TPOT "
            f"{1e3 * self.tpot_s[0]:.1f} ms, {1e3 * self.tpot_s[1]:.1f} predicted"
        )


class PhaseCosts:
    """What steps take in each phase, after which pause: fitted to what was recorded."""

    def __init__(self, roles: Sequence[str], first: FittedStepCost) -> None:
        self.roles = roles
        warm = Cooling(cold_s=0.0, tau_s=1.0, keeps=0.0)
        self.of = dict.fromkeys(roles, (first, warm))
        self._runs: dict[str, list[Sequence[StepSample]]] = {role: [] for role in roles}
        # s of fixed steps when what is in ``of`` held.
        self._pulse: dict[str, float] = {}

    def drift(self, recorded: Sequence[Sequence[StepSample]]) -> dict[str, float]:
        """What the steps of each instance took over what is said of them, by phase."""
        return {role: _over(self.mine(role, recorded), *self.of[role]) for role in self.of}

    def learn(
        self,
        recorded: Sequence[Sequence[StepSample]],
        before: Mapping[str, float],
        after: Mapping[str, float],
    ) -> dict[str, float]:
        """Take in the steps of each instance, and s of fixed steps before and after; the drift."""
        drift = self.drift(recorded)
        for role in self.of:
            new = self.mine(role, recorded)
            self._runs[role] += new
            cost, cooling = fit_cooling(self._runs[role])
            # Steps are interrupted now and then, and what waits, waits for all of it: the sum
            # counts, where the line goes through the middle.
            self.of[role] = _times(_over(new, cost, cooling), cost, cooling)
            self._pulse[role] = (before[role] + after[role]) / 2
        return drift

    def now(self, pulse: Mapping[str, float]) -> None:
        """Everything takes as much longer as fixed steps now, if that is beyond noise."""
        for role, (cost, cooling) in self.of.items():
            factor = pulse[role] / self._pulse[role]
            if abs(factor - 1) > STEADY:
                self.of[role] = _times(factor, cost, cooling)
                self._pulse[role] = pulse[role]

    def scaled(self, factor: float) -> PhaseCosts:
        """The same, were all steps to take so many times as long."""
        other = PhaseCosts(self.roles, self.of[self.roles[0]][0])
        other.of = {role: _times(factor, *known) for role, known in self.of.items()}
        return other

    def mine(self, role: str, every: Sequence[_T]) -> list[_T]:
        """Of what there is of each instance, what is of this role's."""
        return [one for role_of, one in zip(self.roles, every, strict=True) if role_of == role]


def alone(costs: PhaseCosts, arrivals: Sequence[Arrival]) -> list[ServedRequest]:
    """What a prediction without queues and company says: each request by itself."""
    (front, cooling), (back, _) = (costs.of[costs.roles[place]] for place in (0, -1))
    results = []
    for index, one in enumerate(arrivals):
        size = len(one.prompt)
        first = one.at + cooling.cold_s + front.seconds([(0, size)])
        rest = (one.output_tokens - 1) * back.seconds([(size + one.output_tokens // 2, 1)])
        results.append(
            ServedRequest(str(index), one.at, size, first, first + rest, one.output_tokens)
        )
    return results


class RealSystems:
    """Both systems on two processes of one core each; lengths are divided by ``scale``."""

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
        self.slo: Slo | None = None
        # Every attempt at every rate, also those that were made again.
        self.attempts: list[RatePoint] = []
        self._copy_bandwidth = 1e9

    def points(self) -> list[RatePoint]:
        """All rates of both systems."""
        return [*self._system("disaggregated"), *self._system("colocated")]

    def _system(self, system: str) -> list[RatePoint]:
        from shoal.serve.bench.profile import spread
        from shoal.serve.cluster.disagg import DisaggEngine, replay

        colocated = 2 if system == "colocated" else 0
        with DisaggEngine(self.job, colocated=colocated, pin=True) as engine:
            shapes = spread(_LIMITS, _KV_TOKENS)
            engine.profile(shapes, seconds=1.0, together=True)  # warm
            (own,) = engine.profile(shapes, seconds=3.0, together=False)
            profiled = fit(own)
            if self.slo is None:
                # A few times what a request alone takes.
                ttft, tpot = 4 * profiled.seconds([(0, 82)]), 2 * profiled.seconds([(96, 1)] * 4)
                self.slo = Slo(ttft=ttft, tpot=tpot)
            costs = PhaseCosts(["both"] * 2 if colocated else ["prefill", "decode"], profiled)
            size = engine.token_bytes
            # Lightly loaded first, then as heavily as the last rate: batches of all sizes.
            for turn, share in enumerate(_REHEARSED):
                rate = share * self._goodput(system, costs, size)
                before = self._pulse(engine, costs)
                engine.record(on=True)
                replay(engine, self._arrivals(rate, self._count(rate), self._seed + 20 + turn))
                recorded = engine.record(on=False)
                costs.learn(recorded, before, self._pulse(engine, costs))
            if engine.moved:
                moved = sum(one.nbytes for one in engine.moved)
                self._copy_bandwidth = moved / sum(one.seconds for one in engine.moved)
            best = self._goodput(system, costs, size)
            return [
                self._steadily(system, engine, costs, share * best, place)
                for place, share in enumerate(_RATES)
            ]

    def _steadily(
        self, system: str, engine: DisaggEngine, costs: PhaseCosts, rate: float, place: int
    ) -> RatePoint:
        """The first attempt in which the machine was steady, else in which it changed least."""
        made: list[RatePoint] = []
        while len(made) < _ATTEMPTS and not (made and made[-1].steady):
            # Everyone has requests of its own: prompts that came before would be in the cache.
            seed = self._seed + 100 * len(made) + 2 + place
            made.append(self._point(system, engine, costs, rate, seed))
        self.attempts += made
        return min(made, key=lambda one: (not one.steady, one.others > OTHERS, one.changed))

    def _pulse(self, engine: DisaggEngine, costs: PhaseCosts) -> dict[str, float]:
        """Phase -> s of fixed steps now, in the company of the other instance."""
        result = engine.profile(PULSE, seconds=0.5, together=True)
        taken = [sum(one.seconds for one in samples) for samples in result]
        by_role = [(role, costs.mine(role, taken)) for role in costs.of]
        return {role: float(np.mean(seconds)) for role, seconds in by_role}

    def _point(
        self, system: str, engine: DisaggEngine, costs: PhaseCosts, rate: float, seed: int
    ) -> RatePoint:
        """Predict, then serve."""
        from shoal.serve.cluster.disagg import replay

        assert self.slo is not None
        arrivals = self._arrivals(rate, self._count(rate), seed)
        before = self._pulse(engine, costs)
        costs.now(before)
        slo = {"ttft": self.slo.ttft, "tpot": self.slo.tpot}

        def predicted(costs: PhaseCosts) -> list[ServedRequest]:
            return self._predict(system, costs, arrivals, engine.token_bytes).finish().served

        said = predicted(costs)
        ends = [attainment(predicted(costs.scaled(1 + by)), **slo) for by in (-STEADY, STEADY)]
        moved = len(engine.moved)
        engine.record(on=True)
        elsewhere = BackgroundLoad(engine.pids.values())
        seen = replay(engine, arrivals)
        busy = elsewhere.share()
        three = (seen, said, alone(costs, arrivals))
        recorded = engine.record(on=False)
        after = self._pulse(engine, costs)
        going_on = sum(len(a.prompt) for a in arrivals if a.output_tokens > 1)
        bytes_due = float(going_on * engine.token_bytes) if system == "disaggregated" else 0.0
        point = RatePoint(
            system=system,
            rate=rate,
            attained=tuple(attainment(one, **slo) for one in three),
            throughput=tuple(quantities(one)["requests_per_s"] for one in three),
            moved=(float(sum(m.nbytes for m in engine.moved[moved:])), bytes_due),
            tpot_s=(_median_tpot(seen), _median_tpot(said)),
            drift=costs.drift(recorded),
            changed=max(spread_of((before[role], after[role])) for role in before),
            others=busy,
            swing=max(abs(end - attainment(said, **slo)) for end in ends),
        )
        if point.steady:
            costs.learn(recorded, before, after)
        return point

    def _count(self, rate: float) -> int:
        return max(60, round(rate * self._seconds))

    def _arrivals(self, rate: float, count: int, seed: int) -> list[Arrival]:
        lengths = self._workload.arrivals(
            count=count, vocab_size=4096, max_position=_LIMITS.max_position, seed=seed
        )
        return [dataclasses.replace(one, at=one.at / rate) for one in poisson(lengths, count, seed)]

    def _goodput(self, system: str, costs: PhaseCosts, token_bytes: int) -> float:
        """The predicted one."""
        assert self.slo is not None
        rates = Goodput(
            lambda arrivals: self._predict(system, costs, arrivals, token_bytes),
            self._arrivals(1.0, 300, self._seed),
        )
        return rates.find(self.slo, relative=0.05)

    def _predict(
        self, system: str, costs: PhaseCosts, arrivals: Sequence[Arrival], token_bytes: int
    ) -> SimulatedFleet:
        def instance(kind: str, name: str, role: str) -> SimulatedInstance:
            kv = table("kv").build("paged").build(_KV_TOKENS)
            cost, cooling = costs.of[role]
            scheduler = table(kind).build(name).build(kv, _LIMITS)
            return SimulatedInstance(scheduler, cost, cooling=cooling)

        if system == "colocated":
            both = [instance("scheduler", "fcfs", "both") for _ in range(2)]
            return SimulatedFleet(both, [], LeastLoadedDispatcher(2), arrivals)
        return SimulatedFleet(
            [instance("phase", "prefill", "prefill")],
            [instance("phase", "decode", "decode")],
            LeastLoadedDispatcher(1, 1),
            arrivals,
            wire=KVTransferLink(bandwidth=self._copy_bandwidth, token_bytes=token_bytes),
        )


def _times(factor: float, cost: FittedStepCost, cooling: Cooling) -> tuple[FittedStepCost, Cooling]:
    cold = {"cold_s": factor * cooling.cold_s}
    return scaled(cost, factor), cooling.model_copy(update=cold)


def _over(runs: Sequence[Sequence[StepSample]], cost: FittedStepCost, cooling: Cooling) -> float:
    """What steps took over what is said of them, in sum."""
    took = said = 0.0
    for run in runs:
        warmth = Warmth(cooling)
        took += sum(one.seconds for one in run)
        said += sum(cost.seconds(one.chunks) + warmth.step(one.pause_s) for one in run)
    return took / said


def _median_tpot(served: Sequence[ServedRequest]) -> float:
    return float(np.nanmedian([one.tpot for one in served]))

"""What pauses add to steps: by hand, found again from steps, and in the simulator of instances."""

from __future__ import annotations

import math

import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.cost.serving.fleet import SimulatedInstance, simulate_fleet
from shoal.cost.step_cost.cooling import Cooling, Warmth, fit_cooling
from shoal.cost.step_cost.fitted import FittedStepCost, StepSample
from shoal.ir import Arrival, SchedulerLimits
from shoal.plan.batching.dispatch import LeastLoadedDispatcher

LINE = FittedStepCost(step=2e-3, token=1e-4, prompt_pair=1e-7, decode_key=1e-6, chunk=0.0)
COOLING = Cooling(cold_s=4e-3, tau_s=0.01, keeps=0.35)


def test_a_pause_is_felt_by_the_next_steps_and_fades() -> None:
    warmth = Warmth(COOLING)
    assert warmth.step(0.0) == 0.0
    first = warmth.step(0.01)
    assert first == pytest.approx(4e-3 * (1 - math.exp(-1)))
    assert warmth.step(0.0) == pytest.approx(0.35 * first)
    assert warmth.step(1e9) == pytest.approx(4e-3)


def test_line_and_pauses_are_found_again_from_steps() -> None:
    random = generator(0, purpose="test cooling")
    runs = []
    for _ in range(2):
        warmth, steps = Warmth(COOLING), []
        for _ in range(200):
            length = int(random.integers(1, 60))
            pause = float(random.choice([0.0, 0.0, 0.005, 0.05]))
            chunks = ((int(random.integers(0, 300)), length),)
            seconds = LINE.seconds(chunks) + warmth.step(pause)
            steps.append(StepSample(chunks=chunks, seconds=seconds, pause_s=pause))
        runs.append(steps)
    line, cooling = fit_cooling(runs)
    assert (cooling.tau_s, cooling.keeps) == (COOLING.tau_s, COOLING.keeps)
    assert cooling.cold_s == pytest.approx(COOLING.cold_s, rel=1e-6)
    assert line.seconds([(10, 50)]) == pytest.approx(LINE.seconds([(10, 50)]), rel=1e-6)


def test_a_simulated_instance_is_slower_after_a_pause() -> None:
    def served(cooling: Cooling | None) -> list[float]:
        kv = table("kv").build("paged").build(1024)
        limits = SchedulerLimits(max_running=4, max_step_tokens=64, max_position=128)
        scheduler = table("scheduler").build("fcfs").build(kv, limits)
        one = SimulatedInstance(scheduler, LINE, cooling=cooling)
        arrivals = [Arrival(at, tuple(range(8)), 1) for at in (0.0, 0.002, 1.0)]
        return [
            found.ttft
            for found in simulate_fleet([one], [], LeastLoadedDispatcher(1), arrivals).served
        ]

    warm, cold = served(None), served(COOLING)
    assert cold[:2] == warm[:2]  # it begins warm, and the second follows at once
    assert cold[2] == pytest.approx(warm[2] + COOLING.cold_s)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps"):
        fit_cooling([[StepSample(chunks=((0, 4),), seconds=1.0)]])

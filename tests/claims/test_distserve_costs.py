"""What claim DistServe learns from the loop meets the sum of the last run, phase by phase."""

from __future__ import annotations

import pytest

from shoal.claims.experiments.distserve_real import PhaseCosts, RatePoint, alone
from shoal.core.random import generator
from shoal.cost.step_cost.fitted import FittedStepCost, StepSample
from shoal.ir import Arrival

LINE = FittedStepCost(step=2e-3, token=1e-4, prompt_pair=1e-7, decode_key=1e-6, chunk=0.0)


def steps(factor: float, length: int, seed: int) -> list[StepSample]:
    random = generator(seed, purpose="test costs")
    shapes = [((int(random.integers(0, 300)), length + i % 5),) for i in range(60)]
    return [StepSample(chunks=one, seconds=factor * LINE.seconds(one)) for one in shapes]


CALM = {"prefill": 1.0, "decode": 1.0}


def test_each_phase_learns_from_its_own_instance() -> None:
    costs = PhaseCosts(["prefill", "decode"], LINE)
    drift = costs.learn([steps(2.0, 40, 0), steps(0.5, 1, 1)], CALM, CALM)
    assert drift == pytest.approx({"prefill": 2.0, "decode": 0.5})
    drift = costs.learn([steps(3.0, 40, 2), steps(0.5, 1, 3)], CALM, CALM)
    assert drift == pytest.approx({"prefill": 1.5, "decode": 1.0})
    said = sum(costs.of["prefill"][0].seconds(one.chunks) for one in steps(1.0, 40, 2))
    assert said == pytest.approx(sum(one.seconds for one in steps(3.0, 40, 2)))
    assert alone(costs, [Arrival(1.0, (1,) * 40, 3)])[0].ttft > 0


def test_what_was_learned_moves_with_the_machine() -> None:
    costs = PhaseCosts(["prefill", "decode"], LINE)
    costs.learn(
        [steps(2.0, 40, 0), steps(0.5, 1, 1)],
        {"prefill": 0.9, "decode": 1.0},
        {"prefill": 1.1, "decode": 1.0},
    )
    costs.now({"prefill": 1.5, "decode": 0.8})
    again = [steps(3.0, 40, 0), steps(0.4, 1, 1)]
    assert costs.drift(again) == pytest.approx({"prefill": 1.0, "decode": 1.0})
    costs.now({"prefill": 1.53, "decode": 0.82})  # as good as the same
    assert costs.drift(again) == pytest.approx({"prefill": 1.0, "decode": 1.0})
    costs.now({"prefill": 1.0, "decode": 1.0})
    assert costs.drift(again) == pytest.approx({"prefill": 1.5, "decode": 0.8})


def test_all_steps_can_be_longer() -> None:
    costs = PhaseCosts(["prefill", "decode"], LINE)
    costs.learn([steps(2.0, 40, 0), steps(0.5, 1, 1)], CALM, CALM)
    longer = costs.scaled(1.1)
    again = [steps(2.2, 40, 0), steps(0.55, 1, 1)]
    assert longer.drift(again) == pytest.approx({"prefill": 1.0, "decode": 1.0})
    assert costs.drift(again) == pytest.approx({"prefill": 1.1, "decode": 1.1})


def test_only_a_machine_that_stays_the_same_is_steady() -> None:
    point = RatePoint(
        system="colocated",
        rate=1.0,
        attained=(1, 1, 1),
        throughput=(1, 1, 1),
        tpot_s=(0.01, 0.01),
        drift={},
        changed=0.02,
        others=0.01,
    )
    assert point.steady
    assert not point.model_copy(update={"changed": 0.06}).steady
    assert not point.model_copy(update={"others": 0.06}).steady

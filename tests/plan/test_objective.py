"""The best plan is best at what the job asks for."""

import pytest

from shoal.core.errors import PlanError
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.objective import UNITS, worth


def job(objective: str) -> TrainJob:
    return TrainJob.model_validate(
        {"model": "Qwen3-0.6B", "seq_len": 1024, "global_batch": 16, "objective": objective}
    )


@pytest.mark.parametrize(
    "objective", [o if o == "time" else pytest.param(o, marks=pytest.mark.slow) for o in UNITS]
)
def test_no_plan_that_fits_is_better_at_it(objective: str) -> None:
    machine = load("2x2xH100@ETH25")
    plans = PLANNERS.build({"name": "search", "keep": 10_000}).plan(job(objective), machine)
    values = [
        worth(p.job, machine, p.estimate.step_s.value) for p in plans if p.fits and p.estimate
    ]
    assert len(values) > 100
    assert values[0] <= 1.01 * min(values)


@pytest.mark.slow
def test_a_slow_network_makes_fewer_devices_cheaper_than_fast() -> None:
    machine = load("64xH100@ETH10")
    fast, cheap = (
        PLANNERS.build("search").plan(job(objective), machine)[0] for objective in ("time", "cost")
    )
    assert fast.estimate is not None
    assert cheap.estimate is not None
    assert cheap.job.parallel.world < fast.job.parallel.world
    assert cheap.estimate.step_s.value > fast.estimate.step_s.value
    assert worth(cheap.job, machine, cheap.estimate.step_s.value) < worth(
        fast.job.model_copy(update={"objective": "cost"}), machine, fast.estimate.step_s.value
    )
    assert cheap.why.startswith("cheapest of")


def test_worth_is_the_estimates_own_price_and_energy() -> None:
    machine = load("8xH100")
    given = job("cost").model_copy(update={"steps": 1})
    plan = PLANNERS.build("search").plan(TrainJob.model_validate(given.model_dump()), machine)[0]
    cost = plan.estimate
    assert cost is not None
    assert cost.usd is not None
    assert cost.total_s is not None
    assert cost.energy_j is not None
    share = cost.step_s.value / cost.total_s.value  # the rest is evaluation
    assert worth(plan.job, machine, cost.step_s.value) == pytest.approx(share * cost.usd.value)
    energy = plan.job.model_copy(update={"objective": "energy"})
    assert worth(energy, machine, cost.step_s.value) == pytest.approx(share * cost.energy_j.value)


@pytest.mark.parametrize(
    ("objective", "field"), [("cost", "usd_per_device_hour"), ("energy", "device.power_watts")]
)
def test_an_objective_without_numbers_is_refused(objective: str, field: str) -> None:
    machine = load("H100")
    bare = machine.model_copy(
        update={
            "usd_per_device_hour": None,
            "device": machine.device.model_copy(update={"power_watts": None}),
        }
    )
    with pytest.raises(PlanError, match=rf"objective = {objective}: .* has no {field}"):
        PLANNERS.build("search").plan(job(objective), bare)

"""What failures and saves cost a job, against jobs that are simulated failure by failure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.cost.training.failures import Saving, daly, failures_s, young
from shoal.cost.training.step import Pricer
from shoal.ir import TrainJob, Work
from shoal.machine.described import load
from shoal.plan.strategy import PLANNERS

EVERY, STEP_S = 10, 2.0


def simulated(saving: Saving, saves: int, trials: int) -> float:
    """Mean seconds of a job of so many intervals, each with its save, under random failures."""
    source = np.random.default_rng(3)
    between = saving.every * STEP_S + saving.stall_s
    total = 0.0
    for _ in range(trials):
        now, done, fails = 0.0, 0, source.exponential(saving.mtbf_s)
        while done < saves:
            if now + between <= fails:
                now, done = now + between, done + 1
                continue
            # What was computed since the save is lost, and so is a restart that fails itself.
            now, fails = fails, fails + source.exponential(saving.mtbf_s)
            while now + saving.restart_s > fails:
                now, fails = fails, fails + source.exponential(saving.mtbf_s)
            now += saving.restart_s
        total += now
    return total / trials


@pytest.mark.parametrize("mtbf_s", [60.0, 400.0, 1e5])
def test_simulated_jobs_take_as_long(mtbf_s: float) -> None:
    saving = Saving(every=EVERY, stall_s=1.5, mtbf_s=mtbf_s, restart_s=5.0)
    work = 40 * (EVERY * STEP_S + saving.stall_s)
    whole = work + failures_s(saving, work, STEP_S)
    assert whole == pytest.approx(simulated(saving, 40, 400), rel=0.04)


@given(stall=st.floats(0.01, 5.0), mtbf=st.floats(2e3, 1e6))
def test_no_other_interval_loses_less(stall: float, mtbf: float) -> None:
    def lost(t: float) -> float:
        return stall / t + t / (2 * mtbf)

    for best in (young(stall, mtbf), daly(stall, mtbf)):
        for factor in (0.3, 0.5, 0.7, 1.5, 2.0, 3.0):
            assert lost(best) < lost(factor * best)
    assert daly(50.0, 20.0) == 20.0


@pytest.mark.slow
def test_the_lines_of_a_whole_job_add_up() -> None:
    job = TrainJob.model_validate(
        {
            "model": "Llama-3.1-405B",
            "seq_len": 8192,
            "global_batch": 2048,
            "tokens": 10**12,
            "checkpoint": {"every": "auto", "mode": "snapshot"},
        }
    )
    machine = load("16384xH100")
    plan = PLANNERS.build({"name": "search"}).plan(job, machine)[0]
    cost, work = plan.estimate, Work(shape=plan.shape, job=plan.job)
    assert cost is not None and cost.total_s is not None
    assert sum(cost.whole_s.values()) == pytest.approx(cost.total_s.value, rel=1e-12)
    # 8,192 tokens x 2,048 a step.
    steps = -(-(10**12) // (8192 * 2048))
    assert cost.whole_s["steps"] == pytest.approx(steps * cost.step_s.value, rel=1e-12)
    # Llama 3 trained for more than nine tenths of its time.
    lost = (cost.whole_s["saves"] + cost.whole_s["failures"]) / cost.total_s.value
    assert 0.02 < lost < 0.10
    saving = Pricer(machine).saving(work, cost.step_s.value)
    assert saving.mtbf_s == pytest.approx(54 * 86_400 / 419)
    # A sturdier machine loses less and saves less often.
    device = machine.device.model_copy(update={"mtbf_hours": 1e6})
    other = Pricer(machine.model_copy(update={"device": device}))
    assert other.saving(work, cost.step_s.value).every > 3 * saving.every
    assert other.estimate(work).whole_s["failures"] < 0.1 * cost.whole_s["failures"]


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="stall_s = 0"):
        young(0.0, 1.0)
    with pytest.raises(ConfigError, match="mtbf_s = -1"):
        daly(1.0, -1.0)

import pytest

from shoal.core.errors import ConfigError
from shoal.ir import Estimate, Interval, TrainJob
from shoal.plan.length import DEFAULT_STEPS, num_steps, with_steps

COST = Estimate(step_s=Interval.around(0.5, 0.1))


def test_steps_tokens_minutes_and_nothing():
    assert num_steps(TrainJob(steps=7)) == 7
    assert num_steps(TrainJob(tokens=10 * 16 * 256 + 1)) == 11
    quiet = {"every": 0}
    assert num_steps(TrainJob(minutes=2, evaluation=quiet), COST) == 240
    assert num_steps(TrainJob()) == DEFAULT_STEPS


def test_evaluations_take_time_too():
    job = TrainJob(minutes=2, evaluation={"every": 1, "tokens": 3 * 16 * 256})
    assert num_steps(job, COST) == 120


def test_length_is_spelled_in_steps():
    job = with_steps(TrainJob(minutes=1, evaluation={"every": 0}), COST)
    assert (job.steps, job.tokens, job.minutes) == (120, None, None)


def test_minutes_need_an_estimate():
    with pytest.raises(ConfigError, match="minutes"):
        num_steps(TrainJob(minutes=1))

"""What another machine would change is what planning for that machine says."""

import pytest

from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.strategy import PLANNERS
from shoal.plan.what_if import what_if

JOB = TrainJob.model_validate({"model": "Qwen3-0.6B", "seq_len": 1024, "global_batch": 16})


@pytest.mark.slow
def test_answers_are_plans_for_the_changed_machine() -> None:
    best = PLANNERS.build("search").plan(JOB, load("16xH100"))[0]
    answers = {answer.question: answer for answer in what_if(JOB, best)}
    assert list(answers) == [
        "one more node",
        "twice the devices",
        "half the devices",
        "twice the bandwidth between nodes",
        "twice the bandwidth inside a node",
        "twice the memory",
        "twice the memory's bandwidth",
        "matrix products in fp8",
    ]
    assert best.estimate is not None
    half = PLANNERS.build("search").plan(JOB, load("8xH100"))[0].estimate
    assert half is not None
    assert answers["half the devices"].step == pytest.approx(
        half.step_s.value / best.estimate.step_s.value
    )
    # A better machine is never worse, but for what counts as equal.
    for question, answer in answers.items():
        assert answer.step is not None
        assert question == "half the devices" or answer.step <= 1.01
    assert answers["matrix products in fp8"].step < 0.99  # type: ignore[operator]


@pytest.mark.slow
def test_a_laptop_is_not_asked_about_nodes() -> None:
    job = TrainJob.model_validate({"model": "shoal-1m", "seq_len": 128, "global_batch": 8})
    best = PLANNERS.build("search").plan(job, load("laptop"))[0]
    answers = {answer.question: answer for answer in what_if(job, best)}
    assert list(answers) == ["twice the memory", "twice the memory's bandwidth"]
    assert answers["twice the memory"].price is None


def test_what_does_not_fit_is_said() -> None:
    job = TrainJob.model_validate({"model": "Llama-3-8B", "seq_len": 2048, "global_batch": 16})
    best = PLANNERS.build("search").plan(job, load("2xH100"))[0]
    answers = {answer.question: answer for answer in what_if(job, best)}
    assert answers["half the devices"].step is None
    assert answers["half the devices"].plan == "no plan fits"

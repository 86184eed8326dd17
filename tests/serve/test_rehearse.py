"""What is learned from a rehearsal, and how a machine that changes is seen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.random import generator  # noqa: E402
from shoal.cost.serving.simulator import ServedRequest, simulate  # noqa: E402
from shoal.cost.step_cost.fitted import FittedStepCost, StepSample  # noqa: E402
from shoal.ir import Arrival, SchedulerLimits, ServeJob  # noqa: E402
from shoal.plan.batching.cache.paged import Paged  # noqa: E402
from shoal.plan.batching.schedulers.fcfs import Fcfs  # noqa: E402
from shoal.serve.bench.rehearse import MachineSpeed, learned, opening, others, spread_of  # noqa: E402
from shoal.serve.bench.replay import replay, weights_of  # noqa: E402
from shoal.serve.engine.build import concrete, engine_of  # noqa: E402

LINE = FittedStepCost(step=2e-3, token=1e-4, prompt_pair=1e-7, decode_key=1e-6, chunk=1e-5)


def samples(factor: float, count: int, seed: int) -> list[StepSample]:
    draw = generator(seed, purpose="test rehearsal")
    shapes = [((int(draw.integers(0, 300)), 1 + i % 7),) * (1 + i % 5) for i in range(count)]
    return [StepSample(chunks=one, seconds=factor * LINE.seconds(one)) for one in shapes]


def test_the_rehearsal_is_met_in_sum_and_the_profile_in_shape() -> None:
    steps, profiled = samples(1.5, 60, 0), samples(1.0, 60, 1)
    line = learned(steps, profiled)
    assert sum(line.seconds(one.chunks) for one in steps) == pytest.approx(
        sum(one.seconds for one in steps)
    )
    long = ((0, 200),)
    assert line.seconds(long) == pytest.approx(1.5 * LINE.seconds(long), rel=0.1)


def test_too_few_steps_say_nothing_of_their_sum() -> None:
    profiled = samples(1.0, 60, 1)
    line = learned(samples(9.0, 1, 0), profiled)
    assert line.seconds(((10, 1),)) == pytest.approx(LINE.seconds(((10, 1),)), rel=0.2)


def test_others_have_the_same_lengths_and_as_much_in_common() -> None:
    given = [Arrival(0.0, (1, 2, 9), 4, "s"), Arrival(1.5, (1, 2, 3, 4), 2)]
    result = others(given, 10)
    assert [(one.at, len(one.prompt), one.output_tokens, one.session) for one in result] == [
        (0.0, 3, 4, "s"),
        (1.5, 4, 2, ""),
    ]
    assert result[0].prompt == (2, 3, 0)
    assert result[0].prompt[:2] == result[1].prompt[:2]
    assert not any(a.prompt[0] == b.prompt[0] for a, b in zip(given, result, strict=True))


def test_the_opening_ends_before_the_first_that_is_late() -> None:
    ends = [1.0, 0.5, 3.0, 2.0]
    served = [ServedRequest(str(n), 0.0, 1, finish=end) for n, end in enumerate(ends)]
    assert [opening(served, s) for s in (0.0, 1.0, 2.5, 3.0)] == [0, 2, 2, 4]
    assert opening([ServedRequest("0", 0.0, 1)], 9.0) == 0  # it never ended


def test_steps_are_recorded_as_they_were() -> None:
    limits = SchedulerLimits(max_running=4, max_step_tokens=32, max_position=64)
    job = ServeJob(model="shoal-0.3m", threads=1, max_running=4, max_step_tokens=32)
    job = job.model_copy(update={"kv_tokens": 256, "max_position": 64})
    model, _ = weights_of(job)
    engine, _, runner = engine_of(concrete(job, model.config, model.embed.weight.dtype), model)
    arrivals = [Arrival(0.0, tuple(range(10 * n, 10 * n + 10)), 3) for n in range(6)]
    steps: list[StepSample] = []
    replay(engine, arrivals, steps=steps)
    plan = simulate(Fcfs().build(Paged().build(256), limits), LINE, arrivals)
    assert [len(one.chunks) for one in steps] == [one.requests for one in plan.steps]
    assert all(one.seconds > 0 for one in steps)
    pulse = MachineSpeed(runner, seconds=0.0)
    assert pulse.take()[0] > 0
    assert 0 <= pulse.take()[1] <= 1


def test_a_machine_that_changed_is_seen() -> None:
    assert spread_of([1.0, 1.2, 1.1]) == pytest.approx(0.2)

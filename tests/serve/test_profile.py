"""Shapes of steps, and their times."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.cost.step_cost.fitted import fit  # noqa: E402
from shoal.ir import SchedulerLimits  # noqa: E402
from shoal.serve.bench.profile import profile, spread  # noqa: E402


@pytest.mark.parametrize("running", [1, 3, 64])
@pytest.mark.parametrize(("tokens", "position"), [(8, 64), (512, 2048), (512, 300)])
def test_shapes_are_steps_that_can_be_planned(running, tokens, position):
    limits = SchedulerLimits(max_running=running, max_step_tokens=tokens, max_position=position)
    shapes = spread(limits, 8192)
    assert len(shapes) == len(set(shapes)) >= 10
    for shape in shapes:
        assert sum(length for _, length in shape) <= tokens
        assert all(start >= 0 and length >= 1 for start, length in shape)
        assert all(start + length <= position for start, length in shape)
        assert sum(start + length for start, length in shape) <= 8192
    decodes = [shape for shape in shapes if all(length == 1 for _, length in shape)]
    assert max(map(len, decodes)) == min(running, tokens)
    assert {1} <= set(map(len, decodes))
    assert any(length > 1 and start for shape in shapes for start, length in shape)
    assert spread(limits, 8192) == shapes


class Ticks:
    """A clock that moves by itself: every look costs 0.5 s."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.5
        return self.now


def test_every_shape_is_timed_and_the_cache_stays_as_it_is(random_model, engine_for):
    engine = engine_for(random_model("mixtral"), kv_tokens=1024, max_position=256)
    cache = engine.runner.cache
    cache.stores[0].fill_(3.0)
    limits = SchedulerLimits(max_running=4, max_step_tokens=48, max_position=256)
    shapes = spread(limits, 1024)
    seen = []
    samples = profile(
        engine.runner, shapes, seconds=0.0, clock=Ticks(), progress=lambda *a: seen.append(a)
    )
    assert [sample.chunks for sample in samples] == shapes
    assert {sample.seconds for sample in samples} == {0.5}
    assert [done for done, _, _ in seen] == [1, 2, 3]
    assert bool((cache.stores[0] == 3.0).all())
    cost = fit(samples)
    assert cost.seconds(shapes[0]) == pytest.approx(0.5, rel=0.01)


def test_nothing_to_measure(random_model, engine_for):
    with pytest.raises(ServeError, match="larger kv_tokens"):
        profile(engine_for(random_model()).runner, [])

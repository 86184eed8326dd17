"""The engine: free energy, annealing, what is left out, and processes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice, table
from shoal.fields.data.sparse_coding.engine import (
    CodingBlocks,
    LearningSettings,
    begin,
    learn,
    spread,
)
from shoal.fields.data.sparse_coding.inputs import bars, bars_of
from shoal.fields.data.sparse_coding.protocols import SparseCodeError
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.fields.data.sparse_coding.states import StateSpace

MODELS = ("bsc", "tsc", "dsc", "mca", "mmca", "gsc")
PLAIN = AnnealSchedule(temperature=((0.0, 1.0),), noise=((0.0, 0.0),), cut=((0.0, 0.0),))


def learned(
    name, data, components, *, candidates, active, schedule=PLAIN, iterations=30, restarts=1, **more
):
    model = table("superposition").build(name)
    space = StateSpace(components, candidates, active, model.values)
    setting = LearningSettings(iterations, schedule, 3, float(data.std()), restarts)
    state = begin(model, space, data, setting)
    given = {"pool": None, "workers": 1, **more}
    with spread(model, space, data, **given) as (sizes, expect):
        return learn(model, space, state, setting, sizes, expect)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("active", [6, 3])
def test_the_free_energy_does_not_decrease(name, active) -> None:
    """With all states, and with few active causes of all components."""
    data = bars_of(table("superposition").build(name), 150, edge=3)
    energy = learned(name, data, 6, candidates=6, active=active).free_energy
    assert len(energy) == 30
    assert np.diff(energy).min() >= -1e-9 * abs(energy[0])
    assert energy[-1] > energy[0] + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bars_are_learned(name) -> None:
    """Small ones, of the model's own kind, from a seed that is not chosen."""
    model = table("superposition").build(name)
    data = bars_of(model, 600, edge=4)
    schedule = AnnealSchedule.usual(16)
    energies = learned(
        name, data, 8, candidates=6, active=3, schedule=schedule, iterations=60, restarts=6
    )
    W, truth = energies.params["W"], bars(4, signed=model.signed)
    fit = np.abs(np.corrcoef(W, truth)[:8, 8:])
    rows, columns = linear_sum_assignment(-fit)
    assert (fit[rows, columns] > 0.95).sum() >= 7


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("name", ["bsc", "mca", "gsc"])
def test_two_processes_give_what_one_gives(name) -> None:
    data = bars_of(table("superposition").build(name), 203, edge=3)
    given = {"candidates": 5, "active": 3, "schedule": AnnealSchedule(), "iterations": 12}
    one = learned(name, data, 6, **given)
    two = learned(name, data, 6, **given, pool=Choice(name="local"), workers=2)
    for key, value in one.params.items():
        assert two.params[key] == pytest.approx(value, rel=1e-8), key
    assert two.free_energy == pytest.approx(one.free_energy, rel=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_points_that_are_left_out_do_not_count(name) -> None:
    model = table("superposition").build(name)
    data = bars_of(model, 60, edge=3)
    space = StateSpace(6, 4, 2, model.values)
    params = model.start(data.mean(0), data.var(0), 6, 0)
    keep = np.arange(60) % 3 > 0
    ((_, some),) = CodingBlocks(model, space, [data]).expect(params, 1.5, [keep])
    ((_, alone),) = CodingBlocks(model, space, [data[keep]]).expect(params, 1.5, [None])
    for key, value in alone.items():
        assert some[key] == pytest.approx(value, rel=1e-9, abs=1e-9), key


def test_a_cause_that_is_never_active_keeps_its_component() -> None:
    for name in MODELS:
        model = table("superposition").build(name)
        data = bars_of(model, 80, edge=3)
        params = model.start(data.mean(0), data.var(0), 6, 0)
        params["W"][2] = 1e6  # far from all data
        space = StateSpace(6, 6, 2, model.values)
        ((_, sums),) = CodingBlocks(model, space, [data]).expect(params, 1.0, [None])
        after = model.maximize(sums, params, space, 1.0)
        assert np.isfinite(np.concatenate([value.ravel() for value in after.values()])).all()
        assert after["W"][2] == pytest.approx(params["W"][2], rel=0.3)


def test_schedules() -> None:
    schedule = AnnealSchedule()
    assert schedule.at(0.0)[0] == 2.0
    assert schedule.at(0.35)[0] == pytest.approx(1.5)
    assert schedule.at(0.7)[0] == schedule.at(1.0)[0] == 1.0
    assert schedule.at(0.95)[1] == 0.0
    assert schedule.at(1 / 3)[2] == pytest.approx(0.5)
    assert AnnealSchedule.usual(2000).at(0.0)[0] == 8.0
    given = AnnealSchedule.usual(10, {"temperature": [[0, 5], [1, 1]]})
    assert given.at(0.5) == (3.0, *schedule.at(0.5)[1:])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": []}, "ascending"),
        ({"temperature": [[0.5, 2], [0.2, 1]]}, "ascending"),
        ({"temperature": [[0, 0.5]]}, "at least 1"),
        ({"cut": [[0, 2]]}, "at most 1"),
        ({"noise": [[0, -1]]}, "noise"),
        ({"noise": [[2, 1]]}, "noise"),
        ({"heat": [[0, 1]]}, "heat: no such key"),
    ],
)
def test_schedules_that_cannot_be(given, said) -> None:
    with pytest.raises(ConfigError, match=said):
        AnnealSchedule.usual(10, given)


def test_what_overflows_is_said() -> None:
    data = np.full((20, 3), 1e200) * np.random.default_rng(0).normal(size=(20, 3))
    with pytest.raises(SparseCodeError, match="free energy is"), np.errstate(all="ignore"):
        learned("bsc", data, 3, candidates=3, active=2, iterations=3)

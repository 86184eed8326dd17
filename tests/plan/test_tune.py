"""Tuners: they find, they learn from failures, they never repeat; Shapley values add up."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.core.random import generator
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.tune import TUNERS
from shoal.plan.tune.bayes import Bayes, penalised
from shoal.plan.tune.exhaustive import Exhaustive
from shoal.plan.tune.protocols import Axis, Config, SearchSpace, Trial, TrialOutcome, TuningResult
from shoal.plan.tune.random import Random
from shoal.plan.tune.shapley import explain, shapley
from shoal.plan.tune.surrogate import GaussianProcess, fit_surrogate
from shoal.plan.tune.training import TrainingObjective, training_space

SPACE = SearchSpace(
    axes=(
        Axis(name="x", values=tuple(range(1, 17))),
        Axis(name="y", values=(1, 2, 4, 8, 16, 32)),
        Axis(name="flag", values=(False, True)),
        Axis(name="kind", values=("a", "b", "c")),
    )
)


def hill(config: Config) -> TrialOutcome:
    """The best works only just: x above 11 with large y is out of memory."""
    x, y = float(config["x"]), math.log2(float(config["y"]))
    if x + 2 * y > 18:
        return TrialOutcome(failure="out of memory")
    return TrialOutcome(value=10 + x - 0.5 * (y - 3) ** 2 + 2 * bool(config["flag"]))


each_tuner = pytest.mark.parametrize("name", list(TUNERS))


@each_tuner
def test_tries_nothing_twice_and_says_what_failed(name: str) -> None:
    study = TUNERS.build(name).tune(SPACE, hill, 40, seed=3)
    rows = [SPACE.row(trial.config) for trial in study.trials]
    assert len(set(rows)) == len(rows)
    assert len(rows) == (SPACE.size if name == "exhaustive" else 40)
    assert any(trial.failure == "out of memory" for trial in study.trials)
    assert study.best.value is not None
    assert hill(study.best.config).value == study.best.value
    assert TUNERS.build(name).tune(SPACE, hill, 40, seed=3) == study


def told(config: Config) -> TrialOutcome:
    """The same hill, which also says by how much a configuration is out of memory."""
    result = hill(config)
    need = (float(config["x"]) + 2 * math.log2(float(config["y"]))) / 18
    return result.model_copy(update={"excess": math.log(need)})


@pytest.mark.parametrize(("objective", "least"), [(hill, 0.9), (told, 0.97)])
@pytest.mark.slow
def test_bayes_beats_random(objective: Callable[[Config], TrialOutcome], least: float) -> None:
    top = Exhaustive().tune(SPACE, hill, 1).best.value
    assert top is not None
    shares: dict[str, list[float]] = {"bayes": [], "random": []}
    for seed, name in itertools.product(range(3), shares):
        result = TUNERS.build(name).tune(SPACE, objective, 40, seed=seed).best.value
        shares[name].append((result or 0.0) / top)
    assert min(shares["bayes"]) > least
    assert np.mean(shares["bayes"]) > np.mean(shares["random"])


def test_failures_count_as_the_worst_that_was_seen() -> None:
    trials = [
        Trial(config={"x": 1}, value=3.0),
        Trial(config={"x": 2}, failure="no"),
        Trial(config={"x": 3}, value=-2.0),
    ]
    assert penalised(trials).tolist() == [3.0, -2.0, -2.0]


def test_bayes_learns_where_it_fails() -> None:
    def narrow(config: Config) -> TrialOutcome:
        if float(config["x"]) > 6:
            return TrialOutcome(failure="too large")
        return TrialOutcome(value=float(config["x"]))

    study = Bayes(starts=16).tune(SPACE, narrow, 48, seed=0)
    early = sum(trial.value is None for trial in study.trials[:16])
    late = sum(trial.value is None for trial in study.trials[32:])
    assert early > 6
    assert late < early / 2
    assert study.best.value == 6


def test_starts_are_random_and_history_counts() -> None:
    plain = Random().tune(SPACE, hill, 16, seed=5)
    study = Bayes().tune(SPACE, hill, 20, seed=5)
    assert study.trials[:16] == plain.trials
    again = Bayes().tune(SPACE, hill, 24, seed=5, history=study.trials)
    assert again.trials[:20] == study.trials
    assert len({SPACE.row(trial.config) for trial in again.trials}) == 24


def test_several_at_a_time() -> None:
    said: list[int] = []
    study = Bayes(parallel=4).tune(
        SPACE, hill, 30, seed=1, progress=lambda done, total, text: said.append(done)
    )
    assert len({SPACE.row(trial.config) for trial in study.trials}) == 30
    assert said == [4, 8, 12, 16, 20, 24, 28, 30]


def test_forest_as_surrogate() -> None:
    study = Bayes(surrogate="forest", starts=12).tune(SPACE, hill, 14, seed=0)
    assert len(study.trials) == 14
    assert explain(study, surrogate="forest")


def test_small_space_is_exhausted() -> None:
    small = SearchSpace(axes=(Axis(name="x", values=(1, 2, 3)),))
    for name in TUNERS:
        study = TUNERS.build(name).tune(small, lambda c: float(c["x"]), 10, seed=0)
        assert study.best.config == {"x": 3}
        assert len(study.trials) == 3


@each_tuner
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_number_is_a_failure(name: str, value: float) -> None:
    def objective(config: Config) -> float:
        return value if config["flag"] else float(config["x"])

    study = TUNERS.build(name).tune(SPACE, objective, 30, seed=0)
    assert study.best.config["flag"] is False
    assert any("no finite number" in trial.failure for trial in study.trials)


@each_tuner
def test_nothing_feasible(name: str) -> None:
    study = TUNERS.build(name).tune(SPACE, lambda c: TrialOutcome(failure="too large"), 20, seed=0)
    with pytest.raises(PlanError, match="times: too large"):
        _ = study.best


@each_tuner
def test_bad_input(name: str) -> None:
    tuner = TUNERS.build(name)
    with pytest.raises(ConfigError, match=r"tune\.trials = 0"):
        tuner.tune(SPACE, hill, 0)
    trial = Trial(config=SPACE.config((0, 0, 0, 0)), value=1.0)
    with pytest.raises(ConfigError, match="trial 2 repeats trial 1"):
        tuner.tune(SPACE, hill, 5, history=(trial, trial))
    with pytest.raises(ConfigError, match=r"tune\.x = 99"):
        tuner.tune(SPACE, hill, 5, history=(Trial(config={**trial.config, "x": 99}, value=1.0),))


def test_spaces_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"tune\.x"):
        Axis(name="x", values=())
    with pytest.raises(ConfigError, match=r"tune\.x"):
        Axis(name="x", values=(1, 1))
    with pytest.raises(ConfigError, match=r"tune\.axes"):
        SearchSpace(axes=())
    with pytest.raises(PlanError, match="at most 100 configurations"):
        Exhaustive(most=100).tune(SPACE, hill, 1)
    with pytest.raises(ConfigError, match="give a value, or the reason"):
        TrialOutcome()


def test_gaussian_process_goes_through_what_it_saw() -> None:
    random = generator(0, purpose="test gp")
    seen = random.random((30, 2))
    values = np.sin(5 * seen[:, 0]) + seen[:, 1]
    fit = GaussianProcess.fit(seen, values)
    middle, doubt = fit.predict(seen)
    np.testing.assert_allclose(middle, values, atol=0.05)
    request = random.random((20, 2))
    result, _ = fit.predict(request)
    np.testing.assert_allclose(result, np.sin(5 * request[:, 0]) + request[:, 1], atol=0.3)
    far = fit.predict(np.array([[5.0, 5.0]]))[1]
    assert far[0] > 3 * doubt.max()


FUNCTIONS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda x: x @ np.array([1.0, -2.0, 3.0]),
    lambda x: x[:, 0] * x[:, 1] + np.exp(x[:, 2]),
    lambda x: np.maximum(x[:, 0], x[:, 1] * x[:, 2]),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shapley_values_add_up(function: Callable[[np.ndarray], np.ndarray]) -> None:
    random = generator(1, purpose="test shapley")
    points, background = random.random((6, 3)), random.random((9, 3))
    values = shapley(function, points, background)
    total = function(points) - function(background).mean()
    np.testing.assert_allclose(values.sum(axis=1), total, atol=1e-9)


def test_shapley_of_a_sum_and_of_symmetry() -> None:
    random = generator(2, purpose="test shapley")
    points, background = random.random((4, 3)), random.random((5, 3))
    weights = np.array([1.0, -2.0, 0.0])
    values = shapley(lambda x: x @ weights, points, background)
    np.testing.assert_allclose(values, weights * (points - background.mean(axis=0)), atol=1e-12)
    same = np.array([[1.0, 1.0, 0.0]])
    values = shapley(lambda x: x[:, 0] * x[:, 1], same, np.zeros((1, 3)))
    np.testing.assert_allclose(values, [[0.5, 0.5, 0.0]], atol=1e-12)


def test_shapley_refuses_what_would_take_forever() -> None:
    with pytest.raises(ConfigError, match="at most 7 axes"):
        shapley(lambda x: x[:, 0], np.zeros((1, 8)), np.zeros((1, 8)))
    with pytest.raises(ConfigError, match=r"tune\.background"):
        shapley(lambda x: x[:, 0], np.zeros((1, 2)), np.zeros((0, 2)))


def test_explains_what_made_the_difference() -> None:
    study = Exhaustive().tune(SPACE, lambda c: float(c["x"]) + bool(c["flag"]), 1)
    explanation = explain(study.model_copy(update={"trials": study.trials[::13]}))
    assert [one.axis for one in explanation[:2]] == ["x", "flag"]
    assert explanation[1].by_value["True"] > explanation[1].by_value["False"]
    assert {one.axis for one in explanation} == set(SPACE.names)


def test_surrogates_are_chosen_by_name() -> None:
    seen = generator(0).random((20, 2))
    for kind in ("gp", "forest"):
        middle, doubt = fit_surrogate(kind, seen, seen[:, 0]).predict(seen)  # type: ignore[arg-type]
        assert np.corrcoef(middle, seen[:, 0])[0, 1] > 0.95
        assert (doubt > 0).all()


@pytest.fixture(scope="module")
def objective() -> TrainingObjective:
    return TrainingObjective(
        TrainJob(model="GPT-3 175B", seq_len=2048, precision="bf16"), load("16xFrontier")
    )


def test_training_is_priced_as_the_planners_price_it(objective: TrainingObjective) -> None:
    space = training_space(objective.shape, objective.machine)
    assert "nodes" in space.names
    config = {
        "nodes": 16,
        "tp": 8,
        "pp": 16,
        "vpp": 1,
        "microbatch": 1,
        "accumulate": 32,
        "shard": "zero1",
        "recompute": "full",
    }
    job, cost = objective.price(config)
    assert (job.parallel.dp, job.parallel.world, job.global_batch) == (1, 128, 32)
    result = objective(config)
    assert result.value is not None
    assert result.value == pytest.approx(cost.flops / cost.step_s.value / 128 / 1e12)
    assert 0.05 < objective.utilisation(job, cost) < 0.6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tp": 1, "pp": 1, "recompute": "none"}, "out of memory"),
        ({"pp": 5}, "does not divide 128 devices"),
        ({"tp": 1, "pp": 1, "vpp": 2}, "vpp above 1 needs"),
        ({"pp": 16, "vpp": 2, "accumulate": 24}, "a multiple of pp"),
        ({"pp": 16, "vpp": 4}, "does not divide 96 blocks"),
    ],
)
def test_what_fails_says_why(
    objective: TrainingObjective, change: dict[str, object], reason: str
) -> None:
    usual = {
        "nodes": 16,
        "tp": 8,
        "pp": 16,
        "vpp": 1,
        "microbatch": 1,
        "accumulate": 32,
        "shard": "replicated",
        "recompute": "full",
    }
    assert reason in objective({**usual, **change}).failure  # type: ignore[dict-item]


def test_infeasible_is_never_returned(objective: TrainingObjective) -> None:
    space = training_space(objective.shape, objective.machine)
    study = Bayes().tune(space, objective, 40, seed=0)
    assert study.best.value == objective(study.best.config).value
    assert any(trial.value is None for trial in study.trials)
    assert TuningResult.model_validate(study.model_dump()) == study


def test_axes_are_checked(objective: TrainingObjective) -> None:
    with pytest.raises(ConfigError, match=r"tune\.fix = 'tpp'"):
        training_space(objective.shape, objective.machine, {"tpp": (1,)})
    with pytest.raises(ConfigError, match="a value of every axis"):
        objective.price({"tp": 1})
    with pytest.raises(PlanError, match="1 to the 16 nodes"):
        objective.machine_of(17)

"""Tuning of serving engines: searchers on known landscapes, intervals, noise, what fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from shoal.core.errors import ConfigError, PlanError, UnknownKeyError
from shoal.core.random import generator
from shoal.ir import Arrival, ServeJob
from shoal.plan.tune import TUNERS
from shoal.plan.tune.bayes import Bayes
from shoal.plan.tune.exhaustive import Exhaustive
from shoal.plan.tune.halving import Halving
from shoal.plan.tune.landscape import Landscape, transfer_gain
from shoal.plan.tune.landscape_page import page, tables
from shoal.plan.tune.protocols import Axis, Config, SearchSpace, Trial, TrialOutcome, TuningResult
from shoal.plan.tune.repeats import Repeats
from shoal.plan.tune.serving import (
    ServingObjective,
    ServingSample,
    job_of,
    serving_space,
    tune_serving,
)

SPACE = SearchSpace(
    axes=(
        Axis(name="max_running", values=(1, 2, 4, 8, 16, 32, 64)),
        Axis(name="max_step_tokens", values=(64, 128, 256, 512, 1024)),
    )
)
# Two peaks: a broad one and a higher, narrow one.
PEAKS = [
    {"max_running": 16, "max_step_tokens": 512},
    {"max_running": 2, "max_step_tokens": 128},
]


def known(config: Config) -> float:
    """Tokens per second without noise."""
    x = math.log2(float(config["max_running"]))
    y = math.log2(float(config["max_step_tokens"])) - 6
    high = 120 * math.exp(-((x - 4) ** 2 + (y - 3) ** 2) / 2.5)
    return 60 + high + 70 * math.exp(-((x - 1) ** 2 + (y - 1) ** 2) / 1.2)


def true_peaks() -> list[Config]:
    land = Landscape(SPACE, {SPACE.row(c): (known(c),) for c in SPACE.configs()})
    return [
        SPACE.config(row)
        for row in land.samples
        if all(land.level[row] > land.level[other] for other in land._neighbours(row))
    ]


class Noisy:
    """A runner of the known landscape, with noise of so many per cent."""

    def __init__(self, percent: float = 2.0, seed: int = 0) -> None:
        self.percent, self.random = percent, generator(seed, purpose="test noise")
        self.sizes: list[int] = []

    def measure(self, config: Config, workload: Sequence[Arrival], seconds: float) -> ServingSample:
        self.sizes.append(len(workload))
        if float(config["max_running"]) * float(config["max_step_tokens"]) > 32 * 512:
            return ServingSample(seconds=0.1, failed="out of memory")
        noise = 1 + self.percent / 100 * self.random.standard_normal()
        return ServingSample(throughput=known(config) * noise, latency_s={"95": 2.0}, seconds=0.1)


WORKLOAD = [Arrival(0.1 * n, (1, 2, 3), 4) for n in range(18)]


def objective(**fields: object) -> ServingObjective:
    return ServingObjective(**{"runner": Noisy(), "workload": WORKLOAD, **fields})  # type: ignore[arg-type]


def test_the_known_landscape_has_its_peaks() -> None:
    assert sorted(map(str, true_peaks())) == sorted(map(str, PEAKS))


@pytest.mark.parametrize("name", list(TUNERS))
def test_searchers_report_true_peaks_only(name: str) -> None:
    study = tune_serving(TUNERS.build(name), SPACE, objective(), SPACE.size, seed=1)
    assert study.best.config == PEAKS[0]
    # Halving measures few wholly, so it may name the best alone.
    assert Landscape.of(study).peaks() == ([] if name == "halving" else PEAKS)
    assert any(trial.failure == "out of memory" for trial in study.trials)


@pytest.mark.parametrize("name", list(TUNERS))
def test_same_seed_same_sequence(name: str) -> None:
    first, second, other = (
        tune_serving(TUNERS.build(name), SPACE, objective(), 20, seed=seed) for seed in (3, 3, 4)
    )
    assert first == second
    assert name == "exhaustive" or first.trials != other.trials


def test_noise_is_not_called_rugged() -> None:
    flat = SearchSpace(
        axes=(Axis(name="x", values=tuple(range(6))), Axis(name="y", values=(1, 2, 3, 4)))
    )
    wrong = 0
    for seed in range(60):
        draw = generator(seed, purpose="test flat")
        land = Landscape(
            flat,
            {flat.row(c): tuple(np.exp(0.05 * draw.standard_normal(3))) for c in flat.configs()},
        )
        wrong += bool(land.peaks() or land.turns())
    assert wrong <= 8  # two questions of 5 % each; 9 or more of 60 has a chance of 0.1 %
    once = Landscape(SPACE, {SPACE.row(c): (known(c),) for c in SPACE.configs()})
    assert not once.peaks()
    assert not once.turns()


def test_turns_are_where_the_line_turns() -> None:
    line = SearchSpace(axes=(Axis(name="batch", values=(1, 2, 4, 8, 16)),))
    values = (10.0, 20.0, 20.0, 12.0, 30.0)
    samples = {(n,): (v * 0.999, v, v * 1.001) for n, v in enumerate(values)}
    turns = Landscape(line, samples).turns()
    assert [(turn.config["batch"], turn.peak) for turn in turns] == [(4, True), (8, False)]
    rising = {(n,): (v * 0.999, v, v * 1.001) for n, v in enumerate(sorted(values))}
    assert not Landscape(line, rising).turns()


def test_a_peak_beside_a_failure_is_one() -> None:
    line = SearchSpace(axes=(Axis(name="batch", values=(1, 2, 4)),))
    samples = {(0,): (10.0, 10.1), (1,): (20.0, 20.1)}
    assert not Landscape(line, samples).peaks()
    assert Landscape(line, samples, frozenset({(2,)})).peaks() == [{"batch": 2}]


def test_effects_of_a_known_sum_and_product() -> None:
    pytest.importorskip("sklearn")
    space = SearchSpace(axes=tuple(Axis(name=n, values=(1, 2, 3, 4)) for n in "abc"))
    draw = dict(zip((1, 2, 3, 4), (-1.5, -0.5, 0.5, 1.5), strict=True))
    alone = {space.row(c): (math.exp(draw[c["a"]]),) for c in space.configs()}  # type: ignore[index]
    effects = Landscape(space, alone).effects()
    assert effects[("a",)] > 0.97
    both = {
        space.row(c): (math.exp(draw[c["a"]] * draw[c["b"]]),)  # type: ignore[index]
        for c in space.configs()
    }
    effects = Landscape(space, both).effects()
    assert next(iter(effects)) == ("a", "b")
    assert effects[("a", "b")] > 0.6
    assert sum(effects.values()) <= 1 + 1e-9


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_the_interval_covers_the_mean(spread: float) -> None:
    draw = generator(0, purpose=f"test coverage {spread}")
    rule = Repeats(width=0.05, first=3, most=40)
    runs = [rule.measure(lambda: float(1 + spread * draw.standard_normal())) for _ in range(1500)]
    covered = np.mean([abs(run.mean - 1) <= run.half for run in runs])
    # 95 % within 4 standard errors; where two stages are one, the width has its own say.
    assert covered >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / 1500)
    enough = [run for run in runs if len(run.samples) < 40]
    assert all(run.width < 0.056 for run in enough) or spread > 0.1
    numbers = [len(run.samples) for run in runs]
    assert min(numbers) == 3
    assert max(numbers) <= 40


def test_more_noise_more_repeats() -> None:
    numbers = []
    for percent in (0.2, 4.0):
        runner = Noisy(percent)
        objective(runner=runner)(SPACE.config((2, 2)))
        numbers.append(len(runner.sizes))
    assert numbers[0] == 3 < numbers[1]


def test_a_failure_is_measured_once_and_penalised() -> None:
    runner = Noisy()
    outcome = objective(runner=runner)({"max_running": 64, "max_step_tokens": 1024})
    assert outcome.failure == "out of memory"
    assert len(runner.sizes) == 1


def test_halving_asks_for_parts_first() -> None:
    runner = Noisy()
    study = Halving(factor=3, least=1 / 9).tune(SPACE, objective(runner=runner), 27, seed=0)
    assert sorted(set(runner.sizes)) == [2, 6, 18]
    whole = [trial for trial in study.trials if trial.share >= 1]
    assert len(whole) == 3
    assert study.best in whole
    assert len(study.trials) == 27
    plain = Halving().tune(SPACE, known, 9, seed=0)
    assert {trial.share for trial in plain.trials} == {1.0}


@pytest.mark.slow
def test_bayes_needs_fewer_than_random() -> None:
    top = max(map(known, SPACE.configs()))
    needed: dict[str, list[int]] = {"bayes": [], "random": []}
    for seed, name in itertools.product(range(5), needed):
        options = {"starts": 5} if name == "bayes" else {}
        tuner = TUNERS.build({"name": name, **options})
        study = tuner.tune(SPACE, objective(runner=Noisy(seed=seed)), SPACE.size, seed=seed)
        good = [known(trial.config) >= 0.95 * top for trial in study.trials]
        needed[name].append(good.index(True) + 1)
    assert np.median(needed["bayes"]) <= 0.4 * SPACE.size
    assert np.median(needed["bayes"]) < np.median(needed["random"])


@pytest.mark.parametrize("name", ["bayes", "random", "halving"])
def test_another_machines_best_come_first(name: str) -> None:
    elsewhere = [Trial(config=c, value=known(c)) for c in SPACE.configs()]
    elsewhere += [Trial(config={"max_running": 3, "max_step_tokens": 64}, value=1e9)]
    elsewhere += [Trial(config=SPACE.config((6, 4)), failure="no")]
    study = TUNERS.build(name).tune(SPACE, known, 6, seed=0, elsewhere=elsewhere)
    ranked = sorted(SPACE.configs(), key=lambda c: -known(c))
    assert [trial.config for trial in study.trials[:4]] == ranked[:4]
    assert len({SPACE.row(trial.config) for trial in study.trials}) == 6


def test_bayes_takes_the_noise_into_account() -> None:
    lucky = Trial(config={"x": 5}, value=12.0, samples=(4.0, 20.0))
    assert lucky.doubt == pytest.approx(64.0)
    assert Trial(config={"x": 5}, value=12.0).doubt == 0.0
    space = SearchSpace(axes=(Axis(name="x", values=tuple(range(1, 20))),))

    def measured(config: Config) -> TrialOutcome:
        x = float(config["x"])
        return TrialOutcome(value=10 - (x - 12) ** 2 / 10, samples=(1.0, 2.0))

    study = Bayes(starts=4).tune(space, measured, 12, seed=0)
    assert study.best.config == {"x": 12}


def test_time_that_is_over_ends_the_search() -> None:
    now = itertools.count()
    spent = objective(until=30.0, clock=lambda: float(next(now)))
    study = tune_serving(Bayes(starts=4), SPACE, spent, 64, name="bayes", seed=0)
    assert 3 <= len(study.trials) < 15
    assert study.tuner == "bayes"
    with pytest.raises(PlanError, match="none was made"):
        tune_serving(Bayes(), SPACE, objective(until=-1.0), 64)


def test_goals() -> None:
    sample = ServingSample(throughput=5.0, latency_s={"95": 0.5}, ttft_s={"95": 0.25})
    assert [sample.value(goal) for goal in ("throughput", "latency", "ttft")] == [5.0, 2.0, 4.0]
    with pytest.raises(ConfigError, match=r"tune\.goal = 'ttft'"):
        ServingSample(latency_s={"95": 0.5}).value("ttft")
    assert objective(goal="latency")(SPACE.config((0, 0))).value == 0.5


def test_transfer_gain_of_known_landscapes() -> None:
    line = SearchSpace(axes=(Axis(name="batch", values=(1, 2, 4)),))
    home = Landscape(line, {(0,): (1.0,) * 4, (1,): (2.0,) * 4, (2,): (3.0,) * 4})
    away = Landscape(line, {(0,): (1.0,) * 4, (1,): (3.3,) * 4, (2,): (3.0,) * 4})
    assert transfer_gain(home, away) == pytest.approx([0.1] * 4)
    assert transfer_gain(home, home) == pytest.approx([0.0] * 4)
    with pytest.raises(ConfigError, match="2 or more"):
        transfer_gain(home, Landscape(line, {(0,): (1.0,)}))
    with pytest.raises(PlanError, match="worked on both"):
        transfer_gain(Landscape(line, {(1,): (1.0, 1.0)}), Landscape(line, {(0,): (1.0, 1.0)}))


def test_the_best_by_luck_gains_nothing() -> None:
    gains = []
    for seed in range(40):
        draw = generator(seed, purpose="test luck")
        home, away = (
            Landscape(
                SPACE,
                {
                    SPACE.row(c): tuple(np.exp(0.1 * draw.standard_normal(4)))
                    for c in SPACE.configs()
                },
            )
            for _ in range(2)
        )
        gains += transfer_gain(home, away)
    assert abs(np.mean(gains)) < 0.04


def test_knobs_go_into_the_job() -> None:
    job = ServeJob(model="shoal-0.3m", kv_tokens=512)
    config = {"max_running": 3, "block_size": 8, "chunked": False, "threads": 2}
    result = job_of(job, config)
    assert (result.max_running, result.threads, result.kv_tokens) == (3, 2, 512)
    assert result.kv.options == {"block_size": 8}
    assert result.scheduler.options == {"chunked": False}
    assert serving_space({"threads": (1, 2)}).names[-1] == "threads"


def test_bad_input() -> None:
    with pytest.raises(UnknownKeyError, match="did you mean 'max_running'"):
        serving_space({"max_runing": (1,)})
    with pytest.raises(ConfigError, match=r"tune\.threads"):
        serving_space({"threads": ()})
    with pytest.raises(ConfigError, match=r"tune\.config = 'knob'"):
        job_of(ServeJob(model="shoal-0.3m"), {"knob": 1})
    with pytest.raises(ConfigError, match=r"tune\.workload"):
        objective(workload=[])
    with pytest.raises(ConfigError, match=r"repeats\.most = 2"):
        Repeats(first=3, most=2)

    class Broken:
        def measure(
            self, config: Config, workload: Sequence[Arrival], seconds: float
        ) -> ServingSample:
            return ServingSample(seconds=1.0, failed="out of memory: 3 GiB")

    with pytest.raises(PlanError, match="20 times: out of memory: 3 GiB"):
        tune_serving(Bayes(), SPACE, objective(runner=Broken()), 20)
    with pytest.raises(PlanError, match="at least one configuration that worked"):
        Landscape(SPACE, {})
    with pytest.raises(ConfigError, match=r"tuner\.halving\.factor = 1"):
        Halving(factor=1)


def test_the_page_says_what_was_found() -> None:
    study = tune_serving(Exhaustive(), SPACE, objective(), 1)
    text = page(study, title="shoal-4m <here>", unit="tokens/s")
    assert "shoal-4m &lt;here&gt;" in text
    assert "max_running = 16, max_step_tokens = 512" in text
    assert text.count("<svg") >= 2
    assert "out of memory" in text
    shown = {one.title: one for one in tables(study, "tokens/s")}
    assert len(shown["Peaks"].rows) == 2
    assert len(shown["Trials"].rows) == SPACE.size
    assert TuningResult.model_validate(study.model_dump()) == study

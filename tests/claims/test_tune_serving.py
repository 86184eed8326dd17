"""The claim about settings of serving, in small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from shoal.claims.experiments import tune_serving
from shoal.claims.experiments.tune_serving import TuneServing, _most
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError
from shoal.plan.tune.landscape import Landscape
from shoal.plan.tune.protocols import Axis, SearchSpace
from shoal.plan.tune.serving import serving_space


@pytest.mark.slow
def test_small_run_has_every_metric_and_fails_as_its_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        "shoal": serving_space(
            {"max_running": (1, 2), "max_step_tokens": (64,), "block_size": (8,)}
        ),
        "generate": SearchSpace(
            axes=(Axis(name="batch", values=(1, 2)), Axis(name="padding", values=("full",)))
        ),
    }
    monkeypatch.setattr(tune_serving, "_SPACES", small)
    monkeypatch.setattr(tune_serving, "_SEARCHES", 4)
    claim = TuneServing(models=("shoal-0.3m",), requests=2, rounds=2)
    context = ExperimentContext(work_dir=tmp_path)
    if claim.refuses(context):
        pytest.skip("one core")
    cores = os.sched_getaffinity(0)
    result = claim.run(context, quick=False)
    assert os.sched_getaffinity(0) == cores
    assert set(result.metrics) == {metric.name for metric in claim.metrics}
    assert len(result.metrics["retuned_vs_moved"].method) == 2 * 2 * 2
    replaced = claim.run(context, quick=False, as_baseline=True)
    assert set(replaced.metrics["retuned_vs_moved"].method) == {1.0}
    verdict = judge(claim.metrics, result, aa=replaced)
    assert {one.name for one in verdict.metrics} == set(result.metrics)


def test_the_most_that_tuning_again_can_give() -> None:
    line = SearchSpace(axes=(Axis(name="batch", values=(1, 2)),))
    home = Landscape(line, {(0,): (1.0,), (1,): (2.0,)})
    away = Landscape(line, {(0,): (3.0,), (1,): (2.0,)})
    assert _most(home, away) == pytest.approx(1.5)
    assert _most(home, home) == pytest.approx(1.0)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"claim\.tune_serving\.rounds = 1"):
        TuneServing(rounds=1)
    with pytest.raises(ConfigError, match=r"claim\.tune_serving\.models"):
        TuneServing(models=())

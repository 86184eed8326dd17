import numpy as np
import pytest

from shoal.claims.experiments.learning_curves import (
    LearningCurves,
    best_curve,
    best_size,
    known_rates,
    planted_share,
)
from shoal.claims.experiments.learning_curves_charlm import (
    ARCHITECTURES,
    VOCAB,
    CharlmSetting,
    read_texts,
    train,
)
from shoal.claims.frame import ClaimRun
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import Choice
from shoal.cost.scaling.curve import CurvePoint


@pytest.fixture(scope="module")
def texts():
    return read_texts(Choice(name="stdlib"), train_chars=2**13, heldout_chars=2**12, seed=0)


@pytest.mark.slow
def test_quick_run_works_and_fails_with_the_baseline(tmp_path):
    claim, context = LearningCurves(), ExperimentContext(work_dir=tmp_path)
    samples = claim.run(context, quick=True)
    replaced = claim.run(context, quick=True, as_baseline=True)
    verdict = judge(claim.metrics, samples, aa=replaced, quick=True)
    assert verdict.status == "modelled", verdict.reason  # planted curves and known rates


@pytest.mark.slow
def test_validation_is_of_other_documents_and_shards_are_nested(texts):
    assert not texts.train_names & texts.heldout_names
    longer = read_texts(Choice(name="stdlib"), train_chars=2**14, heldout_chars=2**12, seed=0)
    assert np.array_equal(longer.train[: 2**13], texts.train)
    assert texts.train.max() < VOCAB


def test_too_little_text_is_an_error():
    with pytest.raises(DataError, match="give more text"):
        read_texts(Choice(name="stdlib"), train_chars=10**10, heldout_chars=10, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_learns(architecture, texts):
    pytest.importorskip("torch")
    setting = CharlmSetting(architecture, 16, 2**13, 0, 1e-2, 40)
    loss, count = train(setting, texts)
    assert loss < 0.9 * np.log(VOCAB) and count > 1000
    assert train(setting, texts) == (loss, count)


def test_best_curve_and_best_size():
    # Losses with a valley at parameters = chars ** 0.7.
    rows = [
        [2.0**k, 2.0**p, 2 - 0.1 * k + 0.01 * (p - 0.7 * k) ** 2, float("nan"), 1.0]
        for k in range(10, 16)
        for p in (6.0, 8.0, 10.0, 12.0)
    ]
    assert best_size(rows) == pytest.approx(0.7, abs=0.01)
    curve = best_curve(rows)
    assert [point.size for point in curve] == [2.0**k for k in range(10, 16)]
    assert curve[0].value == min(row[2] for row in rows if row[0] == 2.0**10)


def test_laws_of_a_made_up_grid(tmp_path):
    rows = [
        [2.0**k, 2.0**p, 3 * 2 ** (-0.1 * k) * (1 + 0.01 * (p - 0.7 * k) ** 2), float("nan"), 1.0]
        for k in range(10, 16)
        for p in (6.0, 8.0, 10.0, 12.0)
    ]
    grid = {"lstm": rows, "transformer": [[*row[:2], 1.1 * row[2], *row[3:]] for row in rows]}
    digits = [CurvePoint(size=2.0**k, value=2 ** (-0.3 * k)) for k in range(6, 12)]
    claim, context = LearningCurves(), ExperimentContext(work_dir=tmp_path)
    result, replaced = ClaimRun(context), ClaimRun(context, as_baseline=True)
    claim._laws(result, grid, digits)
    claim._laws(replaced, grid, digits)
    by_name = {metric.name: metric for metric in claim.metrics}
    for name, sample in result.metrics.items():
        metric = by_name[name]
        number = {"min": min, "max": max, "value": np.median}[metric.statistic](sample.method)
        assert metric.holds(number), name
    assert not by_name["r2"].holds(min(replaced.metrics["r2"].method))


def test_the_fitter_is_trusted_and_a_constant_is_not():
    assert np.mean(planted_share(20)) >= 0.9
    assert max(known_rates()) <= 0.05
    assert max(known_rates(constant=True)) > 0.4 and sum(planted_share(3, constant=True)) == 0


def test_bad_options():
    with pytest.raises(ConfigError, match="four octaves"):
        LearningCurves(largest=14)
    with pytest.raises(ConfigError, match="widths"):
        LearningCurves(widths=(16, 32))

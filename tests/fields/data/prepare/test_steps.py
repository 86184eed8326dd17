"""Each step against what numpy, scikit-learn or a count says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("sklearn")

import pyarrow as pa
from sklearn.decomposition import PCA

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.fields.data.prepare import pipeline
from shoal.fields.data.prepare.budget import PrivacyBudget
from shoal.fields.data.prepare.errors import BudgetError, PrepareError
from shoal.fields.data.prepare.pipeline import PrepPipeline, build_steps, passes_of

RANDOM = np.random.default_rng(7)
ROWS = 5000


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_ROWS", 700)


def prepared(rows, *steps, target="", fresh=None):
    made = PrepPipeline(steps, target).fit(pa.table(rows))
    return made.transform(pa.table(fresh if fresh is not None else rows)).to_pydict()


def with_gaps(values, share=0.2):
    return np.where(RANDOM.random(len(values)) < share, np.nan, values)


def test_impute() -> None:
    x, n = with_gaps(RANDOM.lognormal(0, 1, ROWS)), with_gaps(RANDOM.normal(5, 1, ROWS))
    k = [["a", "b", "b", None][at] for at in RANDOM.integers(0, 4, ROWS)]
    out = prepared(
        {"x": x, "n": n, "k": k, "m": k, "none": [None] * ROWS},
        {"name": "impute", "columns": ["x"], "strategy": "median", "indicator": True},
        {"name": "impute", "columns": ["n"], "strategy": "mean"},
        {"name": "impute", "columns": ["k", "none"], "strategy": "mode"},
        {"name": "impute", "columns": ["m"], "strategy": "missing"},
    )
    gone = np.isnan(x)
    filled = np.unique(np.array(out["x"])[gone])
    assert len(filled) == 1
    assert abs((x[~gone] < filled[0]).mean() - 0.5) < 0.005
    assert out["x_missing"] == gone.astype(float).tolist()
    assert np.array(out["n"])[np.isnan(n)] == pytest.approx(np.nanmean(n), rel=1e-12)
    assert {out["k"][at] for at in range(ROWS) if k[at] is None} == {"b"}
    assert out["none"] == ["missing"] * ROWS
    assert out["m"] == [one or "missing" for one in k]


@pytest.mark.parametrize(
    ("method", "factor", "fence"), [("iqr", 3.0, 4.72), ("robust_z", 6.0, 6.0)]
)
def test_outliers(method: str, factor: float, fence: float) -> None:
    x = np.concatenate([RANDOM.normal(size=ROWS), [500.0, -500.0, np.nan]])
    step = {"name": "outliers", "method": method, "factor": factor}
    clipped = np.array(prepared({"x": x, "c": [1.0] * len(x)}, step)["x"], float)
    assert clipped[ROWS : ROWS + 2] == pytest.approx([fence, -fence], rel=0.1)
    assert np.isnan(clipped[-1])
    assert (clipped[:ROWS] == x[:ROWS]).all()
    made = PrepPipeline([{**step, "action": "drop"}])
    assert made.fit_transform(pa.table({"x": x})).num_rows == ROWS + 1
    assert made.transform(pa.table({"x": x})).num_rows == ROWS + 3  # held out: none is dropped


def test_types_and_units() -> None:
    out = prepared(
        {
            "h": ["1.8 m", "180cm", "1800 mm", "180", "tall", "NA", None, "1,800mm"],
            "p": ["50%", "0.5", ".5", "5e-1", "", "-", "50 %", "+0.5"],
            "k": ["New York", " new  york", "NEW-YORK", "?", None, "", "b", "B"],
        },
        {"name": "types", "numbers": {"h": "cm", "p": ""}, "categories": ["k"]},
    )
    assert out["h"][:4] + out["h"][7:] == pytest.approx([1.8] * 5)
    assert out["h"][4:7] == [None] * 3
    assert [one for one in out["p"] if one is not None] == pytest.approx([0.5] * 6)
    assert out["k"] == ["new york"] * 3 + [None] * 3 + ["b"] * 2
    with pytest.raises(PrepareError, match="'parsec': expected one of"):
        table("preparation").build({"name": "types", "numbers": {"h": "parsec"}})


def test_scale() -> None:
    x, c = RANDOM.lognormal(0, 1, ROWS), np.full(ROWS, 0.1)
    standard = np.array(prepared({"x": x}, "scale")["x"])
    assert standard == pytest.approx((x - x.mean()) / x.std(), abs=1e-9)
    whole = prepared({"x": x, "c": c}, {"name": "scale", "method": "minmax"})
    assert whole["x"] == pytest.approx((x - x.min()) / (x.max() - x.min()))
    assert whole["c"] == [0.0] * ROWS
    assert prepared({"c": c}, "scale")["c"] == [0.0] * ROWS
    ranks = np.array(prepared({"x": x}, {"name": "scale", "method": "quantile"})["x"])
    assert ranks == pytest.approx(2 * np.argsort(np.argsort(x)) / ROWS - 1, abs=0.02)


def test_one_hot_and_hashing() -> None:
    k = [["a", "b", "c", None][at] for at in RANDOM.integers(0, 4, ROWS)] + ["rare"]
    out = prepared({"k": k}, {"name": "one_hot", "most": 3}, fresh={"k": ["a", "new", None, "c"]})
    assert out == {"k=a": [1, 0, 0, 0], "k=b": [0] * 4, "k=c": [0, 0, 0, 1]}
    names = [f"v{at}" for at in range(200)]
    out = prepared({"k": [*names, None]}, {"name": "hash_encode", "width": 4})
    codes = np.column_stack([out[f"k#{at}"] for at in range(4)])
    assert (np.abs(codes).sum(axis=1) == [1] * 200 + [0]).all()
    assert (np.abs(codes).sum(axis=0) > 20).all()
    assert abs(codes.sum()) < 60


def test_pca_is_that_of_scikit_learn_up_to_sign() -> None:
    mixed = RANDOM.normal(size=(ROWS, 6)) @ RANDOM.normal(size=(6, 6)) + 100
    rows = {f"x{at}": mixed[:, at] for at in range(6)}
    out = prepared({"k": ["a"] * ROWS, **rows}, {"name": "pca", "components": 3})
    ours = np.column_stack([out[f"pc{at}"] for at in range(3)])
    theirs = PCA(3).fit_transform(mixed)
    assert np.abs(ours) == pytest.approx(np.abs(theirs), abs=1e-8)
    assert list(out) == ["k", "pc0", "pc1", "pc2"]
    with pytest.raises(PrepareError, match=r"pca: column 'x1' has missing values; use `impute`"):
        prepared({"x0": [1.0, 2.0], "x1": [None, 1.0]}, "pca")


def test_random_projection_keeps_distances() -> None:
    values = RANDOM.normal(size=(60, 500))
    out = prepared(
        {f"x{at}": values[:, at] for at in range(500)},
        {"name": "random_projection", "components": 300},
    )
    fewer = np.column_stack(list(out.values()))
    distances = [np.linalg.norm(a[:-1] - a[1:], axis=1) for a in (values, fewer)]
    assert distances[1] / distances[0] == pytest.approx(1, abs=0.2)


def test_samples_are_uniform_and_do_not_depend_on_batches(monkeypatch) -> None:
    x, k = np.arange(ROWS, dtype=float), ["rare" if at < 50 else "often" for at in range(ROWS)]
    rows, found = pa.table({"x": x, "k": k}), []
    for size in (700, 333):
        monkeypatch.setattr(pipeline, "_ROWS", size)
        found.append(PrepPipeline([{"name": "reservoir", "rows": 400}]).fit_transform(rows))
    assert found[0] == found[1]
    sample = found[0]["x"].to_numpy()
    assert len(sample) == 400
    assert sample.mean() == pytest.approx(ROWS / 2, abs=5 * ROWS / np.sqrt(12 * 400))
    strata = PrepPipeline([{"name": "stratified", "column": "k", "rows": 40}]).fit_transform(rows)
    counts = strata["k"].value_counts().to_pylist()
    assert sorted((one["values"], one["counts"]) for one in counts) == [("often", 40), ("rare", 40)]
    small = PrepPipeline([{"name": "reservoir", "rows": 10**6}]).fit_transform(rows)
    assert small.num_rows == ROWS


@pytest.mark.parametrize("kind", ["number", "text"])
def test_target_encoding_does_not_leak(kind: str) -> None:
    """A column with a category for each row says nothing; one that the target follows does."""
    y = RANDOM.integers(0, 2, ROWS)
    target = y.astype(float) if kind == "number" else np.array(["no", "yes"])[y]
    own = [f"row {at}" for at in range(ROWS)]
    useful = [
        f"c{(one * 40 + at) % 80}" for at, one in zip(RANDOM.integers(0, 40, ROWS), y, strict=True)
    ]
    made = PrepPipeline([{"name": "target_encode", "columns": ["own", "useful"]}], "y")
    out = made.fit_transform(pa.table({"own": own, "useful": useful, "y": target}))
    name = "~y" if kind == "number" else "~yes"
    leaked, learned = (np.array(out[one + name]) for one in ("own", "useful"))
    assert abs(np.corrcoef(leaked, y)[0, 1]) < 0.1
    assert np.corrcoef(learned, y)[0, 1] > 0.95
    fresh = made.transform(
        pa.table({"own": ["new", None], "useful": ["c0", "c79"], "y": target[:2]})
    )
    assert fresh["own" + name].to_pylist() == pytest.approx([y.mean()] * 2, abs=0.1)
    assert fresh["useful" + name].to_pylist() == pytest.approx([0, 1], abs=0.2)


def test_k_anonymity_by_group_by() -> None:
    age = with_gaps(RANDOM.normal(45, 15, ROWS), 0.01)
    rows = {
        "age": age,
        "city": [["Oslo", "Bergen", "Bodø", None][at] for at in RANDOM.integers(0, 4, ROWS)],
        "zip": RANDOM.integers(0, 9999, ROWS),
        "ill": RANDOM.normal(size=ROWS),
    }
    step = {"name": "k_anonymity", "columns": ["age", "city", "zip"], "k": 7}
    out = PrepPipeline([step]).fit_transform(pa.table(rows))
    groups = out.group_by(["age", "city", "zip"]).aggregate([("ill", "count")])
    counts = groups["ill_count"].to_numpy()
    assert counts.sum() == ROWS
    assert counts.min() >= 7
    assert counts.mean() < 4 * 7  # and not much coarser than it must be
    assert out["ill"].to_pylist() == pytest.approx(rows["ill"])
    for label, value in zip(out["age"].to_pylist(), age, strict=True):
        low, _, high = label.strip("[)").partition(", ")
        if not np.isnan(value) and low != "missing":
            assert float(low) - 1e-6 <= value <= float(high) + 1e-6
    with pytest.raises(PrepareError, match="there are 3 rows only"):
        PrepPipeline([step]).fit(pa.table(rows).slice(0, 3))
    with pytest.raises(PrepareError, match="reservoir leaves out rows after k_anonymity"):
        build_steps([step, "reservoir"])


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_noised_aggregates_and_their_budget(noise: str, tmp_path: Path) -> None:
    x, path = RANDOM.uniform(0, 10, ROWS), tmp_path / "privacy.json"
    delta = 1e-6 if noise == "gaussian" else 0.0
    step = {
        "name": "noised_aggregates",
        "bounds": {"x": [0, 10]},
        "epsilon": 0.4,
        "delta": delta,
        "noise": noise,
        "releases": str(path),
    }
    released = []
    for _ in range(2):
        made = PrepPipeline([step]).fit(pa.table({"x": x}))
        assert made.transform(pa.table({"x": x}))["x"].to_pylist() == x.tolist()
        released.append(made.fitted[0].learned["x"])
    assert released[0] != released[1]
    assert released[0]["count"] != ROWS
    for one in released:
        assert one["count"] == pytest.approx(ROWS, abs=400)
        assert one["mean"] == pytest.approx(x.mean(), abs=1)
    budget = PrivacyBudget(path, 1.0, 1e-5)
    assert budget.spent() == pytest.approx((0.8, 2 * delta))
    assert sum(row["epsilon"] for row in budget.releases()) == pytest.approx(0.8)
    with pytest.raises(BudgetError, match=r"epsilon 0.4 and delta .* 0.2 and"):
        PrepPipeline([step]).fit(pa.table({"x": x}))
    assert len(budget.releases()) == 2
    path.write_text("{}")
    with pytest.raises(PrepareError, match="no list of releases"):
        budget.spend("more", 0.1)


def test_noise_has_its_scale(tmp_path: Path) -> None:
    """Counts of a hundred releases: the mean absolute noise is that of Laplace."""
    step = table("preparation").build({"name": "noised_aggregates", "bounds": {"x": [0, 1]}})
    drawn = np.array([step._noised(RANDOM, 0.0, 1.0) for _ in range(4000)])
    assert np.abs(drawn).mean() == pytest.approx(2 / 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bounds": {"x": [1, 0]}}, "the least value before the greatest"),
        ({"noise": "gaussian"}, "expected a number above 0 with gaussian"),
        ({"noise": "gaussian", "delta": 1e-6, "epsilon": 2}, "below 1 with gaussian"),
        ({"epsilon": 0}, "epsilon"),
        ({"bounds": {}}, "bounds"),
    ],
)
def test_bad_releases(changes, message) -> None:
    step = {"name": "noised_aggregates", "bounds": {"x": [0, 1]}, **changes}
    with pytest.raises(ConfigError, match=message):
        table("preparation").build(step)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"name": "scale", "columns": ["z"]}, "scale.columns: no column 'z' at this step"),
        ({"name": "scale", "columns": ["k"]}, "'k' is large_string, not number"),
        ({"name": "one_hot", "columns": ["x"]}, "'x' is double, not text"),
        ("target_encode", "the job has no target"),
        ({"name": "k_anonymity", "columns": ["l"], "k": 2}, "'l' is list"),
        ({"name": "stratified", "column": "l"}, "'l': is list"),
    ],
)
def test_columns_that_a_step_cannot_use(step, message) -> None:
    with pytest.raises(PrepareError, match=message):
        PrepPipeline([step]).fit(pa.table({"x": [1.0, 2.0], "k": ["a", "b"], "l": [[1], [2]]}))


def test_steps_share_passes_and_learn_what_they_would_alone() -> None:
    rows = pa.table(
        {
            "a": with_gaps(RANDOM.normal(size=ROWS)),
            "b": with_gaps(RANDOM.lognormal(size=ROWS)),
            "k": [f"k{at}" for at in RANDOM.integers(0, 5, ROWS)],
        }
    )
    steps = build_steps(
        [
            {"name": "impute", "columns": ["a"]},
            {"name": "outliers", "columns": ["b"]},
            {"name": "one_hot", "columns": ["k"]},
            {"name": "scale", "columns": ["a"]},
        ]
    )
    assert passes_of(steps) == 2
    whole, alone = PrepPipeline(steps).fit_transform(rows), rows
    for step in steps:
        alone = PrepPipeline([step]).fit_transform(alone)
    assert whole.equals(alone)


def test_a_pipeline_is_read_back(tmp_path: Path) -> None:
    rows = pa.table({"x": with_gaps(RANDOM.normal(size=100)), "k": ["a", "b"] * 50})
    made = PrepPipeline(["impute", "one_hot", "scale"]).fit(rows)
    made.save(tmp_path / "pipeline.json")
    assert PrepPipeline.load(tmp_path / "pipeline.json").transform(rows) == made.transform(rows)
    for text in ("{", "{}", json.dumps({"target": "", "steps": [{"step": "nothing"}]})):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError):
            PrepPipeline.load(tmp_path / "bad.json")

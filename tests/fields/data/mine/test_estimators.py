"""The estimator keeps to scikit-learn's conventions, and refuses what cannot be mined."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")

import pyarrow as pa
from scipy import sparse
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.fields.data.mine import FrequentItemsets, heaton_baskets
from shoal.fields.data.mine.protocols import MineError, TooManyError

ROWS = [
    ["bread", "milk"],
    ["bread", "beer", "eggs"],
    ["milk", "beer"],
    ["bread", "milk", "beer"],
    [],
]


@pytest.fixture(autouse=True)
def home(shared_home) -> None:
    """Rates are timed once."""


@pytest.mark.slow
@parametrize_with_checks([FrequentItemsets()])
def test_conventions(estimator, check) -> None:
    check(estimator)


def sets(model):
    rows = model.itemsets_.to_pylist()
    return {frozenset(row["items"]): row["count"] for row in rows}


EXPECTED = {
    frozenset({"bread"}): 3,
    frozenset({"milk"}): 3,
    frozenset({"beer"}): 3,
    frozenset({"bread", "milk"}): 2,
    frozenset({"bread", "beer"}): 2,
    frozenset({"milk", "beer"}): 2,
}


@pytest.mark.parametrize("method", ["auto", "apriori", "eclat", "fpgrowth"])
def test_every_method_and_input(method) -> None:
    items = ["bread", "milk", "beer", "eggs"]
    matrix = np.array([[item in row for item in items] for row in ROWS])
    for X in (ROWS, list(map(tuple, ROWS)), list(map(set, ROWS)), pa.array(ROWS)):
        model = FrequentItemsets(0.4, method=method).fit(X)
        assert sets(model) == EXPECTED
        assert model.n_baskets_ == 5
        assert model.itemsets_["support"][0].as_py() == model.itemsets_["count"][0].as_py() / 5
    named = {frozenset(map(items.index, one)): count for one, count in EXPECTED.items()}
    for X in (matrix, matrix.astype(int), sparse.csr_array(matrix.astype(float))):
        assert sets(FrequentItemsets(2, method=method).fit(X)) == named


def test_frames() -> None:
    pandas = pytest.importorskip("pandas")
    matrix = [[item in row for item in ("bread", "milk")] for row in ROWS]
    frame = pandas.DataFrame(matrix, columns=["bread", "milk"])
    expected = {one: count for one, count in EXPECTED.items() if one <= {"bread", "milk"}}
    assert sets(FrequentItemsets(2).fit(frame)) == expected
    assert sets(FrequentItemsets(2).fit(pandas.Series(ROWS))) == EXPECTED


def test_targets_and_lengths() -> None:
    assert set(map(len, sets(FrequentItemsets(2, max_len=1).fit(ROWS)))) == {1}
    maximal = sets(FrequentItemsets(2, target="maximal").fit(ROWS))
    assert set(map(len, maximal)) == {2}
    assert sets(FrequentItemsets(2, target="closed").fit(ROWS)) == EXPECTED


def test_rules() -> None:
    rows = FrequentItemsets(1).fit(ROWS).rules(1.0).to_pylist()
    sides = {(frozenset(row["antecedent"]), frozenset(row["consequent"])): row for row in rows}
    one = sides[frozenset({"eggs"}), frozenset({"bread", "beer"})]
    assert one["support"] == pytest.approx(0.2)
    assert one["confidence"] == 1.0
    assert one["lift"] == pytest.approx(1 / 0.4)
    assert one["leverage"] == pytest.approx(0.2 - 0.2 * 0.4)
    assert one["conviction"] == np.inf
    some = FrequentItemsets(2).fit(ROWS).rules(0.6).to_pylist()
    assert len(some) == 6
    assert some[0]["conviction"] == pytest.approx((1 - 0.6) / (1 - 2 / 3))
    confidences = [
        row["confidence"] for row in FrequentItemsets(1).fit(ROWS).rules(0.1).to_pylist()
    ]
    assert confidences == sorted(confidences, reverse=True)


def test_rules_of_mlxtend() -> None:
    mlxtend = pytest.importorskip("mlxtend.frequent_patterns")
    pandas = pytest.importorskip("pandas")
    baskets = heaton_baskets(800, 7, 0.6, seed=2)
    matrix = np.zeros((800, baskets.num_items), bool)
    matrix[np.repeat(np.arange(800), np.diff(baskets.begins)), baskets.ids] = True
    frame = pandas.DataFrame(matrix[:, :7], columns=[str(at) for at in range(7)])
    theirs = mlxtend.fpgrowth(frame, 0.05, use_colnames=True)
    model = FrequentItemsets(0.05).fit(frame)
    assert sets(model) == {
        one: round(support * 800)
        for one, support in zip(theirs["itemsets"], theirs["support"], strict=True)
    }
    rules = mlxtend.association_rules(theirs, metric="confidence", min_threshold=0.5)
    expected = {
        (one.antecedents, one.consequents): (one.confidence, one.lift, one.leverage, one.conviction)
        for one in rules.itertuples()
    }
    ours = {
        (frozenset(row["antecedent"]), frozenset(row["consequent"])): (
            *(row["confidence"], row["lift"], row["leverage"], row["conviction"]),
        )
        for row in model.rules(0.5).to_pylist()
    }
    assert len(ours) > 30
    assert ours.keys() == expected.keys()
    assert all(ours[one] == pytest.approx(expected[one]) for one in ours)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_support": 0}, "min_support = 0"),
        ({"min_support": 1.5}, "min_support = 1.5"),
        ({"target": "some"}, "target = 'some'"),
        ({"max_len": 0}, "max_len = 0"),
        ({"max_itemsets": 0}, "max_itemsets = 0"),
        ({"method": "aprior"}, "method = 'aprior': expected one of apriori"),
    ],
)
def test_wrong_options(options, message) -> None:
    with pytest.raises(Exception, match=message):
        FrequentItemsets(**options).fit(ROWS)


def test_what_cannot_be_had() -> None:
    with pytest.raises(TooManyError, match='target="maximal"'):
        FrequentItemsets(1, max_itemsets=3).fit(ROWS)
    with pytest.raises(MineError, match="rules need all frequent sets"):
        FrequentItemsets(2, target="closed").fit(ROWS).rules()
    with pytest.raises(MineError, match=r"min_confidence = 0"):
        FrequentItemsets(2).fit(ROWS).rules(0)
    with pytest.raises(NotFittedError):
        _ = FrequentItemsets().itemsets_


def test_no_baskets_and_empty_ones() -> None:
    assert FrequentItemsets(0.5).fit([[], [], []]).itemsets_.num_rows == 0
    assert sets(FrequentItemsets(0.5).fit([[], ["a"]])) == {frozenset("a"): 1}
    assert FrequentItemsets(0.6).fit([[], ["a"]]).itemsets_.num_rows == 0

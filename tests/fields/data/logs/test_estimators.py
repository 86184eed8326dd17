"""The transformer keeps to scikit-learn's conventions, and counts templates."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pyarrow")

from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from shoal.core.errors import ConfigError, DataError
from shoal.fields.data.logs import LogTemplates


def test_conventions() -> None:
    """Those of them that an estimator of texts is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SkipTestWarning)
        check_estimator(LogTemplates(), on_skip=None)


def test_it_counts() -> None:
    texts = ["open file 1\nread 5 bytes\nread 7 bytes", "open file 2", "", b"read 9 bytes"]
    model = LogTemplates()
    counts = model.fit_transform(texts)
    assert model.get_feature_names_out().tolist() == ["open file <*>", "read <*> bytes"]
    assert counts.toarray().tolist() == [[1, 2], [1, 0], [0, 0], [0, 1]]
    assert np.array_equal(model.transform(texts).toarray(), counts.toarray())
    other = model.transform(["read 12 bytes\nsomething new", "open file 8"])
    assert other.toarray().tolist() == [[0, 1], [1, 0]]


def test_in_a_pipeline() -> None:
    good = [f"open {at}\nclose {at}" for at in range(20)]
    bad = [f"open {at}\nfailed with code {at}" for at in range(20)]
    model = make_pipeline(LogTemplates(), LogisticRegression()).fit(good + bad, [0] * 20 + [1] * 20)
    assert model.predict(["open 99\nfailed with code 3"]) == [1]


def test_other_parsers_and_bad_input() -> None:
    model = LogTemplates(parser={"name": "drain", "similarity": 1.0}).fit(["a b", "a c"])
    assert model.templates_ == ["a b", "a c"]
    assert LogTemplates(parser="iplom").fit(["a 1", "a 2"]).templates_ == ["a <*>"]
    with pytest.raises(NotFittedError):
        LogTemplates().transform(["a"])
    with pytest.raises(ConfigError, match="one text"):
        LogTemplates().fit("a b")
    with pytest.raises(DataError, match="int"):
        LogTemplates().fit([5])
    with pytest.raises(ConfigError, match="parser"):
        LogTemplates(parser="drane").fit(["a"])

"""A forest as arrays: equal to scikit-learn's, the same by seed, refused when damaged."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.core.random import generator, seed64
from shoal.cost.gemm.forest import Forest, fit_forest


def data(rows: int = 120) -> tuple[np.ndarray, np.ndarray]:
    random = generator(3, purpose="test forest")
    x = random.random((rows, 4))
    return x, np.stack([x[:, 0] * 3 + x[:, 1] ** 2, x[:, 2]], axis=1)


def test_is_scikit_learns_forest() -> None:
    from sklearn.ensemble import RandomForestRegressor

    x, y = data()
    result = fit_forest(x, y, trees=8, depth=6, seed=1)
    peer = RandomForestRegressor(
        n_estimators=8, max_depth=6, random_state=seed64(1, purpose="forest") % 2**31
    ).fit(x.astype(np.float32), y)
    request = generator(4).random((50, 4))
    np.testing.assert_allclose(result.predict(request), peer.predict(request), rtol=1e-12)
    assert result.trees(request).shape == (8, 50, 2)


def test_same_seed_same_forest() -> None:
    x, y = data()
    first, second, other = (fit_forest(x, y, trees=4, seed=s).arrays() for s in (0, 0, 1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    assert not np.array_equal(first["feature"], other["feature"])


def test_bad_data_is_refused() -> None:
    x, y = data(20)
    with pytest.raises(ConfigError, match="forest"):
        fit_forest(x[:0], y[:0])
    x[3, 1] = np.nan
    with pytest.raises(ConfigError, match="not finite"):
        fit_forest(x, y)


def test_damaged_arrays_are_refused() -> None:
    x, y = data(30)
    forest = fit_forest(x, y, trees=2)
    arrays = forest.arrays()
    with pytest.raises(ConfigError, match="no array left"):
        Forest.from_arrays({k: v for k, v in arrays.items() if k != "left"})
    circle = arrays["left"].copy()
    circle[0] = 0  # a walk that would never end
    with pytest.raises(ConfigError, match="do not fit"):
        Forest.from_arrays({**arrays, "left": circle})
    with pytest.raises(ConfigError, match=r"forest\.rows"):
        forest.predict(x[:, :1])

"""A random forest as plain arrays: fitted by scikit-learn, asked and stored without it.

Source: Breiman, Random Forests, 2001.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, require
from shoal.core.extras import import_extra
from shoal.core.random import seed64


@dataclass(frozen=True, eq=False)
class Forest:
    """Regression trees over the same features.

    Args:
        roots: [T] node number of each tree's root.
        feature: [nodes] feature that a node compares; below 0 at a leaf.
        threshold: [nodes] rows whose feature is at most this go left.
        left: [nodes] left child.
        right: [nodes] right child.
        value: [nodes, O] mean of the outputs at each node.
    """

    roots: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray

    def __post_init__(self) -> None:
        nodes = len(self.feature)
        same = all(len(a) == nodes for a in (self.threshold, self.left, self.right, self.value))
        inner = self.feature >= 0
        # Children come after their node, so every walk ends.
        order = np.arange(nodes)
        sound = same and self.value.ndim == 2 and len(self.roots) > 0 and nodes > 0
        sound = sound and bool(np.all((self.roots >= 0) & (self.roots < nodes)))
        for child in (self.left, self.right):
            sound = sound and bool(np.all(child[inner] > order[inner]))
            sound = sound and bool(np.all(child[inner] < nodes))
        if not sound:
            raise ConfigError("forest: its arrays do not fit each other; fit it again")

    def trees(self, rows: np.ndarray) -> np.ndarray:
        """What each tree says: [N, F] -> [T, N, O]."""
        rows = np.asarray(rows, dtype=np.float32)
        require(
            rows.ndim == 2 and rows.shape[1] > int(self.feature.max(initial=0)),
            "forest.rows",
            rows.shape,
            expected=f"[N, F] with at least {int(self.feature.max(initial=0)) + 1} features",
        )
        at = np.repeat(self.roots[:, None], len(rows), axis=1)
        which = np.arange(len(rows))
        while True:
            request = self.feature[at]
            inner = request >= 0
            if not inner.any():
                return np.asarray(self.value[at])
            below = rows[which, np.maximum(request, 0)] <= self.threshold[at]
            at = np.where(inner, np.where(below, self.left[at], self.right[at]), at)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """Mean of the trees: [N, F] -> [N, O]."""
        return np.asarray(self.trees(rows).mean(axis=0))

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name, for storing."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Forest:
        """The forest of stored arrays.

        Raises:
            ConfigError: an array is missing, or they do not fit each other.
        """
        missing = sorted(set(cls.__dataclass_fields__) - set(arrays))
        if missing:
            raise ConfigError(f"forest: no array {', '.join(missing)}; fit it again")
        return cls(**{name: arrays[name] for name in cls.__dataclass_fields__})


def fit_forest(
    rows: np.ndarray,
    targets: np.ndarray,
    *,
    trees: int = 100,
    depth: int | None = 20,
    leaf: int = 1,
    features: float = 1.0,
    seed: int = 0,
) -> Forest:
    """Grow a forest.

    Args:
        rows: [N, F] features.
        targets: [N, O] outputs, which share the trees.
        trees: number of trees.
        depth: deepest level; None for no limit.
        leaf: fewest rows of a leaf.
        features: share of the features that a split may choose from.
        seed: the same rows, targets and seed give the same forest.

    Raises:
        ConfigError: no rows, or numbers that are not finite.
        MissingExtraError: scikit-learn is not installed.
    """
    rows = np.asarray(rows, dtype=np.float32)
    targets = np.asarray(targets, dtype=np.float64)
    require(
        rows.ndim == targets.ndim == 2 and len(rows) == len(targets) > 0,
        "forest",
        (rows.shape, targets.shape),
        expected="[N, F] and [N, O] with N above 0",
    )
    require(
        bool(np.isfinite(rows).all() and np.isfinite(targets).all()),
        "forest",
        "a number that is not finite",
        expected="finite features and targets",
    )
    ensemble: Any = import_extra("sklearn.ensemble", extra="bench", purpose="fitting a forest")
    grown = ensemble.RandomForestRegressor(
        n_estimators=trees,
        max_depth=depth,
        min_samples_leaf=leaf,
        max_features=features,
        random_state=seed64(seed, purpose="forest") % 2**31,
    ).fit(rows, targets if targets.shape[1] > 1 else targets[:, 0])
    pieces: dict[str, list[np.ndarray]] = {
        name: [] for name in ("feature", "threshold", "left", "right", "value")
    }
    roots, base = [], 0
    for estimator in grown.estimators_:
        tree = estimator.tree_
        roots.append(base)
        leaves = tree.children_left < 0
        pieces["feature"].append(np.where(leaves, -1, tree.feature))
        pieces["threshold"].append(tree.threshold)
        pieces["left"].append(np.where(leaves, -1, tree.children_left + base))
        pieces["right"].append(np.where(leaves, -1, tree.children_right + base))
        pieces["value"].append(tree.value[:, :, 0])
        base += tree.node_count
    whole = {name: np.concatenate(parts) for name, parts in pieces.items()}
    return Forest(
        roots=np.array(roots, dtype=np.int32),
        feature=whole["feature"].astype(np.int32),
        threshold=whole["threshold"].astype(np.float64),
        left=whole["left"].astype(np.int32),
        right=whole["right"].astype(np.int32),
        value=whole["value"].astype(np.float64),
    )

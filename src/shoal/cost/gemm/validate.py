"""How well unmeasured products are predicted: three splits, four predictors.

``random`` holds out rows, so a shape may be seen with other threads or tiles; ``grouped`` holds
out whole shapes; ``extrapolate`` holds out every shape with a size in the largest octave.
The forest stands beside the roofline, the roofline with a linear correction, and boosted trees.

Sources: Friedman, Greedy Function Approximation: A Gradient Boosting Machine, 2001; Breiman,
Random Forests, 2001 (importance by permutation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import require
from shoal.core.extras import import_extra
from shoal.core.random import generator
from shoal.cost.gemm.features import FEATURES, features
from shoal.cost.gemm.predictor import GemmPredictor, fit, grouped_folds
from shoal.machine.probes.gemm_table import TILES, GemmPoint, GemmTable

SPLITS = ("random", "grouped", "extrapolate")
FOLDS = 5


class HeldOut(Value):
    """Predictions of products that the predictors had not seen.

    Args:
        split: random, grouped or extrapolate.
        seconds: measured times.
        predicted: predictor -> its seconds.
        low: lower end of the forest's 90 % interval.
        high: upper end of it.
    """

    split: str
    seconds: tuple[float, ...]
    predicted: dict[str, tuple[float, ...]]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def errors(self, predictor: str) -> np.ndarray:
        """|predicted / measured - 1| of each product, [N]."""
        return np.asarray(np.abs(np.divide(self.predicted[predictor], self.seconds) - 1))

    def r2(self, predictor: str) -> float:
        """R^2 of the logarithm of the time."""
        return r2(np.log(self.seconds), np.log(self.predicted[predictor]))

    @property
    def coverage(self) -> float:
        """Share of products inside the forest's interval."""
        inside = np.less_equal(self.low, self.seconds) & np.less_equal(self.seconds, self.high)
        return float(inside.mean())

    def summary(self) -> dict[str, dict[str, float]]:
        """Predictor -> its scores."""
        return {
            name: {
                "r2": self.r2(name),
                "median_error": float(np.median(self.errors(name))),
                "mean_error": float(self.errors(name).mean()),
                "p90_error": float(np.percentile(self.errors(name), 90)),
            }
            for name in self.predicted
        }


def r2(real: np.ndarray, predicted: np.ndarray) -> float:
    """Share of the variance that is explained."""
    return float(
        1 - ((real - predicted) ** 2).sum() / max(((real - real.mean()) ** 2).sum(), 1e-30)
    )


def _parts(
    points: Sequence[GemmPoint], split: str, seed: int, folds: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(rows to learn from, rows held out), as masks."""
    if split == "extrapolate":
        largest = np.array([max(point.group) for point in points])
        own = np.array([point.tile > 0 for point in points])
        late = np.zeros(len(points), dtype=bool)
        for kernel in (own, ~own):
            late |= kernel & (largest > largest[kernel].max(initial=0) / 2)
        yield ~late, late
        return
    if split == "random":
        order = generator(seed, purpose="gemm rows").permutation(len(points))
        fold = np.empty(len(points), dtype=int)
        fold[order] = np.arange(len(points)) % folds
    else:
        fold = grouped_folds(points, folds, seed)
    for number in range(folds):
        yield fold != number, fold == number


def held_out(
    table: GemmTable,
    split: str,
    *,
    trees: int = 100,
    seed: int = 0,
    folds: int = FOLDS,
    peers: bool = True,
) -> HeldOut:
    """Predict every product of a split by predictors that did not see it.

    Args:
        table: the sweep.
        split: one of :data:`SPLITS`.
        trees: trees of the forest.
        seed: seed of split and forest.
        folds: parts of the random and the grouped split.
        peers: also the linear correction and the boosted trees.

    Raises:
        ConfigError: no such split, or too few products.
        MissingExtraError: scikit-learn is not installed.
    """
    require(split in SPLITS, "split", split, expected=f"one of {', '.join(SPLITS)}")
    seconds: list[float] = []
    low: list[float] = []
    high: list[float] = []
    fields: dict[str, list[float]] = {}
    points = table.points
    for learn, test in _parts(points, split, seed, folds):
        seen = [p for p, chosen in zip(points, learn, strict=True) if chosen]
        part = table.model_copy(update={"points": tuple(seen)})
        # Only on whole shapes held out do the intervals promise what they say.
        predictor = fit(part, trees=trees, seed=seed, calibrate=split == "grouped")
        limits = predictor.facts.limits
        kinds = {kind.rpartition("/")[0] for kind in limits.compute}
        unseen = [
            p
            for p, chosen in zip(points, test, strict=True)
            if chosen and limits.kind(p).rpartition("/")[0] in kinds
        ]
        if not unseen:
            continue
        middle, width = predictor.raw(unseen)
        seconds += [p.seconds for p in unseen]
        low += list(np.exp(middle - width))
        high += list(np.exp(middle + width))
        answers = {
            "forest": np.exp(middle),
            "roofline": np.array([limits.seconds(p) for p in unseen]),
        }
        if peers:
            answers |= _peers(predictor, seen, unseen, seed)
        for name, values in answers.items():
            fields.setdefault(name, []).extend(map(float, values))
    return HeldOut(
        split=split,
        seconds=tuple(seconds),
        predicted={name: tuple(values) for name, values in fields.items()},
        low=tuple(map(float, low)),
        high=tuple(map(float, high)),
    )


def _peers(
    predictor: GemmPredictor, seen: Sequence[GemmPoint], unseen: Sequence[GemmPoint], seed: int
) -> dict[str, np.ndarray]:
    """The roofline with a linear correction of its logarithm, and boosted trees."""
    limits = predictor.facts.limits
    rows, request = features(seen, limits), features(unseen, limits)
    real = np.log([p.seconds for p in seen])
    ones = np.ones((len(rows), 1))
    weights, *_ = np.linalg.lstsq(np.hstack([rows, ones]).astype(float), real, rcond=None)
    linear = np.hstack([request, np.ones((len(request), 1))]) @ weights
    ensemble: Any = import_extra("sklearn.ensemble", extra="bench", purpose="boosting trees")
    pools: Any = import_extra("threadpoolctl", extra="bench", purpose="boosting trees")
    # On a few rows its threads wait for each other most of the time.
    with pools.threadpool_limits(1):
        boosted = ensemble.HistGradientBoostingRegressor(
            max_iter=300, learning_rate=0.08, random_state=seed
        ).fit(rows, real)
        return {"linear": np.exp(linear), "boosting": np.exp(boosted.predict(request))}


class TileChoice(Value):
    """The tile that was chosen for a shape that the predictor had not seen.

    Args:
        M: rows.
        N: columns.
        K: inner size.
        chosen: the tile.
        best: the fastest tile.
        loss: seconds with the chosen tile over those with the fastest.
    """

    M: int
    N: int
    K: int
    chosen: int
    best: int
    loss: float


def tile_choices(
    table: GemmTable, *, trees: int = 100, seed: int = 0, folds: int = FOLDS, roofline: bool = False
) -> list[TileChoice]:
    """For every shape that was measured at all tiles: what a predictor chooses that did not see it.

    Args:
        table: the sweep.
        trees: trees of the forest.
        seed: seed of folds and forest.
        folds: parts of the shapes.
        roofline: choose by the traffic and operations alone: every tile promises the same, and
            the smallest is taken.
    """
    own = [p for p in table.points if p.tile]
    fold = grouped_folds(own, folds, seed)
    tile_choices = []
    for number in range(folds):
        seen = {p.group for p, f in zip(own, fold, strict=True) if f != number}
        groups: dict[tuple[int, int, int], dict[int, GemmPoint]] = {}
        for p, f in zip(own, fold, strict=True):
            if f == number:
                groups.setdefault(p.group, {})[p.tile] = p
        whole = {group: tiles for group, tiles in groups.items() if set(tiles) == set(TILES)}
        if not whole:
            continue
        points = tuple(p for p in own if p.group in seen)
        part = table.model_copy(update={"points": points})
        predictor = None if roofline else fit(part, trees=trees, seed=seed, calibrate=False)
        for (M, N, K), tiles in whole.items():
            order = list(TILES)
            if predictor is not None:
                seconds = predictor.seconds([tiles[tile] for tile in order])
                chosen = order[int(np.argmin(seconds))]
            else:
                chosen = order[0]
            best = min(order, key=lambda tile: tiles[tile].seconds)
            loss = tiles[chosen].seconds / tiles[best].seconds
            tile_choices.append(TileChoice(M=M, N=N, K=K, chosen=chosen, best=best, loss=loss))
    return tile_choices


def importance(table: GemmTable, *, trees: int = 100, seed: int = 0) -> dict[str, float]:
    """Feature -> how much the error of log seconds grows when its values are shuffled.

    Root mean square, on a fifth of the shapes that the forest did not see; largest first.
    """
    fold = grouped_folds(table.points, FOLDS, seed)
    seen = tuple(p for p, f in zip(table.points, fold, strict=True) if f)
    unseen = [p for p, f in zip(table.points, fold, strict=True) if not f]
    part = table.model_copy(update={"points": seen})
    predictor = fit(part, trees=trees, seed=seed, calibrate=False)
    facts = predictor.facts
    rows = features(unseen, facts.limits)
    real = np.log([p.seconds / facts.limits.seconds(p) for p in unseen])

    def error(asked: np.ndarray) -> float:
        result = predictor.forest.predict(asked)[:, 0] * facts.deviation + facts.mean
        return float(np.sqrt(np.mean((result - real) ** 2)))

    plain = error(rows)
    result = {}
    for number, name in enumerate(FEATURES):
        order = generator(seed, purpose="importance", index=number).permutation(len(rows))
        shuffled = rows.copy()
        shuffled[:, number] = rows[order, number]
        result[name] = error(shuffled) - plain
    return dict(sorted(result.items(), key=lambda item: -item[1]))

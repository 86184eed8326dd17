"""[77] LearningCurves: is generalisation error a power of the training data?

Source: Hestness et al., Deep Learning Scaling is Predictable, Empirically, 2017.

An LSTM and a Transformer of characters follow a power law whose slope is that of both and which
predicts the largest shard; the best model's size grows as a power of the data; digits follow a
steeper law; and the fitter recovers planted parameters and rates that are theorems. The A/A run has
a constant in the place of the law.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.learning_curves_charlm import (
    ARCHITECTURES,
    CharlmSetting,
    CharlmTexts,
    read_texts,
    train,
)
from shoal.claims.experiments.tiny import corpus_of
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import MissingExtraError, require
from shoal.core.parts import part, table
from shoal.core.random import generator
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import fit


@part
class LearningCurves(BaseClaim, row=77):
    """Learning curves of character models and of digits, and what the fitter is worth.

    Args:
        smallest: power of two of characters in the smallest shard.
        largest: power of two of characters in the largest shard.
        widths: hidden widths of the models.
        steps: most steps of the run on the largest shard.
        corpus: where the text is from.
    """

    smallest: int = 13
    largest: int = 19
    widths: tuple[int, ...] = (16, 32, 64, 128)
    steps: int = 700
    corpus: str = "stdlib"

    def __post_init__(self) -> None:
        require(
            self.smallest >= 10 and self.smallest + 4 <= self.largest <= 26,
            "claim.learning_curves.largest",
            self.largest,
            expected="at least four octaves above smallest, which is 10 or more; at most 26",
        )
        require(
            len(self.widths) >= 3 and all(w >= 8 and w % 8 == 0 for w in self.widths),
            "claim.learning_curves.widths",
            self.widths,
            expected="three or more multiples of 8",
        )

    def collect(self, run: ClaimRun) -> None:
        """Collect the samples; see the module's description."""
        constant = run.as_baseline
        texts = run.remember("texts", lambda: self._texts(run.context, run.quick))
        run.put("shared_documents", len(texts.train_names & texts.heldout_names))
        run.put("planted_share", planted_share(40 if run.quick else 200, constant=constant))
        run.put("known_rates", known_rates(constant=constant))
        if not run.quick:
            grid = run.remember("grid", lambda: self._grid(run.context, texts))
            self._laws(run, grid, run.remember("digits", lambda: digits_curve(run.seed)))

    def _texts(self, context: ExperimentContext, quick: bool) -> CharlmTexts:
        choice = corpus_of(context.data, self.corpus)
        size = 2 ** (self.smallest if quick else self.largest)
        return read_texts(choice, train_chars=size, heldout_chars=2**15, seed=context.seed)

    def _grid(self, context: ExperimentContext, texts: CharlmTexts) -> dict[str, list[list[float]]]:
        """Per architecture: [characters, parameters, mean loss, spread] of every model."""
        shards = [2**i for i in range(self.smallest, self.largest + 1)]
        rates = {name: self._tuned(name, texts, context.seed) for name in ARCHITECTURES}
        cells = list(itertools.product(shards, self.widths, ARCHITECTURES))
        grid: dict[str, list[list[float]]] = {name: [] for name in ARCHITECTURES}
        for done, (chars, width, name) in enumerate(cells):
            context.progress(f"{name} of width {width} on {chars} characters", done / len(cells))
            seeds = 3 if chars <= 2 ** (self.smallest + 1) else 1
            how = rates[name], self._steps(chars)
            trained = [
                train(CharlmSetting(name, width, chars, context.seed + turn, *how), texts)
                for turn in range(seeds)
            ]
            losses = [loss for loss, _ in trained]
            spread = float(np.std(losses, ddof=1)) if seeds > 1 else math.nan
            grid[name].append([float(chars), float(trained[0][1]), float(np.mean(losses)), spread])
        return grid

    def _steps(self, chars: int) -> int:
        """Steps for a shard: the root of its size, since large shards need fewer passes."""
        share = math.pow(chars / 2**self.largest, 0.35)
        return max(60, round(self.steps * share))

    def _tuned(self, name: str, texts: CharlmTexts, seed: int) -> float:
        """The best of three learning rates on the smallest shard."""
        chars = 2**self.smallest
        width = self.widths[len(self.widths) // 2]
        losses = {
            lr: train(CharlmSetting(name, width, chars, seed, lr, self._steps(chars)), texts)[0]
            for lr in (3e-3, 1e-2, 3e-2)
        }
        return min(losses, key=lambda lr: losses[lr])

    def _laws(
        self, run: ClaimRun, grid: dict[str, list[list[float]]], digits: Sequence[CurvePoint]
    ) -> None:
        constant = run.as_baseline
        r2, exponents, errors, sizes = [], [], [], []
        for rows in grid.values():
            points = best_curve(rows)
            of_all, exponent, _ = _law(points, constant)
            _, _, before = _law(points[:-1], constant)
            errors.append(abs(before(points[-1].size) / points[-1].value - 1))
            r2.append(of_all)
            exponents.append(exponent)
            sizes.append(0.0 if constant else best_size(rows))
        run.put("r2", r2)
        run.put("exponent", exponents)
        run.put("shallowest_exponent", exponents)
        run.put("largest_error", errors)
        run.put("exponent_difference", max(exponents) - min(exponents))
        run.put("size_exponent", np.median(sizes))
        run.put("digits_exponent", _law(digits, constant)[1])


def best_curve(rows: Sequence[Sequence[float]]) -> list[CurvePoint]:
    """The best model's loss at each size of data."""
    curve = []
    for chars in sorted({row[0] for row in rows}):
        _, _, loss, spread = min((row for row in rows if row[0] == chars), key=lambda row: row[2])[
            :4
        ]
        known = None if math.isnan(spread) else spread
        curve.append(CurvePoint(size=chars, value=loss, spread=known, metric="nats per character"))
    return curve


def best_size(rows: Sequence[Sequence[float]]) -> float:
    """Exponent of the best model's parameters over data.

    The lowest point of the parabola through losses over log parameters, within one octave of what
    ran.
    """
    chars, sizes = [], []
    for amount in sorted({row[0] for row in rows}):
        own = sorted((row for row in rows if row[0] == amount), key=lambda row: row[1])
        logs = np.log2([row[1] for row in own])
        a, b, _ = np.polyfit(logs, [row[2] for row in own], 2)
        end = logs[0] if own[0][2] < own[-1][2] else logs[-1]
        place = -b / (2 * a) if a > 0 else end  # without a valley, the better end
        chars.append(math.log2(amount))
        sizes.append(float(np.clip(place, logs[0] - 1, logs[-1] + 1)))
    return float(np.polyfit(chars, sizes, 1)[0])


def _law(
    points: Sequence[CurvePoint], constant: bool, **options: Any
) -> tuple[float, float, Callable[[float], float]]:
    """Share explained, exponent and predictions of the power law, or of a constant."""
    if constant:
        mean = float(np.mean([point.value for point in points]))
        return 0.0, 0.0, lambda size: mean
    fitted = fit("power", points, **options)
    return fitted.r2, fitted.parameters["beta"].value, lambda size: fitted.predict(size).value


def planted_share(trials: int, *, constant: bool = False) -> tuple[float, ...]:
    """1 for each planted exponent that lies in the fitted interval, 0 otherwise."""
    if constant:  # a constant has the exponent 0, with no interval around it
        return (0.0,) * trials
    law = table("law").build("power_floor")
    true = {"alpha": 5.0, "beta": -0.35, "gamma": 0.1}
    sizes = 2.0 ** np.arange(8, 20)
    clean = law.log_value(law.theta(true)[None], sizes[:, None])[0]
    results = []
    for seed in range(trials):
        noise = generator(seed, purpose="learning_curves.planted").standard_normal(len(sizes))
        values = np.exp(clean + 0.02 * noise)
        points = [CurvePoint(size=m, value=v) for m, v in zip(sizes, values, strict=True)]
        beta = fit("power_floor", points, seed=seed).parameters["beta"]
        results.append(float(true["beta"] in beta))
    return tuple(results)


def known_rates(*, constant: bool = False) -> tuple[float, ...]:
    """How far fitted exponents are from those that are theorems.

    A mean's squared error falls as 1/m; a counted frequency's absolute error as m^(-1/2);
    the distance to the nearest of m points in the plane as m^(-1/2).
    """
    random = generator(0, purpose="learning_curves.rates")
    sizes = [2**i for i in range(4, 12)]
    curves = (
        (-1.0, [float((random.standard_normal(20000) ** 2).mean()) / m for m in sizes]),
        (-0.5, [float(np.abs(random.binomial(m, 0.3, 20000) / m - 0.3).mean()) for m in sizes]),
        (-0.5, [_nearest(random, m) for m in sizes]),
    )
    rates = []
    for exponent, values in curves:
        points = [CurvePoint(size=float(m), value=v) for m, v in zip(sizes, values, strict=True)]
        rates.append(abs(_law(points, constant, replicates=0)[1] - exponent))
    return tuple(rates)


def _nearest(random: np.random.Generator, count: int) -> float:
    gaps = []
    for _ in range(max(1, 2**19 // (100 * count))):
        points = random.random((100, count, 2)) - 0.5
        gaps.append(np.sqrt((points**2).sum(-1)).min(-1))
    return float(np.concatenate(gaps).mean())


def _enlarged(images_NHW: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The first ``size`` images, and beyond their number slightly turned and shifted copies.

    Returns:
        Images [size, 8, 8] and which original each is of.
    """
    from scipy import ndimage

    which = np.arange(size) % len(images_NHW)
    out = images_NHW[which].copy()
    random = generator(seed, purpose="learning_curves.augment")
    for i in range(len(images_NHW), size):
        turn, middle = np.deg2rad(random.uniform(-8, 8)), np.array([3.5, 3.5])
        matrix = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        # One interpolation for both, so that copies are not blurred twice.
        offset = middle - matrix @ middle + random.uniform(-0.4, 0.4, 2)
        out[i] = ndimage.affine_transform(out[i], matrix, offset, order=1)
    return out, which


def digits_curve(
    seed: int, sizes: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)
) -> list[CurvePoint]:
    """Error rates of a small network on held-out digits over nested training sets.

    Sets larger than the number of originals are filled up with augmented copies.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.neural_network import MLPClassifier
    except ImportError as cause:
        raise MissingExtraError("scikit-learn", "bench", "the claim learning_curves") from cause

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8) / 16.0
    points = []
    for size in sizes:
        errors = []
        # A small set's error depends on which images it got: more draws of it.
        seeds = 8 if size <= 256 else 4
        for turn in range(seeds):
            draws = generator(seed, purpose="learning_curves.digits", index=turn)
            order = draws.permutation(len(images))
            held, pool = order[:500], order[500:][:size]
            x, which = _enlarged(images[pool], size, seed + 1000 * turn)
            network = MLPClassifier(
                (64,), max_iter=max(40, 40960 // size), random_state=turn, alpha=1e-3, tol=0.0,
                n_iter_no_change=1000, batch_size=min(64, size),
            )  # fmt: skip
            with warnings.catch_warnings():
                # The number of passes is fixed on purpose.
                warnings.simplefilter("ignore", ConvergenceWarning)
                network.fit(x.reshape(size, -1), labels[pool[which]])
            wrong = network.predict(images[held].reshape(len(held), -1)) != labels[held]
            errors.append(float(wrong.mean()))
        mean, spread = float(np.mean(errors)), float(np.std(errors, ddof=1))
        trials = 500 * seeds
        points.append(
            CurvePoint(
                size=float(size), value=mean, spread=spread, trials=trials, metric="error rate"
            )
        )
    return points

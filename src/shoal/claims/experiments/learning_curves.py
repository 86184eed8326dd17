"""[77] LearningCurves: is generalisation error a power of the training data?

Source: Hestness et al., Deep Learning Scaling is Predictable, Empirically, 2017.

What is claimed here: character models (an LSTM and a Transformer) on the default corpus
follow a power law whose slope does not depend on the architecture and which predicts the
largest shard from the smaller ones; the best model's size grows as a power of the data;
error rates on augmented digits follow a steeper power law. And the fitter can be trusted:
it recovers planted parameters and rates that are theorems. The A/A run puts a constant,
"data does not matter", in the place of the law.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.learning_curves_charlm import (
    ARCHITECTURES,
    CharlmSetting,
    CharlmTexts,
    read_texts,
    train,
)
from shoal.claims.experiments.learning_curves_digits import digits_curve
from shoal.claims.experiments.tiny import corpus_of
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import require
from shoal.core.parts import part, table
from shoal.core.random import generator
from shoal.cost.scaling.curve import CurvePoint
from shoal.cost.scaling.fit import FittedLaw, fit

__all__ = ["LearningCurves", "best_size", "known_rates", "planted_share"]

CONSTANT = "a constant: data does not matter"


@part
class LearningCurves(BaseClaim):
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

    rows: ClassVar[tuple[int, ...]] = (77,)

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
        """Per architecture: [characters, parameters, mean loss, spread, seeds] of every run."""
        shards = [2**i for i in range(self.smallest, self.largest + 1)]
        rates = {name: self._tuned(name, texts, context.seed) for name in ARCHITECTURES}
        total = len(shards) * len(self.widths) * len(ARCHITECTURES)
        done = 0
        grid: dict[str, list[list[float]]] = {name: [] for name in ARCHITECTURES}
        for chars in shards:
            for width in self.widths:
                for name in ARCHITECTURES:
                    seeds = 3 if chars <= 2 ** (self.smallest + 1) else 1
                    losses, count = [], 0
                    for turn in range(seeds):
                        setting = CharlmSetting(
                            name, width, chars, context.seed + turn, rates[name], self._steps(chars)
                        )
                        loss, count = train(setting, texts)
                        losses.append(loss)
                    spread = float(np.std(losses, ddof=1)) if seeds > 1 else math.nan
                    grid[name].append(
                        [float(chars), float(count), float(np.mean(losses)), spread, float(seeds)]
                    )
                    done += 1
                    context.progress(f"{name} of width {width} on {chars} characters", done / total)
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
        constant, details = run.as_baseline, run.details
        curves = {name: best_curve(rows) for name, rows in grid.items()}
        r2, exponents, errors, sizes = [], {}, [], []
        offsets: dict[str, tuple[float, float]] = {}
        details |= {
            "grid": {name: [row[:3] for row in rows] for name, rows in grid.items()},
            "digits": [[p.size, p.value] for p in digits],
        }
        for name, points in curves.items():
            fitted = _fitted(points, constant)
            before = _fitted(points[:-1], constant)
            predicted = _value(before, points[:-1], points[-1].size)
            errors.append(abs(predicted / points[-1].value - 1))
            r2.append(fitted.r2 if fitted else 0.0)
            exponents[name] = fitted.parameters["beta"].value if fitted else 0.0
            sizes.append(0.0 if constant else best_size(grid[name]))
            if fitted is not None:
                middle = math.sqrt(points[0].size * points[-1].size)
                here = fitted.predict(middle)
                offsets[name] = (here.value, fitted.sigma / math.sqrt(len(points)))
                details[f"law.{name}"] = {
                    key: [value.value, value.low, value.high]
                    for key, value in fitted.parameters.items()
                }
        if len(offsets) == 2:
            (a, sa), (b, sb) = offsets.values()
            apart = abs(math.log(a / b)) / max(math.hypot(sa, sb), 1e-9)
            details["offsets"] = (
                f"{apart:.1f} standard errors apart"
                if apart > 2
                else "equal within two standard errors"
            )
        of_digits = _fitted(digits, constant)
        values = list(exponents.values())
        run.put("r2", r2)
        run.put("exponent", values)
        run.put("shallowest_exponent", values)
        run.put("largest_error", errors)
        run.put("exponent_difference", max(values) - min(values))
        run.put("size_exponent", np.median(sizes))
        run.put("digits_exponent", of_digits.parameters["beta"].value if of_digits else 0.0)
        details["size_exponents"] = sizes


def best_curve(rows: Sequence[Sequence[float]]) -> list[CurvePoint]:
    """The best model's loss at each size of data."""
    best_curve = []
    for chars in sorted({row[0] for row in rows}):
        best = min((row for row in rows if row[0] == chars), key=lambda row: row[2])
        spread = None if math.isnan(best[3]) else best[3]
        best_curve.append(
            CurvePoint(size=chars, value=best[2], spread=spread, metric="nats per character")
        )
    return best_curve


def best_size(rows: Sequence[Sequence[float]]) -> float:
    """Exponent of the best model's parameters over data.

    The best size lies between the sizes that were run: the lowest point of the parabola
    through the losses over log parameters, kept within one octave of those that were run.
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


def _fitted(points: Sequence[CurvePoint], constant: bool) -> FittedLaw | None:
    return None if constant else fit("power", points)


def _value(fitted: FittedLaw | None, points: Sequence[CurvePoint], size: float) -> float:
    if fitted is None:
        return float(np.mean([point.value for point in points]))
    return fitted.predict(size).value


def planted_share(trials: int, *, constant: bool = False) -> tuple[float, ...]:
    """1 for each planted exponent that lies in the fitted interval, 0 otherwise."""
    law = table("law").build("power_floor")
    true = {"alpha": 5.0, "beta": -0.35, "gamma": 0.1}
    sizes = 2.0 ** np.arange(8, 20)
    clean = law.log_value(law.theta(true)[None], sizes[:, None])[0]
    results = []
    for seed in range(trials):
        noise = generator(seed, purpose="learning_curves.planted").standard_normal(len(sizes))
        values = np.exp(clean + 0.02 * noise)
        if constant:
            results.append(0.0)  # a constant has the exponent 0, with no interval around it
            continue
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
    curves: dict[str, tuple[float, list[float]]] = {
        "mean": (-1.0, [float((random.standard_normal(20000) ** 2).mean()) / m for m in sizes]),
        "coin": (
            -0.5,
            [float(np.abs(random.binomial(m, 0.3, 20000) / m - 0.3).mean()) for m in sizes],
        ),
        "nearest": (-0.5, [_nearest(random, m) for m in sizes]),
    }
    known_rates = []
    for exponent, values in curves.values():
        points = [CurvePoint(size=float(m), value=v) for m, v in zip(sizes, values, strict=True)]
        fitted = None if constant else fit("power", points, replicates=0)
        known_rates.append(abs((fitted.parameters["beta"].value if fitted else 0.0) - exponent))
    return tuple(known_rates)


def _nearest(random: np.random.Generator, count: int) -> float:
    gaps = []
    for _ in range(max(1, 2**19 // (100 * count))):
        points = random.random((100, count, 2)) - 0.5
        gaps.append(np.sqrt((points**2).sum(-1)).min(-1))
    return float(np.concatenate(gaps).mean())

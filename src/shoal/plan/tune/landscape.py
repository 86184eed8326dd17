"""The shape of what was measured: its peaks, where it turns, which knobs matter, what moves along.

All comparisons are of logarithms, so of ratios, with one spread for all configurations that is
estimated from all of their repeats together. One run a point says nothing about shape: where
nothing was measured twice, nothing is significant. Levels are divided by the number of
comparisons (Bonferroni).

Sources: Hutter, Hoos and Leyton-Brown, An Efficient Approach for Assessing Hyperparameter
Importance, 2014 (functional analysis of variance by a forest); the questions are those of
Understanding the Impact of Hyperparameters on LLM Inference Performance, 2024.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shoal.core.errors import PlanError, require
from shoal.cost.gemm.forest import fit_forest
from shoal.plan.tune.protocols import SearchSpace, Setting, TuningResult

Row = tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """A line along one axis goes significantly one way and then significantly the other.

    Args:
        axis: which.
        config: where the line turns; before and after it is lower, or higher.
        peak: it goes up before and down after.
    """

    axis: str
    config: dict[str, Setting]
    peak: bool


@dataclass(frozen=True, eq=False)
class Landscape:
    """Configurations and how good they were, time after time.

    Args:
        space: what could be chosen.
        samples: positions on the axes -> measurements, each above 0.
        failed: positions that failed; they rank below all others.
    """

    space: SearchSpace
    samples: Mapping[Row, Sequence[float]]
    failed: frozenset[Row] = frozenset()

    def __post_init__(self) -> None:
        require(
            bool(self.samples),
            "tune.landscape",
            0,
            expected="at least one configuration that worked",
            error=PlanError,
        )
        least = min(min(values) for values in self.samples.values())
        require(least > 0, "tune.landscape", least, expected="measurements above 0")

    @classmethod
    def of(cls, study: TuningResult) -> Landscape:
        """The trials of a study that were measured wholly, and those that failed.

        Raises:
            PlanError: there are none that worked.
        """
        return cls(
            study.space,
            {
                study.space.row(trial.config): trial.samples or (trial.value or 0.0,)
                for trial in study.feasible
                if trial.share >= 1
            },
            frozenset(
                study.space.row(trial.config) for trial in study.trials if trial.value is None
            ),
        )

    @cached_property
    def level(self) -> dict[Row, float]:
        """Mean logarithm at each place."""
        return {row: float(np.mean(np.log(values))) for row, values in self.samples.items()}

    @cached_property
    def noise(self) -> tuple[float, int]:
        """Standard deviation of a logarithm, and how many degrees of freedom it is known by."""
        freedom = sum(len(values) - 1 for values in self.samples.values())
        if freedom == 0:
            return math.inf, 0
        squares = sum(
            float(((np.log(values) - self.level[row]) ** 2).sum())
            for row, values in self.samples.items()
        )
        return math.sqrt(squares / freedom), freedom

    @property
    def ratio(self) -> float:
        """The best over the worst."""
        return math.exp(max(self.level.values()) - min(self.level.values()))

    @property
    def best(self) -> dict[str, Setting]:
        """The configuration with the largest mean."""
        return self.space.config(max(self.level, key=lambda row: self.level[row]))

    def step(self, a: Row, b: Row, alpha: float) -> int:
        """1 if ``b`` is significantly better than ``a`` (one-sided), -1 if worse, else 0."""
        from scipy.stats import t as student

        spread, freedom = self.noise
        if freedom == 0:
            return 0
        width = math.sqrt(1 / len(self.samples[a]) + 1 / len(self.samples[b]))
        reach = float(student.ppf(1 - alpha, freedom)) * spread * width
        difference = self.level[b] - self.level[a]
        return int(difference > reach) - int(-difference > reach)

    def _neighbours(self, row: Row) -> list[Row]:
        """One step along an axis of numbers; any other value of an axis of words."""
        neighbours = []
        for place, axis in enumerate(self.space.axes):
            ordered = all(isinstance(v, int | float) for v in axis.values)
            for at in range(len(axis.values)):
                if at != row[place] and (not ordered or abs(at - row[place]) == 1):
                    neighbours.append((*row[:place], at, *row[place + 1 :]))
        return neighbours

    def peaks(self, alpha: float = 0.05) -> list[dict[str, Setting]]:
        """Local maxima: every neighbour failed or is significantly worse; best first.

        A place with a neighbour that was not tried is none.

        Args:
            alpha: chance that anything is reported which is none.
        """
        level = alpha / len(self.samples)
        results = []
        for row in self.samples:
            beside = self._neighbours(row)
            worked = [other for other in beside if other not in self.failed]
            if worked and all(
                other in self.samples and self.step(other, row, level) > 0 for other in worked
            ):
                results.append(row)
        return [self.space.config(row) for row in sorted(results, key=lambda r: -self.level[r])]

    def turns(self, alpha: float = 0.05) -> list[Turn]:
        """Where a line along an axis of numbers does not keep its direction.

        Args:
            alpha: chance that a line which keeps its direction is reported.
        """
        lines = []
        for place, axis in enumerate(self.space.axes):
            if not all(isinstance(v, int | float) for v in axis.values):
                continue
            groups: dict[Row, list[Row]] = {}
            for row in sorted(self.samples):
                groups.setdefault((*row[:place], *row[place + 1 :]), []).append(row)
            lines += [(axis.name, line) for line in groups.values() if len(line) > 2]
        steps = sum(len(line) - 1 for _, line in lines)
        turns = []
        for name, line in lines:
            before = 0
            for a, b in itertools.pairwise(line):
                # Either direction of every step: twice as many comparisons.
                now = self.step(a, b, alpha / (2 * steps))
                if now and before == -now:
                    turns.append(Turn(name, self.space.config(a), peak=now < 0))
                before = now or before
        return turns

    def effects(self, *, seed: int = 0) -> dict[tuple[str, ...], float]:
        """Share of the variance, over the whole space, that each axis and each pair explains.

        A forest learns the logarithms; its predictions over all configurations are taken apart.

        Raises:
            PlanError: the space is too large to be listed.
            MissingExtraError: scikit-learn is not installed.
        """
        rows = np.array(list(self.samples))
        values = np.array([self.level[tuple(row)] for row in rows.tolist()])
        forest = fit_forest(
            self.space.points(rows), values[:, None], trees=64, depth=None, seed=seed
        )
        sizes = [len(axis.values) for axis in self.space.axes]
        every = forest.predict(self.space.points(self.space.indices()))[:, 0].reshape(sizes)
        every = every - every.mean()
        total = float((every**2).mean())
        axes = range(len(sizes))
        main = {n: every.mean(axis=tuple(m for m in axes if m != n), keepdims=True) for n in axes}
        result: dict[tuple[str, ...], float] = {}
        names = self.space.names
        for n in axes:
            if sizes[n] > 1:
                result[(names[n],)] = float((main[n] ** 2).mean()) / total if total else 0.0
        for n, m in itertools.combinations(axes, 2):
            if sizes[n] > 1 and sizes[m] > 1:
                both = every.mean(axis=tuple(o for o in axes if o not in (n, m)), keepdims=True)
                rest = both - main[n] - main[m]
                result[(names[n], names[m])] = float((rest**2).mean()) / total if total else 0.0
        return dict(sorted(result.items(), key=lambda one: -one[1]))


def transfer_gain(home: Landscape, away: Landscape) -> list[float]:
    """What tuning again is worth: best of ``away`` over what ``home``'s best gives there, less 1.

    The best of many noisy means looks better than it is. So each round of measurements is judged
    with configurations that were chosen by the others: one number a round of ``away``, which may
    be below 0.

    Args:
        home: where the configuration was tuned, every place with as many rounds as any other.
        away: where it is used.

    Raises:
        ConfigError: fewer than two rounds, or not the same number everywhere.
        PlanError: they have no configuration in common.
    """
    common = sorted(set(home.samples) & set(away.samples))
    require(
        bool(common),
        "tune.transfer",
        0,
        expected="configurations that worked on both",
        error=PlanError,
    )
    counts = {len(land.samples[row]) for land in (home, away) for row in common}
    require(
        len(counts) == 1 and min(counts) >= 2,
        "tune.transfer.rounds",
        sorted(counts),
        expected="the same number of rounds everywhere, 2 or more",
    )
    there = np.log([home.samples[row] for row in common])
    here = np.log([away.samples[row] for row in common])
    gains = []
    for turn in range(here.shape[1]):
        others = [other for other in range(here.shape[1]) if other != turn]
        moved = int(there[:, others].mean(axis=1).argmax())
        tuned = int(here[:, others].mean(axis=1).argmax())
        gains.append(math.exp(here[tuned, turn] - here[moved, turn]) - 1)
    return gains


def summary(study: TuningResult) -> dict[str, Any]:
    """What was found, for other programs."""
    land = Landscape.of(study)
    return {
        "best": study.best.model_dump(mode="json"),
        "configurations": study.space.size,
        "best_over_worst": land.ratio,
        "noise": land.noise[0] if land.noise[1] else None,
        "peaks": land.peaks(),
        "turns": [
            {"knob": turn.axis, "config": turn.config, "peak": turn.peak} for turn in land.turns()
        ],
        "trials": [trial.model_dump(mode="json", exclude_none=True) for trial in study.trials],
    }

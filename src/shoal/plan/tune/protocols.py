"""What a tuner is given and what it gives back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np
from pydantic import model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError, PlanError, require
from shoal.core.random import generator

Setting = bool | int | float | str
Config = Mapping[str, Setting]
Progress = Callable[[int, int, str], None]

# More are not listed one by one.
MOST_CONFIGS = 2_000_000
# Of another machine's trials, so many are tried first.
WARM = 4


class Axis(Value):
    """One thing that can be chosen.

    Args:
        values: what it can be; numbers in ascending order.
    """

    name: str
    values: tuple[Setting, ...]

    @model_validator(mode="after")
    def _useful(self) -> Self:
        require(
            0 < len(self.values) == len(set(map(repr, self.values))),
            f"tune.{self.name}",
            self.values,
            expected="at least one value, each once",
        )
        return self

    def places(self) -> np.ndarray:
        """Where each value lies between 0 and 1: by its logarithm, or by its order."""
        if len(self.values) == 1:
            return np.zeros(1)
        plain = [v for v in self.values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(plain) == len(self.values) and min(plain) > 0:
            logs = np.log(plain)
            span = logs.max() - logs.min()
            return np.asarray((logs - logs.min()) / span)
        return np.linspace(0.0, 1.0, len(self.values))


class SearchSpace(Value):
    """Everything that can be chosen: the product of its axes."""

    axes: tuple[Axis, ...]

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [axis.name for axis in self.axes]
        require(
            0 < len(names) == len(set(names)),
            "tune.axes",
            ", ".join(names),
            expected="at least one axis, each once",
        )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes."""
        return tuple(axis.name for axis in self.axes)

    @property
    def size(self) -> int:
        """Configurations."""
        return math.prod(len(axis.values) for axis in self.axes)

    def indices(self) -> np.ndarray:
        """[size, axes]: every configuration as positions on the axes, the last axis fastest.

        Raises:
            PlanError: there are more than two million.
        """
        require(
            self.size <= MOST_CONFIGS,
            "tune.space",
            self.size,
            expected=f"at most {MOST_CONFIGS} configurations",
            hint="fix some of the axes",
            error=PlanError,
        )
        return np.array(list(itertools.product(*(range(len(a.values)) for a in self.axes))))

    def config(self, row: Sequence[int] | np.ndarray) -> dict[str, Setting]:
        """The configuration at these positions."""
        return {axis.name: axis.values[int(at)] for axis, at in zip(self.axes, row, strict=True)}

    def row(self, config: Config) -> tuple[int, ...]:
        """The positions of a configuration.

        Raises:
            ConfigError: it is not of this space.
        """
        require(
            set(config) == set(self.names),
            "tune.config",
            ", ".join(config),
            expected=f"the axes {', '.join(self.names)}",
        )
        for axis in self.axes:
            require(
                config[axis.name] in axis.values,
                f"tune.{axis.name}",
                config[axis.name],
                expected=f"one of {', '.join(map(str, axis.values))}",
            )
        return tuple(axis.values.index(config[axis.name]) for axis in self.axes)

    def has(self, config: Config) -> bool:
        """Whether the configuration is of this space."""
        return set(config) == set(self.names) and all(
            config[axis.name] in axis.values for axis in self.axes
        )

    def points(self, rows: np.ndarray) -> np.ndarray:
        """[N, axes] positions -> [N, axes] places between 0 and 1."""
        columns = [axis.places()[rows[:, n]] for n, axis in enumerate(self.axes)]
        return np.stack(columns, axis=1)

    def configs(self) -> Iterator[dict[str, Setting]]:
        """Every configuration."""
        for row in self.indices():
            yield self.config(row)


class TrialOutcome(Value):
    """What a configuration gave.

    Args:
        value: what is maximised; None where it failed.
        failure: why it failed.
        excess: logarithm of what it needs over what there is, such as of memory: below 0
            where it fits, above 0 where that is why it failed; None where unknown.
        samples: what it was measured to be, time after time, where ``value`` is their mean.
        share: how much of a whole measurement it had, such as of the requests.
    """

    value: float | None = None
    failure: str = ""
    excess: float | None = None
    samples: tuple[float, ...] = ()
    share: float = 1.0

    @model_validator(mode="after")
    def _either(self) -> Self:
        if (self.value is None) == (self.failure == ""):
            raise ConfigError("tune.outcome: give a value, or the reason of a failure")
        return self

    @property
    def doubt(self) -> float:
        """Variance of the mean of its samples; 0 where it was not measured again."""
        if len(self.samples) < 2:
            return 0.0
        return float(np.var(self.samples, ddof=1)) / len(self.samples)


Objective = Callable[[Config], TrialOutcome | float]


@runtime_checkable
class PartialObjective(Protocol):
    """An objective that supports partial measurements."""

    def part(self, config: Config, share: float) -> TrialOutcome:
        """What the configuration gives in this share of a measurement, above 0 to 1."""


class Trial(TrialOutcome):
    """A configuration that was tried."""

    config: dict[str, Setting]

    @classmethod
    def of(cls, config: Config, objective: Objective) -> Trial:
        """Try a configuration; a number that is none is a failure, and is remembered as one."""
        result = objective(config)
        if not isinstance(result, TrialOutcome):
            number = float(result)
            if math.isfinite(number):
                return cls(config=dict(config), value=number)
            return cls(config=dict(config), failure=f"the objective is {number}, no finite number")
        return cls(config=dict(config), **result.model_dump(exclude={"config"}))


class TuningResult(Value):
    """A search that was done.

    Args:
        tuner: the part that did it.
        trials: what was tried, in that order.
    """

    tuner: str
    space: SearchSpace
    trials: tuple[Trial, ...]
    seed: int = 0

    @property
    def feasible(self) -> list[Trial]:
        """Trials that did not fail."""
        return [trial for trial in self.trials if trial.value is not None]

    @property
    def best(self) -> Trial:
        """The best trial that did not fail, of those that had the largest share.

        Raises:
            PlanError: all failed; says why, most frequent reason first.
        """
        result = self.feasible
        if not result:
            reasons = [trial.failure for trial in self.trials]
            ordered = sorted(set(reasons), key=lambda r: -reasons.count(r))
            why = "; ".join(f"{reasons.count(r)} times: {r}" for r in ordered[:3])
            raise PlanError(
                f"tune: none of {len(self.trials)} trials is feasible ({why or 'none was made'}); "
                "widen the space, use more devices, or try more"
            )
        return max(result, key=lambda trial: (trial.share, trial.value or 0.0))


@runtime_checkable
class Tuner(Protocol):
    """A part of kind ``tuner``."""

    def tune(
        self,
        space: SearchSpace,
        objective: Objective,
        trials: int,
        *,
        seed: int = 0,
        history: Sequence[Trial] = (),
        elsewhere: Sequence[Trial] = (),
        progress: Progress | None = None,
    ) -> TuningResult:
        """Look for the configuration with the largest objective; none is tried twice.

        Args:
            space: what can be chosen.
            objective: what is maximised; its failures count as trials.
            trials: how many; fewer when the space has no more.
            seed: the same seed makes the same trials.
            history: trials that were made before, which count.
            elsewhere: trials of another machine. They do not count; the best of them are tried
                first.
            progress: called with (trials made, trials wanted, what was found).

        Raises:
            ConfigError: no trials, or a trial that stands twice in ``history``.
        """


def order(space: SearchSpace, seed: int, elsewhere: Sequence[Trial] = ()) -> np.ndarray:
    """[size] rows of the space, in which order they are tried: at random.

    First come the best of another machine. What this space does not have is left out.
    """
    places = generator(seed, purpose="tune random").permutation(space.size)
    best = sorted(
        (trial for trial in elsewhere if trial.value is not None),
        key=lambda trial: (-trial.share, -(trial.value or 0.0)),
    )
    first: list[int] = []
    for trial in best:
        if len(first) >= WARM:
            break
        if space.has(trial.config):
            sizes = [len(axis.values) for axis in space.axes]
            first.append(int(np.ravel_multi_index(space.row(trial.config), sizes)))
    rest = places[~np.isin(places, first)]
    return np.concatenate([np.array(first, dtype=places.dtype), rest])


def check(space: SearchSpace, trials: int, history: Sequence[Trial]) -> set[tuple[int, ...]]:
    """Rows that were tried before.

    Raises:
        ConfigError: no trials, or one that stands twice.
    """
    require(trials >= 1, "tune.trials", trials, expected="1 or more")
    seen: dict[tuple[int, ...], int] = {}
    for number, trial in enumerate(history, 1):
        row = space.row(trial.config)
        if row in seen:
            raise ConfigError(
                f"tune.history: trial {number} repeats trial {seen[row]} ({trial.config}); "
                "leave one out"
            )
        seen[row] = number
    return set(seen)

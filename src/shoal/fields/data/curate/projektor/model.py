"""Projektor: what a model would score on any mixture of sources, at sizes nobody has yet.

Source: Kang et al., Performance Scaling via Optimal Transport: Enabling Data Selection from
Partially Revealed Sources, 2023.

*Differs*: both stages work on the logarithm of the error instead of the score, so that a line in
the logarithm of the size is a power law of the error, and no score is above 1. The distance of a
mixture is that of all revealed points, weighted by the mixture, and so has no noise of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.curate.projektor.distance import LABEL_WEIGHT, MixtureDistance
from shoal.fields.data.curate.projektor.probes import Probe, drawn, linear_probe
from shoal.fields.data.curate.projektor.surface import (
    Floats,
    ScoreSurface,
    lattice,
    on_simplex,
    projected,
)
from shoal.fields.data.prune.protocols import PruneError, PruneExamples

SIZES = (200, 400)
"""Rows of the smaller and of the larger probes, by default."""

# Starts, steps and lengths of the search for a mixture.
_STARTS, _STEPS, _LENGTH, _CLOSE = 3, 20, 0.2, 1e-3


class MixtureChoice(NamedTuple):
    """A mixture and what it is predicted to score.

    Args:
        mixture: float64 [K], shares of the sources.
        score: share of the validation rows that a model gets right which has learned from it.
    """

    mixture: Floats
    score: float


class Projektor:
    """Predict scores of mixtures of sources from probes on few rows of each.

    Args:
        sources: rows that are revealed of each source, at least as many as the larger size.
        validation: rows that a model is to do well on.
        names: of the sources, for errors; empty for their numbers.
        sizes: rows of the smaller and of the larger probes.
        mixtures: that are probed, at least.
        probes: at each size of each mixture, on rows that are drawn again.
        label_weight: of the distance between labels, beside that between vectors.
        probe: trains a small model and scores it; the accuracy of logistic regression.
        seed: of what is drawn.

    Attributes:
        mixtures_: float64 [G, K], that were probed.
        distances_: float64 [G], of them from the validation data.
        scores_: float64 [2, G], mean scores of the probes at both sizes.

    Examples:
        >>> import numpy as np
        >>> from shoal.fields.data.prune.protocols import PruneExamples
        >>> draw = np.random.default_rng(0)
        >>> def rows(n, ones):
        ...     y = (draw.random(n) < ones).astype(np.int64)
        ...     return PruneExamples(draw.normal(y[:, None], 1.0, (n, 4)).astype("f4"), y, 2)
        >>> many_ones, many_zeros = rows(200, 0.95), rows(200, 0.05)
        >>> projektor = Projektor(
        ...     [many_ones, many_zeros], rows(300, 0.5), sizes=(50, 100), mixtures=12
        ... ).fit()
        >>> best = projektor.best_mixture(1000)
        >>> bool(0.3 < best.mixture[0] < 0.7 and best.score > projektor.predict([1, 0], 1000))
        True
    """

    def __init__(
        self,
        sources: Sequence[PruneExamples],
        validation: PruneExamples,
        *,
        names: Sequence[str] = (),
        sizes: tuple[int, int] = SIZES,
        mixtures: int = 66,
        probes: int = 4,
        label_weight: float = LABEL_WEIGHT,
        probe: Probe | None = None,
        seed: int = 0,
    ) -> None:
        self.sources, self.validation, self.names = sources, validation, names
        self.sizes, self.mixtures, self.probes = sizes, mixtures, probes
        self.label_weight, self.probe, self.seed = label_weight, probe, seed

    def fit(self, tick: Callable[[float], None] = lambda done: None) -> Self:
        """Train the probes, and fit both stages.

        Args:
            tick: called with the share of the probes that is done.

        Raises:
            PruneError: the sources or the sizes do not allow it.
        """
        if not 1 <= self.sizes[0] < self.sizes[1]:
            raise PruneError(
                f"sizes = {list(self.sizes)}: expected 1 or more rows, and then more of them"
            )
        count = len(self.sources)
        names = self.names or [str(number) for number in range(count)]
        _check(self.sources, self.validation, self.sizes[1], names)
        self.mixtures_ = lattice(count, max(self.mixtures, 6 * count))
        self._distance = MixtureDistance(self.sources, self.validation, self.label_weight)
        self.distances_ = np.array([self._distance.of(one)[0] for one in self.mixtures_])
        self.scores_ = np.zeros((2, len(self.mixtures_)))
        for at, mixture in enumerate(self.mixtures_):
            for which, size in enumerate(self.sizes):
                self.scores_[which, at] = self.probed(mixture, size, at)
            tick((at + 1) / len(self.mixtures_))
        self._surfaces = tuple(
            ScoreSurface.fit(self.mixtures_, self.distances_, values)
            for values in self.logarithms(self.scores_)
        )
        return self

    def probed(self, mixture: Sequence[float] | Floats, size: int, index: int = -1) -> float:
        """Mean score of the probes of a mixture, on revealed rows.

        Args:
            mixture: shares of the sources, with sum 1.
            size: rows, of which the sources must have revealed their shares.
            index: of what is drawn.
        """
        draw = generator(self.seed, purpose="projektor probes", step=size, index=index)
        score, mixture_K = self.probe or linear_probe, self._mixture(mixture)
        some = [drawn(self.sources, mixture_K, size, draw) for _ in range(self.probes)]
        return float(np.mean([score(one, self.validation) for one in some]))

    def predict(self, mixture: Sequence[float] | Floats, size: float) -> float:
        """The score of a model that learns from so many rows of a mixture.

        Args:
            mixture: shares of the sources, with sum 1.
            size: rows, 1 or more.

        Raises:
            PruneError: they are no shares of these sources, or it is no size.
        """
        mixture_K = self._mixture(mixture)
        return self._predict(mixture_K, self._distance.of(mixture_K)[0], _rows(size))

    def best_mixture(self, size: float, available: Sequence[int] = ()) -> MixtureChoice:
        """The mixture that is predicted to score best at a size, by projected gradient ascent.

        Args:
            size: rows, 1 or more.
            available: rows that there are of each source; empty for any number.

        Raises:
            PruneError: it is no size, or there are not so many rows.
        """
        size = _rows(size)
        most_K = np.minimum(np.array(available) / size if len(available) else np.inf, 1.0)
        most_K = np.broadcast_to(most_K, len(self.sources))
        if most_K.sum() < 1 - 1e-9:
            raise PruneError(f"size = {size:g}: the sources have {sum(available)} rows together")
        inside = (self.mixtures_ <= most_K + 1e-12).all(axis=1)
        starts = [MixtureChoice(on_simplex(np.zeros(len(most_K)), most_K), -math.inf)]
        for mixture_K, distance in zip(
            self.mixtures_[inside], self.distances_[inside], strict=True
        ):
            starts.append(MixtureChoice(mixture_K, self._predict(mixture_K, distance, size)))
        starts.sort(key=lambda one: -one.score)
        found = [self._ascended(one.mixture, most_K, size) for one in starts[:_STARTS]]
        return max(found, key=lambda one: one.score)

    def distance(self, mixture: Sequence[float] | Floats) -> tuple[float, Floats]:
        """A mixture's distance from the validation data, and the sources' mean potentials.

        Args:
            mixture: shares of the sources, with sum 1.

        Raises:
            PruneError: they are no shares of these sources.
        """
        return self._distance.of(self._mixture(mixture))

    def logarithms(self, scores: Floats) -> Floats:
        """Minus the logarithm of errors, none of which is less than half a validation row."""
        return np.asarray(-np.log(np.maximum(1 - scores, 0.5 / len(self.validation.X))))

    def _ascended(self, mixture_K: Floats, most_K: Floats, size: float) -> MixtureChoice:
        """Uphill from a mixture, in steps that become shorter where they lead down."""
        length = _LENGTH
        distance, means_K = self._distance.of(mixture_K)
        score = self._predict(mixture_K, distance, size)
        for _ in range(_STEPS):
            low_K, high_K = (one.gradient(mixture_K, distance, means_K) for one in self._surfaces)
            up_K = projected(low_K, high_K, self.sizes, size)
            up_K = up_K - up_K.mean()  # the constant that potentials leave open
            up_K *= length / max(float(np.linalg.norm(up_K)), 1e-30)
            next_K = on_simplex(mixture_K + up_K, most_K)
            there, means = self._distance.of(next_K)
            value = self._predict(next_K, there, size)
            if value > score:
                mixture_K, distance, means_K, score = next_K, there, means, value
            elif length < _CLOSE:
                break
            else:
                length /= 2
        return MixtureChoice(mixture_K, score)

    def _predict(self, mixture_K: Floats, distance: float, size: float) -> float:
        values = [one.values(mixture_K[None], np.array([distance])) for one in self._surfaces]
        return 1 - math.exp(-float(projected(values[0], values[1], self.sizes, size)[0]))

    def _mixture(self, mixture: Any) -> Floats:
        shares, count = np.asarray(mixture, np.float64), len(self.sources)
        if shares.shape != (count,) or not (shares >= 0).all() or abs(shares.sum() - 1) > 1e-6:
            raise PruneError(
                f"mixture = {shares.tolist()}: expected {count} shares, none below 0, with sum 1"
            )
        return np.asarray(shares / shares.sum())


def _rows(size: float) -> float:
    if not (math.isfinite(size) and size >= 1):
        raise PruneError(f"size = {size!r}: expected a number of rows, 1 or more")
    return float(size)


def _check(
    sources: Sequence[PruneExamples],
    validation: PruneExamples,
    most: int,
    names: Sequence[str],
) -> None:
    """Refuse sources that cannot be probed."""
    if len(sources) < 2:
        raise PruneError(f"sources: {len(sources)}; expected two or more, which can be mixed")
    if not len(validation.X):
        raise PruneError("validation: no rows; expected some of every class")
    wanted = np.unique(validation.labels)
    for name, source in zip((*names, "of validation"), (*sources, validation), strict=True):
        if not np.isfinite(source.X).all():
            raise PruneError(f"source {name}: vectors with NaN or infinity; remove or fill them")
    for name, source in zip(names, sources, strict=True):
        if source.X.shape[1:] != validation.X.shape[1:]:
            raise PruneError(
                f"source {name}: vectors of {source.X.shape[1]} numbers, the validation data's "
                f"have {validation.X.shape[1]}; every example needs as many"
            )
        if len(source.X) < most:
            raise PruneError(
                f"source {name}: {len(source.X)} rows are revealed; a probe may be of this source "
                f"alone, so expected {most} or more: reveal more, or choose smaller sizes"
            )
        missing = np.setdiff1d(wanted, source.labels)
        if len(missing):
            raise PruneError(
                f"source {name}: no revealed row is of class {missing[0]}, which the validation "
                "data have; reveal more of it, or leave the source out"
            )

"""Sparse coding as transformers of scikit-learn: BSC, TSC, DSC, MCA, MMCA and GSC.

Source: Exarchakis et al., ProSper: A Python Library for Probabilistic Sparse Coding with
Non-Standard Priors and Superpositions, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.data.sparse_coding.engine import LearningSettings, begin, infer, learn, spread
from shoal.fields.data.sparse_coding.inputs import check_points
from shoal.fields.data.sparse_coding.protocols import (
    CodingParams,
    Floats,
    SparseCodeError,
    Superposition,
)
from shoal.fields.data.sparse_coding.schedule import AnnealSchedule
from shoal.fields.data.sparse_coding.states import StateSpace

Annealing = AnnealSchedule | Mapping[str, Any] | None


class _SparseCoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """What the six share; a sub-class says which model is learned."""

    def __init__(
        self,
        n_components: int = 16,
        n_candidates: int | None = None,
        n_active: int | None = None,
        *,
        schedule: Annealing = None,
        max_iter: int = 100,
        n_init: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.n_candidates = n_candidates
        self.n_active = n_active
        self.schedule = schedule
        self.max_iter = max_iter
        self.n_init = n_init
        self.random_state = random_state

    def _choice(self) -> Choice:
        raise TypeError(f"{type(self).__name__} does not say which model is learned")

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn components, prior and noise.

        Args:
            X: [n, d] vectors; of deviation near 1, or any other that is far from rounding errors.
            y: not used.

        Raises:
            SparseCodeError: n_active > n_candidates, n_candidates > n_components, columns that are
                constant, or data that the model cannot explain.
        """
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        for name in ("n_components", "n_candidates", "n_active", "max_iter", "n_init"):
            value = getattr(self, name)
            if value is None and name in ("n_candidates", "n_active"):
                continue
            if not isinstance(value, int | np.integer) or value < 1:
                raise SparseCodeError(f"{name} = {value!r}: expected a number from 1 on")
        model, space = self._model(), self._space()
        check_points(X, "X")
        model.check(X)
        settings = LearningSettings(
            iterations=int(self.max_iter),
            schedule=AnnealSchedule.usual(X.shape[1], self.schedule, hot=model.hot),
            seed=int(check_random_state(self.random_state).randint(2**31 - 1)),
            deviation=float(X.std()),
            restarts=int(self.n_init),
        )
        state = begin(model, space, X, settings)
        with spread(model, space, X, pool=None, workers=1) as (sizes, expect):
            state = learn(model, space, state, settings, sizes, expect)
        self._params: CodingParams = state.params
        self.components_: Floats = state.params["W"]
        prior = state.params["prior"]
        self.prior_: Any = float(prior.sum()) if self._one_rate else prior
        variance = state.params["sigma2"]
        self.noise_: Any = variance if variance.ndim == 2 else np.sqrt(variance)
        if not variance.ndim:
            self.noise_ = float(self.noise_)
        self.free_energy_: Floats = np.asarray(state.free_energy)
        self.n_iter_: int = state.iteration
        self._n_features_out = space.num_components
        return self

    _one_rate = True

    def transform(self, X: Any) -> Floats:
        """Float64 [m, n_components]: expected causes of each vector.

        Args:
            X: [m, d].
        """
        batches = infer(self._model(), self._space(), *self._fitted(X))
        return np.concatenate([batch.means for batch in batches])

    def score(self, X: Any, y: Any = None) -> float:
        """Lower bound of the log likelihood of a vector, in nats, in the mean.

        Args:
            X: [m, d].
            y: not used.
        """
        batches = infer(self._model(), self._space(), *self._fitted(X))
        return float(np.concatenate([batch.evidence for batch in batches]).mean())

    def infer(self, X: Any, top: int = 10) -> tuple[Floats, Floats]:
        """The likeliest states of each vector's causes.

        Args:
            X: [m, d].
            top: states of each; fewer if there are not as many.

        Returns:
            Float64 [m, top, n_components] values of the causes, and float64 [m, top] their
            probabilities, greatest first.

        Raises:
            SparseCodeError: top is no number from 1 on.
        """
        if not isinstance(top, int | np.integer) or top < 1:
            raise SparseCodeError(f"top = {top!r}: expected a number from 1 on")
        space = self._space()
        some = min(int(top), space.num_states)
        states, chances = [], []
        for batch in infer(self._model(), space, *self._fitted(X)):
            best = np.argsort(-batch.posterior, axis=1, kind="stable")[:, :some]
            chances.append(np.take_along_axis(batch.posterior, best, axis=1))
            states += [
                [space.state(int(index), mine) for index in row]
                for row, mine in zip(best, batch.candidates, strict=True)
            ]
        return np.asarray(states), np.concatenate(chances)

    def sample(self, n: int = 1) -> tuple[Floats, Floats]:
        """Vectors [n, d] drawn from the model, and the causes [n, n_components] that made them.

        Args:
            n: how many.

        Raises:
            SparseCodeError: n is no number from 1 on.
        """
        check_is_fitted(self)
        if not isinstance(n, int | np.integer) or n < 1:
            raise SparseCodeError(f"n = {n!r}: expected a number from 1 on")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        draw = generator(seed, purpose="sparse samples")
        return self._model().sample(self._params, int(n), draw)

    def _fitted(self, X: Any) -> tuple[CodingParams, Floats]:
        check_is_fitted(self)
        return self._params, validate_data(self, X, dtype=np.float64, reset=False)

    def _model(self) -> Superposition:
        model: Superposition = table("superposition").build(self._choice(), where="method")
        return model

    def _space(self) -> StateSpace:
        components = int(self.n_components)
        some = min(8, components) if self.n_candidates is None else int(self.n_candidates)
        most = min(4, some) if self.n_active is None else int(self.n_active)
        return StateSpace(components, some, most, self._model().values)

    def __sklearn_tags__(self) -> Any:
        """Vectors of any sign, unless the model has none below 0."""
        tags = super().__sklearn_tags__()
        tags.input_tags.positive_only = self._model().non_negative
        tags.transformer_tags.preserves_dtype = []
        return tags


class BSC(_SparseCoder):
    """Binary sparse coding: causes are on or off, and are added up.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: probability that a cause is active.
        noise_: standard deviation of the noise.
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    def _choice(self) -> Choice:
        return Choice(name="bsc")


class TSC(_SparseCoder):
    """Ternary sparse coding: causes are -1, 0 or 1, and are added up.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: probability that a cause is active.
        noise_: standard deviation of the noise.
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    def _choice(self) -> Choice:
        return Choice(name="tsc")


class DSC(_SparseCoder):
    """Discrete sparse coding: causes have values of a set, and are added up.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        phi: values that a cause can have, 0 among them.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: float64 [m], probability of each value of phi but 0.
        noise_: standard deviation of the noise.
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    _one_rate = False

    def __init__(
        self,
        n_components: int = 16,
        n_candidates: int | None = None,
        n_active: int | None = None,
        *,
        phi: tuple[float, ...] = (0.0, 1.0, 2.0),
        schedule: Annealing = None,
        max_iter: int = 100,
        n_init: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.n_candidates = n_candidates
        self.n_active = n_active
        self.phi = phi
        self.schedule = schedule
        self.max_iter = max_iter
        self.n_init = n_init
        self.random_state = random_state

    def _choice(self) -> Choice:
        return Choice(name="dsc", options={"phi": self.phi})


class MCA(_SparseCoder):
    """Maximal causes: of those that are on, the largest is seen in each dimension.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: probability that a cause is active.
        noise_: standard deviation of the noise.
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    def _choice(self) -> Choice:
        return Choice(name="mca")


class MMCA(_SparseCoder):
    """Maximal causes by magnitude: the largest is seen in each dimension, with its sign.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: probability that a cause is active.
        noise_: standard deviation of the noise.
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    def _choice(self) -> Choice:
        return Choice(name="mmca")


class GSC(_SparseCoder):
    """Spike-and-slab sparse coding: causes are off, or Gaussian; they are added up.

    Args:
        n_components: causes that are learned.
        n_candidates: causes of a vector whose combinations are looked at, 1 to n_components; None
            for 8, or all of fewer.
        n_active: most causes of a vector at a time, 1 to n_candidates; None for 4, or all of
            fewer.
        noise: variance of the noise: one, one of each dimension, or a full covariance.
        slab: covariance of the causes: of each alone, or full.
        schedule: annealing, an ``AnnealSchedule`` or a dictionary of its fields; None for the
            usual one.
        max_iter: iterations, over which the schedule is stretched.
        n_init: starts of which the best is taken; several are learned on a sample.
        random_state: of the start and of the annealing.

    Attributes:
        components_: float64 [n_components, d].
        prior_: float64 [n_components], probability that each cause is active.
        noise_: standard deviation of the noise; [d] for ``diagonal``; for ``full`` the covariance
            [d, d].
        free_energy_: float64 [n_iter_], lower bound of the log likelihood of a vector, in nats.
        n_iter_: iterations.
    """

    _one_rate = False

    def __init__(
        self,
        n_components: int = 16,
        n_candidates: int | None = None,
        n_active: int | None = None,
        *,
        noise: Literal["scalar", "diagonal", "full"] = "scalar",
        slab: Literal["diagonal", "full"] = "full",
        schedule: Annealing = None,
        max_iter: int = 100,
        n_init: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.n_candidates = n_candidates
        self.n_active = n_active
        self.noise = noise
        self.slab = slab
        self.schedule = schedule
        self.max_iter = max_iter
        self.n_init = n_init
        self.random_state = random_state

    def _choice(self) -> Choice:
        return Choice(name="gsc", options={"noise": self.noise, "slab": self.slab})

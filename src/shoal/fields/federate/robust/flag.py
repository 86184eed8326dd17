"""Flag: the mean of updates, projected onto the subspace that most of them share.

Source: Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using
Convex Optimization, 2024.

p updates g_i, a subspace Y (P x m, orthonormal). An update's explained share is
v_i = |Y' g_i|^2 / |g_i|^2. Y minimizes sum_i sqrt(1 - v_i) + lambda / (p (p - 1)) sum_{i != j}
sqrt(1 - v_ij), where v_ij is the share of g_i - g_j, by iteratively reweighted singular vectors.

Nothing of size P x P, nor of P x m, is made: all updates lie in a space of p dimensions, whose
coordinates follow from their Gram matrix, and the result is a weighted sum of the updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived, FederationError
from shoal.fields.federate.robust.updates import gram, usable

_EPSILON = 1e-7
# Of the largest eigenvalue of the Gram matrix of unit vectors: below is rounding.
_RANK = 1e-12


@part
class FlagAggregator:
    """Project updates onto the subspace that most of them share, and average them.

    Args:
        m: dimensions of the subspace; ``auto`` for half of the updates, (p + 1) / 2 rounded up.
        pairs: weight lambda of the differences of updates in the objective.
        alpha: of the Beta distribution of explained shares; above 1 shares near 0 are avoided.
        scale: ``median``: an update longer than the median length is shortened to it; ``raw``:
            lengths stay.
        block: consecutive parameters that have a subspace of their own; 0 for one of all.
        iterations: of reweighting, at most.
        tolerance: relative change of the objective at which they end.
    """

    m: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    pairs: Annotated[float, Ge(0)] = 0.0
    alpha: Annotated[float, Ge(1)] = 1.0
    scale: Literal["median", "raw"] = "median"
    block: Annotated[int, Ge(0)] = 0
    iterations: Annotated[int, Ge(1)] = 5
    tolerance: Annotated[float, Ge(0)] = 1e-10

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """Fewer than half."""
        if count < 3:
            raise FederationError(f"robust = flag: {count} updates; at least 3 are needed")
        if self.m != "auto" and self.m > count:
            raise FederationError(
                f"robust = flag: m = {self.m} dimensions of {count} updates; take at most {count}"
            )
        return (count - 1) // 2

    def combine(self, arrived: Arrived) -> np.ndarray:
        """A Gram matrix, a small problem, a weighted sum; for each block."""
        given = usable(arrived)
        self.covers(len(given))
        width = self.block or len(given.deltas[0])
        parts, explained = [], []
        for at in range(0, len(given.deltas[0]), width):
            some = given.part(at, at + width)
            weights, fit = self.weights(gram(some.deltas))
            parts.append(some.sum(weights))
            explained.append(fit.explained)
        shares = np.mean(explained, axis=0).round(4).tolist()
        arrived.report["explained"] = dict(zip(given.clients, shares, strict=True))
        return np.concatenate(parts)

    def weights(self, products: np.ndarray) -> tuple[np.ndarray, FlagFit]:
        """Of each update in the result, [p], and the subspace.

        Args:
            products: Gram matrix of the updates, float64 [p, p].
        """
        count = len(products)
        lengths = np.sqrt(np.maximum(np.diag(products), 0.0))
        capped = np.ones(count)
        if self.scale == "median":
            np.divide(np.median(lengths), lengths, out=capped, where=lengths > np.median(lengths))
        inverse = np.divide(1.0, lengths, out=np.zeros(count), where=lengths > 0)
        # Unit vectors n_i = Q b_i with an orthonormal Q of P x r that is never made.
        values, vectors = np.linalg.eigh(products * inverse[:, None] * inverse)
        kept = values > _RANK * max(values[-1], 1e-300)
        root = np.sqrt(values[kept])
        unit = root[:, None] * vectors[:, kept].T
        fit = self.fit(unit, unit * lengths)
        if fit.basis.shape[1] == len(unit):
            # The subspace has every update: no projection, and no rounding of one.
            return capped / count, fit
        inside = fit.basis @ (fit.basis.T @ (unit @ (lengths * capped))) / count
        return inverse * (vectors[:, kept] @ (inside / root)), fit

    def fit(self, unit: np.ndarray, whole: np.ndarray) -> FlagFit:
        """The subspace of a few vectors in few dimensions.

        Args:
            unit: vectors of length 1, or 0 where an update is, [r, p].
            whole: the same in their length, [r, p].
        """
        rank, count = unit.shape
        m = min(-(-(count + 1) // 2) if self.m == "auto" else self.m, rank)
        columns, price = self._columns(unit, whole)
        true = (columns**2).sum(0) > 0.5
        weight = np.sqrt(price)
        best, history = None, []
        for _ in range(self.iterations + 1):
            basis = np.linalg.svd(columns * weight, full_matrices=False)[0][:, :m]
            share = np.clip(((basis.T @ columns) ** 2).sum(0), 0.0, 1.0)
            value = self._objective(share[true], price[true])
            explained = np.where(true, share, 1.0)[:count]
            if best is None or value < best.objective:
                best = FlagFit(basis, explained, value, ())
            history.append(value)
            if len(history) > 1 and abs(history[-2] - value) <= self.tolerance * abs(value):
                break
            pull = 0.5 / np.sqrt(1 - share + _EPSILON) + (self.alpha - 1) / (share + _EPSILON)
            weight = np.sqrt(price * np.where(true, pull, 0.0))
        assert best is not None
        return FlagFit(best.basis, best.explained, best.objective, tuple(history))

    def _columns(self, unit: np.ndarray, whole: np.ndarray) -> tuple[Any, Any]:
        """Unit vectors [r, q] of updates, then of differences; what each costs, [q]."""
        count = unit.shape[1]
        price = np.ones(count)
        if not self.pairs:
            return unit, price
        i, j = np.triu_indices(count, 1)
        apart = whole[:, i] - whole[:, j]
        far = np.linalg.norm(apart, axis=0)
        # Differences of equal updates are rounding, and have no direction.
        real = far > 1e-6 * np.maximum(*np.linalg.norm(whole, axis=0)[np.stack([i, j])])
        # Each pair stands twice in the sum over i != j.
        cost = np.full(int(real.sum()), 2 * self.pairs / (count * (count - 1)))
        columns = np.concatenate([unit, apart[:, real] / far[real]], axis=1)
        return columns, np.concatenate([price, cost])

    def _objective(self, share: np.ndarray, price: np.ndarray) -> float:
        lost = np.sqrt(1 - share + _EPSILON) - (self.alpha - 1) * np.log(share + _EPSILON)
        return float(price @ lost)


@dataclass(frozen=True, eq=False)
class FlagFit:
    """A subspace of few dimensions.

    Args:
        basis: orthonormal, [r, m].
        explained: share of each update, [p].
        objective: its value.
        history: values of all iterates; the best was kept.
    """

    basis: np.ndarray
    explained: np.ndarray
    objective: float
    history: Sequence[float]

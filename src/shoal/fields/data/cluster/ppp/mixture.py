"""Gaussian mixtures of weighted points, started from a partition.

scikit-learn's GaussianMixture takes no weights; with the same parameters its posteriors are these.

Source: Dempster, Laird, Rubin, Maximum Likelihood from Incomplete Data via the EM Algorithm, 1977;
shrinkage of covariances to a pooled one: Friedman, Regularized Discriminant Analysis, 1989.

Shapes: M points of D numbers, K components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.fields.data.cluster.ppp.points import Ids, WeightedPoints

# Added to each variance, as a share of the points' mean variance.
_RIDGE = 1e-6
# Change of log likelihood a row at which EM has converged. Shrunk covariances may also lower it.
_STILL = 1e-12
_LOG_2PI = float(np.log(2 * np.pi))


class CovarianceForm(NamedTuple):
    """What covariances have in common.

    Args:
        shared: all components have one; else each has its own, shrunk to the shared one as if
            D + 1 more points had that.
        diagonal: nothing off the diagonal.
    """

    shared: bool = False
    diagonal: bool = False

    def __str__(self) -> str:
        return f"{'shared' if self.shared else 'own'}, {'diagonal' if self.diagonal else 'full'}"


OWN = CovarianceForm()
FORMS = (
    CovarianceForm(True, False),
    CovarianceForm(False, False),
    CovarianceForm(True, True),
    CovarianceForm(False, True),
)


@dataclass(frozen=True)
class Mixture:
    """A Gaussian mixture.

    Args:
        shares: [K], add up to one.
        means: [K, D].
        covariances: [K, D, D].
    """

    shares: np.ndarray
    means: np.ndarray
    covariances: np.ndarray

    def take(self, order: Ids) -> Mixture:
        """The components in another order."""
        return Mixture(self.shares[order], self.means[order], self.covariances[order])

    def log_joint(self, X: np.ndarray) -> np.ndarray:
        """[M, K]: log density of each point together with each component."""
        roots = np.linalg.cholesky(self.covariances)
        halves = np.linalg.inv(roots)
        z = X @ halves.transpose(0, 2, 1) - (halves @ self.means[:, :, None]).transpose(0, 2, 1)
        size = np.log(np.einsum("kdd->kd", roots)).sum(axis=1) + 0.5 * X.shape[1] * _LOG_2PI
        joint: np.ndarray = np.log(self.shares) - size - 0.5 * np.einsum("kmd,kmd->mk", z, z)
        return joint

    def posterior(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Posterior [M, K] of the components, and log density [M]."""
        joint = self.log_joint(X)
        most = joint.max(axis=1, keepdims=True)
        joint -= most
        np.exp(joint, out=joint)
        mass = joint.sum(axis=1, keepdims=True)
        joint /= mass
        return joint, (np.log(mass) + most)[:, 0]


def mixture_of(
    points: WeightedPoints, posterior: np.ndarray, form: CovarianceForm = OWN
) -> Mixture:
    """The M step.

    Args:
        points: what is clustered.
        posterior: [M, K].
        form: of the covariances.
    """
    X = points.X
    member = (posterior * points.weights[:, None]).T
    mass = np.maximum(member.sum(axis=1), 1e-12)
    means = member @ X / mass[:, None]
    apart = X - means[:, None]
    scatter = apart.transpose(0, 2, 1) @ (apart * member[:, :, None])
    covariances = covariances_of(mass, scatter, form)
    return Mixture(mass / mass.sum(), means, covariances)


def covariances_of(mass: np.ndarray, scatter: np.ndarray, form: CovarianceForm) -> np.ndarray:
    """[K, D, D]: covariances from the mass [K] and scatter [K, D, D] of clusters."""
    dim = scatter.shape[1]
    pooled = scatter.sum(axis=0) / mass.sum()
    if form.diagonal:
        scatter, pooled = scatter * np.eye(dim), pooled * np.eye(dim)
    pooled = pooled + (_RIDGE * np.trace(pooled) / dim + 1e-300) * np.eye(dim)
    if form.shared:
        return np.repeat(pooled[None], len(mass), axis=0)
    extra = dim + 1.0
    own: np.ndarray = (scatter + extra * pooled) / (mass + extra)[:, None, None]
    return own


@dataclass(frozen=True)
class FittedMixture:
    """A mixture, with what it says of the points.

    Args:
        mixture: its parameters.
        posterior: [M, K].
        bic: of the points; smaller is better.
    """

    mixture: Mixture
    posterior: np.ndarray
    bic: float

    @property
    def labels(self) -> Ids:
        """Int64 [M]: the most likely component."""
        labels: Ids = self.posterior.argmax(axis=1)
        return labels


def fit_mixture(
    points: WeightedPoints,
    labels: Ids,
    *,
    steps: int,
    form: CovarianceForm = OWN,
) -> FittedMixture:
    """Begin at a partition and take steps of EM.

    Args:
        points: what is clustered.
        labels: [M], 0 to K - 1.
        steps: most steps; fewer where the likelihood stands still.
        form: of the covariances.
    """
    posterior = np.eye(int(labels.max()) + 1)[labels]
    before = -np.inf
    for _ in range(max(steps, 1)):
        mixture = mixture_of(points, posterior, form)
        posterior, density = mixture.posterior(points.X)
        fit = float(density @ points.weights)
        if abs(fit - before) < _STILL * points.total:
            break
        before = fit
    bic = -2.0 * fit + parameters(form, *mixture.means.shape) * float(np.log(points.total))
    return FittedMixture(mixture, posterior, bic)


def parameters(form: CovarianceForm, count: int, dim: int) -> float:
    """Free parameters of a mixture of so many components."""
    each = dim if form.diagonal else dim * (dim + 1) / 2
    return count - 1 + count * dim + (1 if form.shared else count) * each

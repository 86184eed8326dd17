"""How far a mixture of sources is from validation data: optimal transport with labels.

A point of a source and one of the validation data are as far apart as their vectors are, plus a
weight times how far their labels are. A label of a source means the points that have it there, and
two labels are as far apart as their points are by optimal transport. So a source with labels drawn
at random is far from the validation data even where its vectors are the same, and names of classes
do not matter.

Source: Alvarez-Melis and Fusi, Geometric Dataset Distances via Optimal Transport, 2020; Kang et
al., Performance Scaling via Optimal Transport: Enabling Data Selection from Partially Revealed
Sources, 2023.

Shapes: K sources, N points of all of them, M of the validation data, d numbers of a vector.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial.distance import cdist

from shoal.core.extras import import_extra
from shoal.fields.data.prune.protocols import PruneError, PruneExamples

Floats = npt.NDArray[np.float64]

EXACT_POINTS = 5000
"""Points of a side up to which transport is solved exactly."""

LABEL_WEIGHT = 3.0
"""Weight of the distance between labels, by default."""

_ITERATIONS = 10_000_000
# Of Sinkhorn's algorithm: strength of its entropy as a share of the mean cost, the largest ratio of
# a cost to it, beyond which exponentials vanish, iterations, and the error that ends them.
_ENTROPY, _RATIO, _SINKHORN_ITERATIONS, _ERROR = 0.01, 600.0, 1000, 1e-5
# Keeps POT from loading PyTorch.
_SWITCH = "POT_BACKEND_DISABLE_PYTORCH"


class Transport(NamedTuple):
    """The way from one set of points to another that costs least.

    Args:
        cost: of it.
        potentials: float64 [N], how the cost changes with each point's weight; only differences
            between them say anything.
    """

    cost: float
    potentials: Floats


def transport(a_N: Floats, b_M: Floats, cost_NM: Floats) -> Transport:
    """Exact up to 5,000 points of a side, by Sinkhorn's algorithm beyond.

    Args:
        a_N: weights of one side, with sum 1; zeros have potentials too.
        b_M: weights of the other, above 0, with sum 1.
        cost_NM: of a unit of weight from a point to another.

    Raises:
        PruneError: no solution was found.
    """
    pot, there = _pot(), a_N > 0
    weights, cost = (a_N, cost_NM) if there.all() else (a_N[there], cost_NM[there])
    if max(cost.shape) <= EXACT_POINTS:
        _, log = pot.emd(weights, b_M, cost, numItermax=_ITERATIONS, log=True)
        if log["warning"]:
            raise PruneError(f"optimal transport: {log['warning']}; give smaller sizes")
        other_M = log["v"]
    else:
        entropy = max(_ENTROPY * float(cost.mean()), float(cost.max()) / _RATIO) or 1.0
        _, log = pot.sinkhorn(
            weights,
            b_M,
            cost,
            entropy,
            numItermax=_SINKHORN_ITERATIONS,
            stopThr=_ERROR,
            log=True,
            warn=False,
        )
        other_M = entropy * np.log(log["v"])
    # The largest potentials that the other side allows. Of the exact solution they are its own
    # where the weight is above 0; at 0 they say what the first bit of weight would cost. With them,
    # any potentials of the other side bound the cost from below, and Sinkhorn's do so closely.
    potentials_N = np.array([(row_M - other_M).min() for row_M in cost_NM])
    return Transport(float(a_N @ potentials_N + b_M @ other_M), potentials_N)


class MixtureDistance:
    """Optimal transport from any mixture of sources to validation data, and its gradient.

    All points that are revealed take part, each with its source's share of the weight, so that
    nothing is drawn and the distance is a convex function of the mixture.

    Args:
        sources: points and classes that are revealed of each.
        validation: points and classes.
        label_weight: of the distance between labels.
    """

    def __init__(
        self,
        sources: Sequence[PruneExamples],
        validation: PruneExamples,
        label_weight: float = LABEL_WEIGHT,
    ) -> None:
        self._sizes = [len(source.X) for source in sources]
        self._cost_NM = np.concatenate(
            [
                euclidean(source.X, validation.X)
                + label_weight
                * label_distances(source, validation)[source.labels][:, validation.labels]
                for source in sources
            ]
        )
        self._weights_M = np.full(len(validation.X), 1 / len(validation.X))

    def of(self, mixture_K: Floats) -> tuple[float, Floats]:
        """The distance, and each source's mean potential.

        Args:
            mixture_K: shares of the sources.

        Returns:
            The distance, and float64 [K]: how it changes with each share, but for a constant.
        """
        weights = [np.full(n, share / n) for n, share in zip(self._sizes, mixture_K, strict=True)]
        found = transport(np.concatenate(weights), self._weights_M, self._cost_NM)
        parts = np.split(found.potentials, np.cumsum(self._sizes)[:-1])
        return found.cost, np.array([part.mean() for part in parts])


def calibrated(means_K: Floats, mixture_K: Floats) -> Floats:
    """Float64 [K]: how the distance changes as a share grows at the cost of all others.

    A source's mean potential minus the mean over all other points, so that the constant which
    potentials have no share in does not matter.

    Args:
        means_K: mean potentials of the sources.
        mixture_K: shares of the sources, each below 1.
    """
    others_K = means_K @ mixture_K - means_K * mixture_K
    return np.asarray(means_K - others_K / (1 - mixture_K))


def label_distances(source: PruneExamples, validation: PruneExamples) -> Floats:
    """Float64 [classes, classes]: from a class of the source to one of the validation data.

    Classes without points have distance 0; no point asks for them.
    """
    result = np.zeros((source.classes, validation.classes))
    ours, theirs = (
        [one.X[one.labels == c] for c in range(one.classes)] for one in (source, validation)
    )
    for at, some in enumerate(ours):
        for to, other in enumerate(theirs):
            if len(some) and len(other):
                weights = np.full(len(some), 1 / len(some)), np.full(len(other), 1 / len(other))
                result[at, to] = transport(*weights, euclidean(some, other)).cost
    return result


def euclidean(X: npt.NDArray[Any], Y: npt.NDArray[Any]) -> Floats:
    """Float64 [n, m]: distances between rows."""
    return np.asarray(cdist(X.astype(np.float64), Y.astype(np.float64)))


def _pot() -> Any:
    """POT, which would load PyTorch for tensors that it is never given here."""
    before = os.environ.get(_SWITCH)
    if "torch" not in sys.modules:
        os.environ[_SWITCH] = "1"
    try:
        return import_extra("ot", extra="fields", purpose="optimal transport")
    finally:
        if before is None:
            os.environ.pop(_SWITCH, None)

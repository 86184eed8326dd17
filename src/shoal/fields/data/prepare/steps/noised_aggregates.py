"""Counts and means with noise, released under a privacy budget."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge, Gt, Lt, MinLen

from shoal.core.parts import part
from shoal.fields.data.prepare.batches import PrepBatch
from shoal.fields.data.prepare.budget import PrivacyBudget
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.protocols import Learned, Preparation
from shoal.fields.data.prepare.sketches import Moments, Sketches


@part
class NoisedAggregates(Preparation):
    """Release the noised number and mean of columns; rows pass unchanged.

    Values are clipped to the bounds, so that one row changes a sum by no more than the larger of
    them, and the count by 1. Half of the budget of a column goes to each. Every release is entered
    in a file first, and refused when it would go beyond the budget. The noise is not that of
    the seed: who knows it could take it away.

    Args:
        bounds: column -> its least and greatest value, known without the data.
        epsilon: of this release, shared by the columns.
        delta: of this release; above 0 only with ``gaussian``.
        noise: ``laplace`` or ``gaussian``.
        releases: JSON file with all releases of this data; relative to where the run is started.
        total: epsilon that all releases in that file may have together.
        total_delta: that all releases in that file may have together.

    Source: Dwork, McSherry, Nissim, Smith, Calibrating Noise to Sensitivity in Private Data
    Analysis, 2006; Dwork, Roth, The Algorithmic Foundations of Differential Privacy, 2014
    (theorem A.1, epsilon below 1).

    Differs: noise is rounded to a grid of a thousandth of its scale, which hides most of what the
    digits of floating-point noise tell, but is no proof against it.
    """

    touches: ClassVar = "bounds"

    bounds: Annotated[Mapping[str, tuple[float, float]], MinLen(1)]
    epsilon: Annotated[float, Gt(0)] = 0.5
    delta: Annotated[float, Ge(0), Lt(1)] = 0.0
    noise: Literal["laplace", "gaussian"] = "laplace"
    releases: str = "privacy.json"
    total: Annotated[float, Gt(0)] = 1.0
    total_delta: Annotated[float, Ge(0), Lt(1)] = 1e-5

    def __post_init__(self) -> None:
        for name, (low, high) in self.bounds.items():
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise PrepareError(
                    f"noised_aggregates.bounds: {name} = [{low:g}, {high:g}]: expected the least "
                    "value before the greatest"
                )
        if (self.noise == "gaussian") != (self.delta > 0):
            raise PrepareError(
                f"noised_aggregates.delta = {self.delta:g}: expected a number above 0 with "
                "gaussian, and 0 with laplace"
            )
        if self.noise == "gaussian" and self.epsilon >= 1:
            raise PrepareError(
                f"noised_aggregates.epsilon = {self.epsilon:g}: below 1 with gaussian; use laplace"
            )

    def sketch(self, batch: PrepBatch) -> Sketches:
        """Moments of the clipped numbers."""
        names = batch.chosen(tuple(self.bounds), "number", "noised_aggregates")
        return {
            name: Moments.of(np.clip(batch.there(name), *self.bounds[name])[:, None])
            for name in names
        }

    def learn(self, sketches: Sketches) -> Learned:
        """Column -> its noised count and mean; the release is entered before it is made.

        Raises:
            BudgetError: the budget is exhausted; nothing is released.
        """
        PrivacyBudget(Path(self.releases), self.total, self.total_delta).spend(
            f"count and mean of {', '.join(self.bounds)}", self.epsilon, self.delta
        )
        random = np.random.default_rng(secrets.randbits(256))
        released = {}
        for name, (low, high) in self.bounds.items():
            one = sketches[name]
            assert isinstance(one, Moments)
            count = self._noised(random, float(one.count), 1.0)
            total = self._noised(random, float(one.count * one.mean[0]), max(abs(low), abs(high)))
            mean = min(max(total / count if count >= 1 else 0.0, low), high)
            released[name] = {"count": count, "mean": mean}
        return released

    def _noised(self, random: np.random.Generator, value: float, sensitivity: float) -> float:
        releases = 2 * len(self.bounds)
        epsilon, delta = self.epsilon / releases, self.delta / releases
        if self.noise == "laplace":
            scale = sensitivity / epsilon
            noise = float(random.laplace(0.0, scale))
        else:
            scale = sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon
            noise = float(random.normal(0.0, scale))
        grid = 2.0 ** math.floor(math.log2(scale / 1000))
        return round((value + noise) / grid) * grid

    def transform(self, batch: PrepBatch, learned: Learned) -> PrepBatch:
        """Rows as they are."""
        return batch

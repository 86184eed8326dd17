"""Multi-Krum: the mean of the updates that are nearest to their neighbours.

Source: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
2017, section 4.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from shoal.core.parts import part
from shoal.fields.federate.protocols import Arrived, FederationError
from shoal.fields.federate.robust.updates import (
    Attackers,
    assumed,
    distances,
    krum_scores,
    usable,
)


@part
class MultiKrum:
    """The mean of the ``m`` updates with the smallest scores of Krum.

    Args:
        f: wrong updates that are assumed; ``auto`` for just under a third.
        m: updates of the mean; ``auto`` for n - f.
    """

    f: Attackers = "auto"
    m: Annotated[int, Ge(1)] | Literal["auto"] = "auto"

    linear: ClassVar = False
    folds: ClassVar = False

    def covers(self, count: int) -> int:
        """As many as are assumed; n >= 2 f + 3."""
        f = assumed(self.f, count, (count - 3) // 2, "multi_krum", "2 f + 3")
        if self.m != "auto" and self.m > count:
            raise FederationError(
                f"robust = multi_krum: m = {self.m} of {count} updates; take at most {count - f}"
            )
        return f

    def combine(self, arrived: Arrived) -> np.ndarray:
        """Scores from one Gram matrix, then one weighted sum."""
        given = usable(arrived)
        f = self.covers(len(given))
        m = len(given) - f if self.m == "auto" else self.m
        order = np.argsort(krum_scores(distances(given.deltas), f), kind="stable")
        weights = np.zeros(len(given))
        weights[order[:m]] = 1 / m
        arrived.report["chosen"] = sorted(given.clients[at] for at in order[:m])
        chosen = np.flatnonzero(weights)
        return given.only(chosen).sum(weights[chosen])

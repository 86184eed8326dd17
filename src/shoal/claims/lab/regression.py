"""Linear regression of nodes without a server: distances to the closed form, and what they cost.

Models count as close where the mean squared distance of the nodes to the optimum is 1e-6 of what it
was. Methods start from the same models and see the same losses.
"""

from __future__ import annotations

import itertools
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoal.claims.lab.synchronous_gossip import adom_plus, gradient_tracking
from shoal.fields.federate.gossip.execute import GossipRun, virtual
from shoal.fields.federate.gossip.job import GossipJob
from shoal.fields.federate.gossip.planning import plan_gossip, start_seed
from shoal.fields.running import RunProgress
from shoal.machine import load

CLOSE = 1e-6
"""Of the squared distance at the beginning."""

# Gradients after which a method is given up.
_MOST = 400_000
# Of gradient tracking: steps, in 1/L, and shares of the own model.
_STEPS, _LAZY = np.geomspace(1e-2, 1, 13), (0.0, 0.3, 0.5)


class GossipCost(NamedTuple):
    """Gradients and edge activations of all nodes together; infinite if never close."""

    gradients: float
    activations: float


class DistanceRun(GossipRun):
    """A run that ends where its models are close to the optimum.

    Attributes:
        distance: the newest, squared, over the first.
        wanted: at which it ends.
    """

    distance, wanted, _first = 1.0, CLOSE, 0.0

    @cached_property
    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """H [n, P, P] and b [n, P] of the losses x^T H x / 2 - b^T x + c of the nodes."""
        rows = [self.setting.train.x[some] for some in self.setting.rows]
        H = [2 * one[:, :-1].T @ one[:, :-1] / len(one) for one in rows]
        return np.stack(H), np.stack([2 * one[:, :-1].T @ one[:, -1] / len(one) for one in rows])

    @cached_property
    def optimum(self) -> np.ndarray:
        """Of the mean of the losses, [P]."""
        H, b = self.moments
        return np.linalg.solve(H.sum(axis=0), b.sum(axis=0))

    def far(self, models: np.ndarray) -> float:
        """Mean squared distance of models [n, P]."""
        return float(((models - self.optimum) ** 2).sum(axis=1).mean())

    def test(self, done: float, now: float, messages: int, models: list[np.ndarray]) -> None:
        """Measure the distance too."""
        super().test(done, now, messages, models)
        self._first = self._first or self.far(self.begin)
        self.distance = self.far(np.stack(models)) / self._first

    def over(self, done: float, now: float) -> bool:
        """Close enough, or at its end."""
        return self.distance <= self.wanted or super().over(done, now)

    @cached_property
    def begin(self) -> np.ndarray:
        """The models with which the nodes begin, [n, P]."""
        return np.stack([one.start(start_seed(self.job, at)) for at, one in enumerate(self.works)])

    def bounds(self) -> tuple[float, float]:
        """Mu and L of all losses."""
        low, high = zip(*(work.curvature() for work in self.works), strict=True)
        return min(low), max(high)

    def dadao(self) -> GossipCost:
        """Of the run itself, on the virtual clock."""
        outcome = virtual(self)
        if self.distance > self.wanted:
            return GossipCost(float("inf"), float("inf"))
        gradients = sum(one["count"] for one in outcome.details["nodes"])
        return GossipCost(float(gradients), outcome.measured["messages"] / 2)

    def adom(self) -> GossipCost:
        """Of ADOM+ with multi-consensus."""
        mu, smooth = self.bounds()
        return self._reached(partial(adom_plus, mu=mu, smoothness=smooth))

    def tracking(self) -> GossipCost:
        """Of gradient tracking with the best of its steps."""
        smooth = self.bounds()[1]
        best = GossipCost(float("inf"), float("inf"))
        for step, lazy in itertools.product(_STEPS[::-1], _LAZY):
            method = partial(gradient_tracking, step=step / smooth, lazy=lazy)
            best = min(best, self._reached(method, min(best.gradients, _MOST)))
        return best

    def _reached(self, method: Any, most: float = _MOST) -> GossipCost:
        H, b = self.moments
        steps = method(
            self.setting.graph, lambda at: np.einsum("nij,nj->ni", H, at) - b, self.begin
        )
        first = self.far(self.begin)
        for models, gradients, activations in steps:
            far = self.far(models) / first
            if far <= CLOSE:
                return GossipCost(float(gradients), float(activations))
            if not far < 1e6 or gradients > most:
                break
        return GossipCost(float("inf"), float("inf"))


def distance_run(
    folder: Path, seed: int, topology: str, nodes: int, *, spread: float, clock: str
) -> DistanceRun:
    """DADAO on regression whose features have variances from 1 to ``spread``."""
    values: dict[str, Any] = {
        "data": {"name": "regression", "owners": nodes, "spread": spread, "rows": 400},
        "partition": "natural", "learner": "least_squares", "nodes": str(nodes), "seed": seed,
        "topology": topology, "policy": {"name": "dadao", "l2": 0.0}, "rounds": 4000,
        "clock": clock, "hosts": nodes,
    }  # fmt: skip
    plan = plan_gossip(GossipJob.model_validate(values), load("laptop"))
    return DistanceRun(plan, RunProgress(folder, None, lambda *_, **__: None, None))

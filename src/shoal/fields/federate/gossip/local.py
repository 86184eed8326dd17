"""The work of a node: a learner on the node's examples, and none at all for plans."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np

from shoal.fields.federate.gossip.protocols import ConvexLearner, Layout
from shoal.fields.federate.learn.protocols import Examples, Learner, Learning, LocalSettings
from shoal.fields.federate.protocols import FederationError, LocalJob


class LearnedWork:
    """What a learner does with the examples of one node.

    Args:
        learner: the part.
        learning: made of it; shared by the nodes of a process.
        examples: of the node.
        settings: of its training.
        steps: of a round.
        place: number of the node, and of all nodes.
        alone: held while it computes, where several threads share ``learning``.
    """

    def __init__(
        self,
        learner: Learner,
        learning: Learning,
        examples: Examples,
        settings: LocalSettings,
        steps: int,
        place: tuple[int, int],
        alone: threading.Lock,
    ) -> None:
        self._learner, self._learning, self._examples = learner, learning, examples
        self._settings, self._steps, self._place, self._alone = settings, steps, place, alone
        self.layout: Layout = learning.layout
        self._dtype = learning.start(0).dtype
        self._all = replace(settings, lr=1.0, momentum=0.0, prox=0.0, batch=len(examples))

    @property
    def size(self) -> int:
        """Numbers of the model."""
        return self._learning.size

    def start(self, seed: int) -> np.ndarray:
        """Initialized from the seed."""
        with self._alone:
            return self._learning.start(seed)

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        """Local steps; every node and round has batches of its own."""
        me, nodes = self._place
        return self._fit(model, number * nodes + me, self._steps, self._settings)

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        """By one step of length 1, in the precision of the learner."""
        given = model.astype(self._dtype)
        me, nodes = self._place
        settings = replace(self._all, batch=self._settings.batch) if number else self._all
        after, _ = self._fit(given, number * nodes + me, 1, settings)
        result: np.ndarray = (given - after).astype(np.float64)
        return result

    def _fit(
        self, model: np.ndarray, number: int, steps: int, settings: LocalSettings
    ) -> tuple[np.ndarray, float]:
        client = f"n{self._place[0]}"
        job = LocalJob(number=number, client=client, version=0, steps=steps, started=0.0)
        with self._alone:
            return self._learning.fit(model, self._examples, job, settings)

    def curvature(self) -> tuple[float, float]:
        """Mu and L, if the learner knows."""
        if not isinstance(self._learner, ConvexLearner):
            raise FederationError(
                f"learner: {type(self._learner).__name__} knows no bounds of its curvature; take "
                "logistic or least_squares, or give the policy mu and smoothness"
            )
        return self._learner.curvature(self._examples)


class NoWork:
    """Nothing is learned: what plans drive."""

    layout: Layout = (("none", (1,)),)
    size = 1

    def start(self, seed: int) -> np.ndarray:
        """Zero."""
        return np.zeros(1)

    def train(self, model: np.ndarray, number: int) -> tuple[np.ndarray, float]:
        """The same."""
        return model, 0.0

    def gradient(self, model: np.ndarray, number: int = 0) -> np.ndarray:
        """Of |x|^2 / 2."""
        return model

    def curvature(self) -> tuple[float, float]:
        """Of |x|^2 / 2."""
        return 1.0, 1.0

"""SASRec as a recommender."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from shoal.core.parts import part
from shoal.fields.retrieve.recommend.protocols import (
    RecommendCost,
    RecommendTask,
    TrainedRecommender,
    UserEvents,
)


@part
class SASRec:
    """A transformer with softmax attention, of as many layers.

    Source: Kang and McAuley, Self-Attentive Sequential Recommendation, 2018; with the loss of HSTU.
    """

    name: ClassVar = "sasrec"

    def estimate(self, task: RecommendTask, events: UserEvents) -> RecommendCost:
        """From some steps on this machine."""
        from shoal.fields.retrieve.recommend.networks import shape_of, timed_cost
        from shoal.model.hstu import TransformerLayer

        return timed_cost(task, shape_of(task), TransformerLayer, events)

    def train(
        self, task: RecommendTask, events: UserEvents, tick: Callable[[float, str], None]
    ) -> TrainedRecommender:
        from shoal.fields.retrieve.recommend.networks import LearnedItems, learn, shape_of
        from shoal.model.hstu import TransformerLayer

        model = learn(task, shape_of(task), TransformerLayer, events, tick)
        return LearnedItems(model, task, self.name)

"""HSTU as a recommender."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.fields.retrieve.recommend.protocols import (
    RecommendCost,
    RecommendTask,
    TrainedRecommender,
    UserEvents,
)


@part
class HSTURecommender:
    """Pointwise attention without a softmax, with a gate in place of a feed-forward block.

    Source: Zhai et al., Actions Speak Louder than Words, 2024.

    Args:
        alpha: of stochastic length: histories longer than length^(alpha / 2) are mostly looked at
            in as many of their events while it learns; 2 for whole histories.
        weights: of attention: ``silu``, or ``softmax`` for comparison.
    """

    alpha: Annotated[float, Gt(1), Le(2)] = 2.0
    weights: Literal["silu", "softmax"] = "silu"
    name: ClassVar = "hstu"

    def estimate(self, task: RecommendTask, events: UserEvents) -> RecommendCost:
        """From some steps on this machine."""
        from shoal.fields.retrieve.recommend.networks import shape_of, timed_cost
        from shoal.model.hstu import HSTULayer

        shape = shape_of(task, self.weights)
        return timed_cost(task, shape, HSTULayer, events, alpha=self.alpha)

    def train(
        self, task: RecommendTask, events: UserEvents, tick: Callable[[float, str], None]
    ) -> TrainedRecommender:
        from shoal.fields.retrieve.recommend.networks import LearnedItems, learn, shape_of
        from shoal.model.hstu import HSTULayer

        shape = shape_of(task, self.weights)
        model = learn(task, shape, HSTULayer, events, tick, alpha=self.alpha)
        return LearnedItems(model, task, f"hstu.{self.weights}")

"""How the arms of the claim about HSTU learn and are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.retrieve.recommend.events import EventSplit
from shoal.fields.retrieve.recommend.protocols import RecommendTask, measures
from shoal.kernel.threads import torch_threads

_ITEMS = 4000


def task_of(length: int, seed: int, **other: Any) -> RecommendTask:
    """One pass over records in their order, unless ``other`` says otherwise.

    The learning rate was chosen, for all arms alike, on records of another seed.
    """
    words: dict[str, Any] = {"items": _ITEMS, "dim": 50, "blocks": 4, "heads": 2}
    words |= {"epochs": 1, "batch": 16, "lr": 1e-2, "dropout": 0.0, "negatives": 128}
    words |= {"temperature": 0.05, "shuffle": False, "sparse": False, "timed": False}
    return RecommendTask(length=length, seed=seed, **{**words, **other})


def hits_of(split: EventSplit, task: RecommendTask, name: str, options: dict[str, Any]) -> float:
    """The hit rate among ten of a recommender that has learned."""
    method = table("recommender").build(Choice(name=name, options=options), where="method")
    with torch_threads(1):
        trained = method.train(task, split.train, lambda done, text: None)
        return measures(trained.ranks(split.test)[split.judged])["hr10"]


def cached_and_single(candidates: int, seed: int) -> tuple[Callable[[], np.ndarray], ...]:
    """Scores of candidates behind 90 events: whose keys are kept, and whose are not."""
    from shoal.fields.retrieve.recommend.ranker import HSTURanker

    draw = np.random.default_rng(seed)
    ranker = HSTURanker(_ITEMS, 2, length=100, seed=seed)
    for item in draw.integers(0, _ITEMS, 90):
        ranker.observe("user", int(item), int(draw.integers(2)))
    items = draw.integers(0, _ITEMS, candidates)

    def cached() -> np.ndarray:
        return ranker.scores("user", items)

    def singly() -> np.ndarray:
        scores = []
        for item in items:
            ranker.drop("user")
            scores.append(ranker.scores("user", np.array([item])))
        return np.concatenate(scores)

    return cached, singly

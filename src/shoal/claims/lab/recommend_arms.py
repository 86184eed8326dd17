"""How the arms of the claim about HSTU learn and are asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.fields.retrieve.recommend.events import (
    CATEGORIES,
    EventSplit,
    released_items,
    stream_categories,
)
from shoal.fields.retrieve.recommend.protocols import RecommendTask, measures
from shoal.kernel.threads import torch_threads

_ITEMS, _EVENTS = 4000, 64


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


def best_hits(records: int, split: EventSplit, seed: int) -> float:
    """The hit rate of a recommender that knows all categories and what is released.

    It names items of the category that is likeliest by the record's own counts, and is right as if
    no event had a category that is new to its record.

    Args:
        records: of which the last were held out.
        split: of drawn streams of the usual items.
        seed: of the streams.
    """
    draw = generator(seed, purpose="event streams")
    of = stream_categories(_ITEMS, CATEGORIES, draw)
    first, hits = records - len(split.test), []
    for record in range(len(split.test)):
        released = of[: released_items(_ITEMS, (first + record) / records)]
        size = np.bincount(released, minlength=CATEGORIES)
        seen = np.eye(CATEGORIES)[of[split.test.items[split.test.offsets[record] :][:_EVENTS]]]
        counts = seen.cumsum(0)[:-1]
        hits.append((10 * counts / size).max(1) / np.arange(1, _EVENTS))
    return float(np.mean(hits))


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

"""The most popular items, for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from shoal.core.files import write_json
from shoal.core.parts import part
from shoal.fields.retrieve.recommend.protocols import RecommendCost, RecommendTask, UserEvents


@part
class PopularItems:
    """What most users had."""

    name: ClassVar = "popular"

    def estimate(self, task: RecommendTask, events: UserEvents) -> RecommendCost:
        """Counting is nothing beside reading."""
        return RecommendCost(event_s=1e-8, parameters=task.items, personal=False)

    def train(
        self, task: RecommendTask, events: UserEvents, tick: Callable[[float, str], None]
    ) -> PopularCounts:
        return PopularCounts(np.bincount(events.items, minlength=task.items))


@dataclass(frozen=True)
class PopularCounts:
    """How often each item came, int64 [items]."""

    counts: np.ndarray

    def ranks(self, events: UserEvents) -> np.ndarray:
        """The same for every history; equal counts in the order of items."""
        place = np.empty(len(self.counts), np.int64)
        place[np.argsort(-self.counts, kind="stable")] = np.arange(len(self.counts))
        behind = np.ones(len(events.items), bool)
        behind[events.offsets[:-1]] = False
        ranks: np.ndarray = place[events.items[behind]]
        return ranks

    def scores(self, items: np.ndarray, times: np.ndarray) -> np.ndarray:
        return self.counts.astype(np.float32)

    def save(self, directory: Path) -> Sequence[str]:
        write_json(directory / "popular.json", self.counts.tolist())
        return ["popular.json"]

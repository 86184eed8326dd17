"""What recommenders promise, and values that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from shoal.core.config import Value
from shoal.core.errors import ConfigError


class EventError(ConfigError, ValueError):
    """UserEvents, or a question about them, that a recommender cannot use."""


@dataclass(frozen=True)
class UserEvents:
    """Events of users, those of one behind each other in the order of time.

    Args:
        offsets: int64 [U + 1]: user u has the events from ``offsets[u]`` to ``offsets[u + 1]``.
        items: int64 [E], from 0.
        times: float64 [E], seconds.
        item_names: of each item.
        timed: the times are known, not made up from the order.
    """

    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray
    item_names: Sequence[str]
    timed: bool = True

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Events of each user, int64 [U]."""
        return np.diff(self.offsets)

    def chosen(self, users: np.ndarray, first: np.ndarray, last: np.ndarray) -> UserEvents:
        """Some events of some users: from ``first`` to before ``last``, counted from each begin."""
        begins, counts = self.offsets[users] + first, last - first
        ends = np.cumsum(counts)
        rows = np.repeat(begins - ends + counts, counts) + np.arange(counts.sum())
        return UserEvents(
            offsets=np.concatenate([[0], ends]).astype(np.int64),
            items=self.items[rows],
            times=self.times[rows],
            item_names=self.item_names,
            timed=self.timed,
        )


class RecommendTask(Value):
    """How a recommender learns.

    Args:
        items: that there are.
        length: most events of a sequence.
        dim: of an event.
        blocks: layers.
        heads: of attention.
        epochs: passes over the events.
        batch: sequences of a step.
        lr: learning rate of AdamW.
        dropout: of the output of a layer.
        negatives: items drawn for each sequence, against which the right one is chosen.
        temperature: by which cosines are divided.
        shuffle: sequences come in another order in each pass; in that of the data without.
        sparse: rows of the table that a step does not touch stay as they are; for many items.
        timed: the times of events are known.
        seed: of weights, order and negatives.
    """

    items: int
    length: int
    dim: int
    blocks: int
    heads: int
    epochs: int
    batch: int
    lr: float
    dropout: float
    negatives: int
    temperature: float
    shuffle: bool
    sparse: bool
    timed: bool
    seed: int


class RecommendCost(Value):
    """What learning costs.

    Args:
        event_s: seconds of each event in each pass.
        parameters: that are learned.
        personal: what is learned tells users apart.
    """

    event_s: float
    parameters: int
    personal: bool = True


class TrainedRecommender(Protocol):
    """A recommender that has learned."""

    def ranks(self, events: UserEvents) -> np.ndarray:
        """Ranks, from 0, of each event's item among all items, given the events before it.

        Returns:
            int64 [E - U]: of all events but the first of each user.
        """

    def scores(self, items: np.ndarray, times: np.ndarray) -> np.ndarray:
        """Scores of all items behind a history, float32 [items]; larger is better.

        Args:
            items: int64 [N], at least one.
            times: float64 [N], seconds.
        """

    def save(self, directory: Path) -> Sequence[str]:
        """Write it; the names of the files."""


@runtime_checkable
class Recommender(Protocol):
    """A way to say what a user does next: a part of kind ``recommender``."""

    def estimate(self, task: RecommendTask, events: UserEvents) -> RecommendCost:
        """What learning costs on this machine."""

    def train(
        self, task: RecommendTask, events: UserEvents, tick: Callable[[float, str], None]
    ) -> TrainedRecommender:
        """Learn from events; ``tick`` is called with the share that is done."""


def measures(ranks: np.ndarray, k: int = 10) -> Mapping[str, float]:
    """Hit rate and normalised gain at k of ranks from 0.

    Args:
        ranks: int64 [N].
        k: recommendations that are shown.
    """
    hit = ranks < k
    gain = np.where(hit, 1 / np.log2(ranks + 2), 0.0)
    return {f"hr{k}": float(hit.mean()), f"ndcg{k}": float(gain.mean())}

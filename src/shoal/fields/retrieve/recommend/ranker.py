"""Ranking candidates by the action that a user would take, from a history that is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.random import generator, seed64
from shoal.fields.retrieve.recommend.protocols import EventError, UserEvents
from shoal.model.hstu import EventCache, EventNetwork, HSTUShape, SequenceGroups

# Candidates that are scored at once.
_MICROBATCH = 256


class RankedItem(NamedTuple):
    """A recommendation.

    Args:
        item: its number.
        score: the wanted action's probability; of the popularity where nothing is known of the
            user.
        popular: nothing is known of the user.
    """

    item: int
    score: float
    popular: bool


class NextAction(nn.Module):
    """Items and actions in turn, and the network that says which action follows an item.

    Args:
        shape: of the network; an event takes two places of its length.
        items: that there are.
        actions: that there are.
    """

    def __init__(self, shape: HSTUShape, items: int, actions: int) -> None:
        super().__init__()
        self.items, self.actions = nn.Embedding(items, shape.dim), nn.Embedding(actions, shape.dim)
        self.network = EventNetwork(shape)
        self.head = nn.Linear(shape.dim, actions)

    def tokens(self, items: Tensor, actions: Tensor) -> Tensor:
        """Of events [T] twice as many tokens [2 T, dim]: an item, then its action."""
        return torch.stack([self.items(items), self.actions(actions)], dim=1).flatten(0, 1)

    def forward(
        self, items: Tensor, actions: Tensor, lengths: Sequence[int], times: Tensor | None
    ) -> Tensor:
        """Logits of the action of each event, from what came before and its item [T, actions]."""
        groups = SequenceGroups([2 * length for length in lengths])
        clock = None if times is None else times.repeat_interleave(2)
        out: Tensor = self.head(self.network(self.tokens(items, actions), groups, clock)[::2])
        return out


class HSTURanker:
    """Learns which actions users take, and ranks candidates for them.

    A history is passed through the network once; its keys and values are kept, and candidates are
    scored behind it in microbatches, each of which sees the history and itself.

    Source: Zhai et al., Actions Speak Louder than Words, 2024, sections 2.2 and 3.4.

    Args:
        items: that there are.
        actions: that there are.
        wanted: the action by whose probability candidates are ranked.
        length: most events of a history.
        dim: of an event.
        blocks: layers.
        heads: of attention.
        timed: use the times of events.
        seed: of weights and order.

    Raises:
        EventError: a number is below what is possible.
    """

    def __init__(
        self,
        items: int,
        actions: int,
        *,
        wanted: int = 1,
        length: int = 200,
        dim: int = 50,
        blocks: int = 8,
        heads: int = 2,
        timed: bool = False,
        seed: int = 0,
    ) -> None:
        if min(items, actions - 1, length, blocks, heads) < 1 or dim % heads:
            raise EventError(
                "recommend: items, length, blocks and heads are at least 1, actions at least 2, "
                "dim a multiple of heads"
            )
        if not 0 <= wanted < actions:
            raise EventError(f"wanted = {wanted}: expected an action from 0 to {actions - 1}")
        self.length, self.wanted, self._seed = length, wanted, seed
        shape = HSTUShape(
            dim=dim, blocks=blocks, heads=heads, head_dim=dim // heads, length=2 * length,
            timed=timed,
        )  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed64(seed, purpose="ranker"))
            self.model = NextAction(shape, items, actions).eval()
        self._counts = np.zeros(items, np.int64)
        self._history: dict[Any, list[tuple[int, int, float]]] = {}
        self._kept: dict[Any, EventCache] = {}

    def fit(
        self,
        events: UserEvents,
        actions: np.ndarray,
        *,
        epochs: int = 1,
        batch: int = 64,
        lr: float = 1e-3,
        tick: Callable[[float, str], None] = lambda done, text: None,
    ) -> HSTURanker:
        """Learn the actions of events.

        Args:
            events: of users, none longer than the length.
            actions: int64 [E], from 0.
            epochs: passes.
            batch: users of a step.
            lr: learning rate of AdamW.
            tick: called with the share that is done.

        Raises:
            EventError: an item or action is not one of them; another number of actions.
        """
        self._check(events.items, actions)
        if (events.lengths > self.length).any():
            raise EventError(f"a user has more than {self.length} events; give a larger length")
        self._counts = np.bincount(events.items, minlength=len(self._counts))
        users = np.flatnonzero(events.lengths)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.model.train()
        each = math.ceil(len(users) / batch)
        for step in range(epochs * each):
            epoch, at = divmod(step, each)
            order = generator(self._seed, purpose="ranker order", index=epoch).permutation(users)
            some = order[at * batch : (at + 1) * batch]
            taken = events.chosen(some, 0 * some, events.lengths[some])
            rows = np.concatenate(
                [np.arange(events.offsets[u], events.offsets[u + 1]) for u in some]
            )
            right = torch.from_numpy(actions[rows])
            times = torch.from_numpy(taken.times) if self._timed else None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed64(self._seed, purpose="ranker dropout", step=step))
                logits = self.model(
                    torch.from_numpy(taken.items), right, taken.lengths.tolist(), times
                )
                loss = F.cross_entropy(logits, right)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            tick((step + 1) / (epochs * each), f"loss {float(loss.detach()):.3f}")
        self.model.eval()
        self._kept.clear()
        return self

    def observe(self, user: Any, item: int, action: int, time: float = 0.0) -> None:
        """An event has happened; the history that is kept of the user grows by it.

        Raises:
            EventError: no such item or action; the time lies before the user's last event.
        """
        self._check(np.array([item]), np.array([action]))
        history = self._history.setdefault(user, [])
        if history and time < history[-1][2]:
            raise EventError(
                f"user {user!r}: time {time} lies before the last event, {history[-1][2]}"
            )
        history.append((item, action, time))
        cache = self._kept.get(user)
        # One place is left for a candidate. With times the last event's attention depends on when
        # the next one happens, so that it is computed anew.
        if cache is None or self._timed or cache.length + 2 >= 2 * self.length:
            self._kept.pop(user, None)
            return
        with torch.no_grad():
            tokens = self.model.tokens(torch.tensor([item]), torch.tensor([action]))
            for token in tokens:
                self.model.network.append(token[None], cache, time, keep=True)

    def rank(
        self, user: Any, k: int, candidates: Any = None, *, time: float | None = None
    ) -> list[RankedItem]:
        """The candidates with which a user would most likely do what is wanted.

        Args:
            user: whose events were observed; without any, the most popular are returned, flagged.
            k: how many, fewer if there are fewer candidates.
            candidates: numbers of items; None for all.
            time: of the request, in seconds; None for that of the last event.

        Raises:
            EventError: an item is not one of them; k is below 1.
        """
        if k < 1:
            raise EventError(f"k = {k}: expected at least 1")
        every = np.arange(len(self._counts)) if candidates is None else np.asarray(candidates)
        self._check(every, np.zeros(len(every), np.int64))
        known = bool(self._history.get(user))
        scores = self.scores(user, every, time=time) if known else self._counts[every]
        best = np.argsort(-scores, kind="stable")[:k]
        return [RankedItem(int(every[at]), float(scores[at]), not known) for at in best]

    def scores(self, user: Any, items: np.ndarray, *, time: float | None = None) -> np.ndarray:
        """Probabilities of the wanted action with each item, float32 [M]."""
        cache = self._cached(user)
        asked = self._history[user][-1][2] if time is None else time
        with torch.no_grad():
            logits = [
                self.model.head(self.model.network.append(self.model.items(part), cache, asked))
                for part in torch.split(torch.from_numpy(np.asarray(items, np.int64)), _MICROBATCH)
            ]
            result: np.ndarray = torch.cat(logits).softmax(-1)[:, self.wanted].numpy()
        return result

    def drop(self, user: Any) -> None:
        """Keep the history of a user, and no longer its keys and values."""
        self._kept.pop(user, None)

    @property
    def kept(self) -> Mapping[Any, EventCache]:
        """Histories whose keys and values are kept."""
        return self._kept

    @property
    def _timed(self) -> bool:
        return self.model.network.shape.timed

    def _cached(self, user: Any) -> EventCache:
        cache = self._kept.get(user)
        if cache is None:
            # So that as many events again can follow before all is computed anew.
            most = self.length - 1 if len(self._history[user]) < self.length else self.length // 2
            events = self._history[user][-most:]
            items, actions = (torch.tensor([one[at] for one in events]) for at in (0, 1))
            times = torch.tensor([one[2] for one in events], dtype=torch.float64)
            cache = EventCache()
            with torch.no_grad():
                self.model.network(
                    self.model.tokens(items, actions),
                    SequenceGroups([2 * len(events)]),
                    times.repeat_interleave(2) if self._timed else None,
                    cache,
                )
            self._kept[user] = cache
        return cache

    def _check(self, items: np.ndarray, actions: np.ndarray) -> None:
        count, kinds = len(self._counts), self.model.actions.num_embeddings
        if len(items) != len(actions):
            raise EventError(f"{len(actions)} actions for {len(items)} events")
        for name, values, most in (("item", items, count), ("action", actions, kinds)):
            if len(values) and not (values.dtype.kind in "iu" and values.min() >= 0):
                raise EventError(f"{name}s: expected whole numbers from 0")
            if len(values) and values.max() >= most:
                raise EventError(f"{name} {values.max()}: expected one from 0 to {most - 1}")

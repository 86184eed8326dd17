"""Learning the next item with a network of events, and asking it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.random import generator, seed64
from shoal.fields.rates import least_seconds
from shoal.fields.retrieve.recommend.events import kept_events
from shoal.fields.retrieve.recommend.protocols import (
    EventError,
    RecommendCost,
    RecommendTask,
    UserEvents,
)
from shoal.kernel.threads import torch_threads
from shoal.model.hstu import EventNetwork, HSTULayer, HSTUShape, SequenceGroups, TransformerLayer

Layer = type[HSTULayer] | type[TransformerLayer]
FILE = "recommender.safetensors"
# Scores that are held at once when ranks are found.
_SCORES = 1 << 24
_CLIP = 1.0


class NextItem(nn.Module):
    """Items, and the network that says what follows them.

    Args:
        shape: of the network.
        layer: of which it is made.
        items: that there are.
        sparse: the table's gradient has the rows that a step touches alone.
    """

    def __init__(self, shape: HSTUShape, layer: Layer, items: int, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(items, shape.dim, sparse=sparse)
        nn.init.normal_(self.table.weight, std=1 / math.sqrt(shape.dim))
        self.network = EventNetwork(shape, layer)

    def forward(self, items: Tensor, groups: SequenceGroups, times: Tensor | None) -> Tensor:
        """Directions of what follows each event, of length 1 [T, dim]."""
        x = self.table(items) * math.sqrt(self.table.embedding_dim)
        return F.normalize(self.network(x, groups, times), dim=-1)

    def loss(
        self, out: Tensor, right: Tensor, drawn: Tensor, groups: SequenceGroups, temperature: float
    ) -> Tensor:
        """Sampled softmax.

        Args:
            out: directions [T, dim].
            right: the items that follow [T].
            drawn: other items of each sequence [B, K]; one that is the right one does not count.
            groups: which are sequences.
            temperature: by which cosines are divided.
        """
        good = (out * F.normalize(self.table(right), dim=-1)).sum(-1)
        losses = []
        parts = (groups.split(one) for one in (out, right, good))
        for members, some, wanted, cosine in zip(groups.members, *parts, strict=True):
            others = F.normalize(self.table(drawn[members]), dim=-1)
            bad = some @ others.transpose(1, 2)
            bad = bad.masked_fill(wanted[:, :, None] == drawn[members][:, None], -math.inf)
            logits = torch.cat([cosine[:, :, None], bad], dim=2).flatten(0, 1) / temperature
            losses.append(logits.logsumexp(1) - logits[:, 0])
        return torch.cat(losses).mean()

    def scores(self, out: Tensor) -> Tensor:
        """Cosines of directions [N, dim] with all items [N, items]."""
        return out @ F.normalize(self.table.weight, dim=-1).T


def shape_of(task: RecommendTask, weights: Any = "silu") -> HSTUShape:
    """The network of a task.

    Raises:
        EventError: its width cannot be divided by its heads.
    """
    if task.dim % task.heads:
        raise EventError(f"dim = {task.dim}: expected a multiple of heads = {task.heads}")
    return HSTUShape(
        dim=task.dim, blocks=task.blocks, heads=task.heads, head_dim=task.dim // task.heads,
        length=task.length, dropout=task.dropout, weights=weights, timed=task.timed,
    )  # fmt: skip


class ItemTraining:
    """Learning of :class:`NextItem`, step by step.

    Args:
        task: how.
        shape: of the network.
        layer: of which it is made.
        events: what from.
        alpha: of stochastic length.
    """

    def __init__(
        self, task: RecommendTask, shape: HSTUShape, layer: Layer, events: UserEvents, alpha: float
    ) -> None:
        self.task, self.events, self.alpha, self.done = task, events, alpha, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed64(task.seed, purpose="recommender"))
            self.model = NextItem(shape, layer, task.items, sparse=task.sparse)
        lengths = np.minimum(events.lengths, task.length + 1)
        self.users = np.flatnonzero(lengths >= 2)
        self.lengths = lengths
        self.steps = task.epochs * math.ceil(len(self.users) / task.batch)
        rest = [p for n, p in self.model.named_parameters() if n != "table.weight"]
        if task.sparse:
            table: Any = torch.optim.SparseAdam([self.model.table.weight], lr=task.lr)
            self._optimizers = [torch.optim.AdamW(rest, lr=task.lr, betas=(0.9, 0.98)), table]
        else:
            every = self.model.parameters()
            self._optimizers = [
                torch.optim.AdamW(every, lr=task.lr, betas=(0.9, 0.98), weight_decay=1e-3)
            ]
        self._rest = rest

    def batch(self) -> tuple[Tensor, Tensor, SequenceGroups, Tensor | None]:
        """Items, those that follow, sequences and times of the next step."""
        task, each = self.task, math.ceil(len(self.users) / self.task.batch)
        epoch, at = divmod(self.done, each)
        users = self.users
        if task.shuffle:
            users = generator(task.seed, purpose="recommend order", index=epoch).permutation(users)
        users = users[at * task.batch : (at + 1) * task.batch]
        draw = generator(task.seed, purpose="stochastic length", step=self.done)
        begins = self.events.offsets[users + 1] - self.lengths[users]
        # The last event is only asked for, so that it stays.
        kept = kept_events(self.lengths[users] - 1, self.alpha, task.length, draw)
        rows = np.concatenate([begin + some for begin, some in zip(begins, kept, strict=True)])
        after = np.concatenate(
            [
                begin + np.append(some[1:], length - 1)
                for begin, some, length in zip(begins, kept, self.lengths[users], strict=True)
            ]
        )
        items = torch.from_numpy(self.events.items)
        times = torch.from_numpy(self.events.times[rows]) if task.timed else None
        return items[rows], items[after], SequenceGroups([len(one) for one in kept]), times

    def step(self) -> float:
        """One step; its loss."""
        task = self.task
        self.model.train()
        items, right, groups, times = self.batch()
        draw = generator(task.seed, purpose="negatives", step=self.done)
        drawn = torch.from_numpy(
            draw.integers(0, task.items, (len(groups.lengths), task.negatives))
        )
        with torch.random.fork_rng(devices=[], enabled=task.dropout > 0):
            torch.manual_seed(seed64(task.seed, purpose="recommend dropout", step=self.done))
            out = self.model(items, groups, times)
            loss = self.model.loss(out, right, drawn, groups, task.temperature)
            for one in self._optimizers:
                one.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._rest, _CLIP)
        for one in self._optimizers:
            one.step()
        self.done += 1
        return float(loss.detach())


class LearnedItems:
    """A network that has learned, as a :class:`~.protocols.TrainedRecommender`."""

    def __init__(self, model: NextItem, task: RecommendTask, layer: str) -> None:
        self.model, self.task, self.layer = model.eval(), task, layer

    def ranks(self, events: UserEvents) -> np.ndarray:
        """See the protocol; a history is looked at up to the length of the task."""
        if (events.lengths > self.task.length + 1).any() or (events.lengths < 1).any():
            raise EventError(f"sequences of 1 to {self.task.length + 1} events are expected")
        result = []
        each = max(1, _SCORES // (self.task.items * (self.task.length + 1)))
        for first in range(0, len(events), each):
            users = np.arange(first, min(len(events), first + each))
            some = events.chosen(users, 0 * users, events.lengths[users])
            some_lengths = some.lengths
            before = np.ones(len(some.items), bool)
            before[some.offsets[1:] - 1] = False
            after = np.ones(len(some.items), bool)
            after[some.offsets[:-1]] = False
            lengths = some_lengths[some_lengths > 1] - 1
            if not len(lengths):
                continue
            with torch.no_grad():
                out = self._out(some.items[before], some.times[before], lengths)
                scores = self.model.scores(out)
                right = torch.from_numpy(some.items[after])[:, None]
                result.append((scores > scores.gather(1, right)).sum(1).numpy())
        return np.concatenate(result).astype(np.int64) if result else np.empty(0, np.int64)

    def scores(self, items: np.ndarray, times: np.ndarray) -> np.ndarray:
        items, times = items[-self.task.length :], times[-self.task.length :]
        with torch.no_grad():
            out = self._out(items, times, np.array([len(items)]))[-1:]
            scores: np.ndarray = self.model.scores(out)[0].numpy()
        return scores

    def _out(self, items: np.ndarray, times: np.ndarray, lengths: np.ndarray) -> Tensor:
        clock = torch.from_numpy(np.ascontiguousarray(times)) if self.task.timed else None
        groups = SequenceGroups(lengths.tolist())
        result: Tensor = self.model(torch.from_numpy(np.ascontiguousarray(items)), groups, clock)
        return result

    def save(self, directory: Path) -> Sequence[str]:
        """Weights as safetensors, with the task."""
        safetensors: Any = import_extra("safetensors.torch", extra="run", purpose="files of models")
        words = {"task": self.task.model_dump_json(), "layer": self.layer}
        text = safetensors.save(dict(self.model.state_dict()), {"shoal": json.dumps(words)})
        write_atomic(directory / FILE, text)
        return [FILE]


def learn(
    task: RecommendTask,
    shape: HSTUShape,
    layer: Layer,
    events: UserEvents,
    tick: Callable[[float, str], None],
    *,
    alpha: float = 2.0,
) -> NextItem:
    """Learn from events, to the end.

    Raises:
        EventError: the loss is not finite.
    """
    training = ItemTraining(task, shape, layer, events, alpha)
    while training.done < training.steps:
        loss = training.step()
        if not math.isfinite(loss):
            raise EventError(f"step {training.done}: the loss is {loss}; try a smaller lr")
        tick(training.done / training.steps, f"loss {loss:.3f}")
    return training.model


def timed_cost(
    task: RecommendTask, shape: HSTUShape, layer: Layer, events: UserEvents, *, alpha: float = 2.0
) -> RecommendCost:
    """Seconds of an event from a few steps on this machine, and the parameters."""
    training = ItemTraining(task, shape, layer, events, alpha)
    with torch_threads(torch.get_num_threads()):
        training.step()
        seconds, _ = least_seconds(training.step, 3)
    training.done -= 1
    seen = len(training.batch()[0])
    return RecommendCost(
        event_s=seconds / seen,
        parameters=sum(one.numel() for one in training.model.parameters()),
    )

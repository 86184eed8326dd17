"""Next event: an LSTM that is surprised by events which are not among those it expects.

Source: Du et al., DeepLog: Anomaly Detection and Diagnosis from System Logs through Deep Learning,
2017. A group with an event that is not among the ``top`` most probable after the events before it
is an anomaly.

Differs: it learns from some groups of the log itself, without labels, or from those without an
alert where there are labels; a group's end is an event too, so that one that stops early is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Ge, Gt, Le

from shoal.core.extras import import_extra
from shoal.core.parts import part
from shoal.core.random import generator, seed64
from shoal.fields.data.logs.anomalies.groups import detection_estimate
from shoal.fields.data.logs.anomalies.protocols import Detection, EventGroups, Floats
from shoal.fields.data.logs.native import Bools
from shoal.fields.data.logs.protocols import LogWork
from shoal.ir import Estimate, Interval, Machine

_BATCH = 256
# Fewest and most steps of the training.
_STEPS = 200, 2000
# Looks of an LSTM at an event, training included.
_FLOPS_S = 4e-4


@part
class NextEvent:
    """DeepLog: the order of events counts; needs PyTorch.

    Args:
        history: events that the next is predicted from.
        top: the next event may be one of so many.
        hidden: size of the LSTM's state.
        epochs: passes over what is learned from.
        train: share of the groups that it learns from.
    """

    history: Annotated[int, Ge(1), Le(200)] = 10
    top: Annotated[int, Ge(1)] = 5
    hidden: Annotated[int, Ge(4), Le(1024)] = 64
    epochs: Annotated[int, Ge(1)] = 6
    train: Annotated[float, Gt(0), Le(1)] = 0.3

    def estimate(self, work: LogWork, machine: Machine) -> Estimate:
        """Training on a share of the events, and one look at all."""
        basis = detection_estimate(work, 10.0)
        more = work.lines * (self.train * self.epochs + 0.3) * _FLOPS_S * self.hidden / 64
        return basis.model_copy(
            update={
                "step_s": Interval.around(basis.step_s.value + more, 4.0),
                "terms_s": {**basis.terms_s, "lstm": more},
            }
        )

    def candidates(self, work: LogWork, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield self

    def detect(self, groups: EventGroups, seed: int) -> Detection:
        """Score by the lowest rank of an event among those expected at its place."""
        torch: Any = import_extra("torch", extra="run", purpose="the LSTM of next_event")
        before, after, owner = self._windows(groups)
        n, kinds = len(groups.names), groups.templates + 2
        allowed = np.ones(n, np.bool_) if groups.labels is None else ~groups.labels
        rows = np.flatnonzero(allowed)
        chosen = generator(seed, purpose="next event").permutation(rows)
        learned = np.zeros(n, np.bool_)
        learned[chosen[: max(1, int(self.train * len(rows)))]] = True
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed64(seed, purpose="next event"))
            model = self._learned(torch, before, after, learned[owner], kinds)
        ranks = self._ranks(torch, model, before, after)
        worst: Floats = np.zeros(n)
        np.maximum.at(worst, owner, ranks)
        judged: Bools = ~learned if groups.labels is not None else np.ones(n, np.bool_)
        return Detection(worst, worst >= self.top, judged)

    def _windows(self, groups: EventGroups) -> tuple[Any, Any, Any]:
        """Events before each event, int64 [m, history]; the event; and its group."""
        padding, end = groups.templates, groups.templates + 1
        before, after, owner = [], [], []
        for at, sequence in enumerate(groups.sequences):
            padded = np.concatenate([np.full(self.history, padding), sequence, [end]])
            view = np.lib.stride_tricks.sliding_window_view(padded, self.history + 1)
            before.append(view[:, :-1])
            after.append(view[:, -1])
            owner.append(np.full(len(view), at))
        return np.concatenate(before), np.concatenate(after), np.concatenate(owner)

    def _learned(self, torch: Any, before: Any, after: Any, some: Bools, kinds: int) -> Any:
        # What occurs several times is kept once, and drawn as often as it occurs.
        pairs, weights = np.unique(
            np.column_stack([before[some], after[some]]), axis=0, return_counts=True
        )
        x, y = torch.from_numpy(pairs[:, :-1].copy()), torch.from_numpy(pairs[:, -1].copy())
        w = torch.from_numpy(weights).float()
        embed = torch.nn.Embedding(kinds, self.hidden)
        lstm = torch.nn.LSTM(self.hidden, self.hidden, batch_first=True)
        head = torch.nn.Linear(self.hidden, kinds)
        model = torch.nn.ModuleList([embed, lstm, head])
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        steps = int(self.epochs * some.sum() / _BATCH)
        for _ in range(min(max(steps, _STEPS[0]), _STEPS[1])):
            rows = torch.multinomial(w, _BATCH, replacement=True)
            logits = head(lstm(embed(x[rows]))[0][:, -1])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, y[rows]).backward()
            optimizer.step()
        return model.eval()

    def _ranks(self, torch: Any, model: Any, before: Any, after: Any) -> Floats:
        """Place of each event among those expected, 0 for the first."""
        pairs, inverse = np.unique(np.column_stack([before, after]), axis=0, return_inverse=True)
        embed, lstm, head = model
        ranks = []
        with torch.inference_mode():
            for rows in torch.from_numpy(pairs).split(4 * _BATCH):
                logits = head(lstm(embed(rows[:, :-1]))[0][:, -1])
                own = logits.gather(1, rows[:, -1:])
                ranks.append((logits > own).sum(1).double().numpy())
        result: Floats = np.concatenate(ranks)[inverse.ravel()]
        return result

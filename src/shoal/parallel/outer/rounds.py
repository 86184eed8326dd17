"""The rounds of one rank's worker: after each step it is asked whether a round is over.

What is averaged is one flat tensor with the mean loss of the round and the wish to stop at its
end, so that workers need no other message, unless changes travel in bf16. Where it is applied a
round late, nothing of a round is waited for before the next one is over.

With ``ShardedRounds`` each worker keeps its share of x and of the outer state. Parameters travel
rather than changes, since a difference needs all of x on one worker: a reduce-scatter in the first
half of the next round, the outer update of the share, an all-gather of the new x in the second.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from shoal.core.errors import CheckpointError
from shoal.ir.hooks import StepHook, TensorSource, TrainStep
from shoal.parallel.outer.rule import TAG, Rule, Segments

if TYPE_CHECKING:
    from shoal.parallel.protocols import Pending, Ranks

_T = TypeVar("_T")

# Behind the parameters: the mean loss of the round, and which wish to stop.
_TOLD = 2


class Rounds(StepHook, ABC):
    """The rounds of a run on one rank, which agree on parameters after the update that ends one.

    Args:
        owned: what this rank's optimizer updates.
        ranks: of this rank; those of ``outer`` have the same place in all workers.
        tau: steps of a round.
        delayed: an average is applied a round late.
        room: messages are padded to a multiple of this many elements.

    Attributes:
        stop: some worker asked to stop, as all know since the last round ended.
        loss: mean loss of all workers, where the last step brought the news of a round; else None.
        exposed_s: seconds so far in which this rank waited for the other workers.
    """

    kind = "outer"
    divided: bool
    """Each worker keeps a state of its own; else all keep the same."""

    def __init__(
        self, owned: Mapping[str, Tensor], ranks: Ranks, *, tau: int, delayed: bool, room: int
    ) -> None:
        assert ranks.outer is not None
        self.comm, self.tau = ranks.outer, tau
        # Ranks with one place in all workers share a state, unless each has its own.
        self._place = f"outer.place{0 if ranks.worker is None else ranks.worker.rank}."
        if self.divided:
            self._place += f"worker{self.comm.rank}."
        self.settled, self.stop = True, False
        self.loss: float | None = None
        self.exposed_s = self._before_s = 0.0
        self._delayed = delayed
        self._tensors = [p.detach() for p in owned.values()]
        self._sizes = [p.numel() for p in self._tensors]
        self._size = sum(self._sizes)
        like = self._tensors[0] if self._tensors else torch.zeros(0)
        length = self._size + _TOLD
        self._sent = like.new_zeros(length + -length % room)
        self._views = self._cut(self._sent)
        self._losses: list[float] = []
        self._asked = False

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """A view of every parameter's place in a flat tensor."""
        parts = torch.split(flat[: self._size], self._sizes) if self._sizes else ()
        return [part.view_as(p) for part, p in zip(parts, self._tensors, strict=True)]

    @torch.no_grad()
    def after_update(self, step: TrainStep) -> None:
        """Change the parameters where a round ends; workers learn there which ask to stop.

        Raises:
            RankError: a worker is gone.
        """
        self._losses.append(step.loss)
        self._asked |= step.stop
        self.settled = step.last or (step.number + 1) % self.tau == 0
        self.loss, self._before_s = None, self.exposed_s
        if self.settled:
            vector = self._sent.new_tensor(
                [sum(self._losses) / len(self._losses), float(self._asked)]
            )
            self._losses, self._asked = [], False
            self._turn(vector, last=step.last)
        elif (step.number % self.tau) + 1 == -(-self.tau // 2):
            self._halfway()
        step.stop = self.settled and self.stop

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """Seconds of the step in which others were waited for; a round's mean loss."""
        step = {"outer_exposed_s": self.exposed_s - self._before_s}
        return {"step": step} | ({} if self.loss is None else {"round": {"loss": self.loss}})

    @abstractmethod
    def _turn(self, summary: Tensor, *, last: bool) -> None:
        """End a round and begin the next."""

    @abstractmethod
    def _halfway(self) -> None:
        """Half of a round is over."""

    def _timed(self, call: Callable[[], _T]) -> _T:
        """Count the seconds in which this rank does nothing else."""
        begin = time.perf_counter()
        result = call()
        self.exposed_s += time.perf_counter() - begin
        return result

    def _hear(self, summary: Tensor) -> None:
        """What the workers exchanged: a mean loss, and how many wish to stop."""
        loss, stops = summary.tolist()
        self.loss, self.stop = loss, stops > 0

    def state(self) -> dict[str, Tensor]:
        """At a round's start: what is kept beside the parameters, by the name it is saved under."""
        return {f"{self._place}{name}": value for name, value in self._state().items()}

    @torch.no_grad()
    def load(self, saved: TensorSource) -> None:
        """Go on from a round's start.

        Raises:
            CheckpointError: something is missing, or of other workers.
        """
        names = set(saved.names())
        for name, mine in self.state().items():
            if name not in names or saved.shape(name) != mine.shape:
                raise CheckpointError(
                    f"{name}: the checkpoint has no such state of these workers; go on with "
                    "the sync and the parallel that it was saved with, or start a new run"
                )
            mine.copy_(saved.tensor(name))
        self._loaded()

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """What is kept between rounds, by name, after what travels has come."""

    @abstractmethod
    def _loaded(self) -> None:
        """The parameters and the state are those of a round's start."""


class WholeRounds(Rounds):
    """Every worker keeps all of x and of the outer state.

    Args:
        owned: what this rank's optimizer updates.
        rule: makes the outer update.
        tau: steps of a round.
        delayed: an average is applied a round late.
        half: changes are sent in bf16.
    """

    divided = False

    def __init__(
        self,
        owned: Mapping[str, Tensor],
        ranks: Ranks,
        rule: Callable[[Tensor, Segments], Rule],
        *,
        tau: int,
        delayed: bool,
        half: bool = False,
    ) -> None:
        super().__init__(owned, ranks, tau=tau, delayed=delayed, room=1)
        self._wire: Tensor | None = None
        if half:
            self._wire = self._sent.new_empty(self._size, dtype=torch.bfloat16)
        self._x = self._sent.new_zeros(self._size)
        self._at = self._cut(self._x)
        self._keep()
        self._rule = rule(self._x, Segments(self._sizes, 0, self._size, None))
        self._pending: list[Pending] = []
        self._waiting = torch.zeros(1)

    def _keep(self) -> None:
        for x, parameter in zip(self._at, self._tensors, strict=True):
            x.copy_(parameter)

    def _turn(self, summary: Tensor, *, last: bool) -> None:
        mean = self._collect() if self._waiting else None
        for x, parameter in zip(self._at, self._tensors, strict=True):
            parameter.neg_().add_(x)  # what the round has changed
        if mean is not None:
            self._x.sub_(self._rule.direction(mean), alpha=self._rule.lr)
        for x, parameter, view in zip(self._at, self._tensors, self._views, strict=True):
            view.copy_(parameter)
            parameter.copy_(x)
        self._sent[self._size :] = summary
        self._waiting.fill_(1.0)
        self._begin()
        if not self._delayed or last:
            self._x.sub_(self._rule.direction(self._collect()), alpha=self._rule.lr)
            for x, parameter in zip(self._at, self._tensors, strict=True):
                parameter.copy_(x)

    def _begin(self) -> None:
        """Send the changes, and what is sent with them."""
        flats = [self._sent]
        if self._wire is not None:
            self._wire.copy_(self._sent[: self._size])
            flats = [self._wire, self._sent[self._size :]]
        for flat in flats:
            self._pending.append(self._timed(partial(self.comm.all_reduce, flat, tag=TAG)))

    def _halfway(self) -> None:
        """What travels needs no action on its way."""

    def _come(self) -> None:
        if not self._pending:
            return
        for pending in self._pending:
            self._timed(pending.wait)
        self._pending = []
        if self._wire is not None:
            self._sent[: self._size].copy_(self._wire)

    def _collect(self) -> Tensor:
        """The mean of the round that was sent [size], which may be spoilt."""
        self._come()
        self._waiting.zero_()
        self._sent.div_(self.comm.world)
        self._hear(self._sent[self._size :])
        return self._sent[: self._size]

    def _state(self) -> dict[str, Tensor]:
        """The sum that travels, and what the rule keeps."""
        self._come()
        travels = {"sum": self._sent, "waiting": self._waiting} if self._delayed else {}
        return {**travels, **self._rule.state()}

    def _loaded(self) -> None:
        self._sent[self._size + 1] = 0.0  # a worker that wished to stop has stopped
        self._keep()


class ShardedRounds(Rounds):
    """Every worker stores a chunk of x and the outer state; each round sends one full copy.

    Args:
        owned: what this rank's optimizer updates.
        ranks: of this rank.
        rule: makes the outer update.
        tau: steps of a round.
        delayed: an average is applied a round late.
    """

    divided = True

    def __init__(
        self,
        owned: Mapping[str, Tensor],
        ranks: Ranks,
        rule: Callable[[Tensor, Segments], Rule],
        *,
        tau: int,
        delayed: bool,
    ) -> None:
        assert ranks.outer is not None
        comm = ranks.outer
        super().__init__(owned, ranks, tau=tau, delayed=delayed, room=comm.world)
        chunk = len(self._sent) // comm.world
        self._start = chunk * comm.rank
        stop = max(self._start, min(self._size, self._start + chunk))
        mine = stop - self._start
        self._part = self._sent.new_zeros(chunk)
        self._x = self._sent.new_zeros(mine)
        self._base = self._sent.new_zeros(mine)
        self._keep()
        self._base.copy_(self._x)
        self._rule = rule(self._x, Segments(self._sizes, self._start, stop, comm))
        self._reduced: Pending | None = None
        self._gathered: Pending | None = None
        self._waiting = torch.zeros(1)

    def _keep(self) -> None:
        """This worker's chunk of the parameters."""
        for view, parameter in zip(self._views, self._tensors, strict=True):
            view.copy_(parameter)
        self._x.copy_(self._sent[self._start : self._start + len(self._x)])

    def _turn(self, summary: Tensor, *, last: bool) -> None:
        if self._delayed:
            self._halfway()  # a round of one step has no half
            self._come()
            for view, parameter in zip(self._views, self._tensors, strict=True):
                mine = parameter.clone()
                parameter.copy_(view)
                view.copy_(mine)
        else:
            for view, parameter in zip(self._views, self._tensors, strict=True):
                view.copy_(parameter)
        self._sent[self._size : self._size + _TOLD] = summary
        self._waiting.fill_(1.0)
        self._reduced = self._timed(
            lambda: self.comm.reduce_scatter(self._part, self._sent, tag=TAG)
        )
        if not self._delayed or last:
            self._halfway()
            self._come()
            for view, parameter in zip(self._views, self._tensors, strict=True):
                parameter.copy_(view)

    def _halfway(self) -> None:
        """Update the chunk by what has come, and send it out."""
        if self._gathered is not None or not (self._delayed or self._waiting):
            return
        self._arrive()
        size = len(self._x)
        if self._waiting:
            self._part.div_(self.comm.world)
            mean = self._base.sub_(self._part[:size])
            step = self._rule.direction(mean)
            new = torch.sub(self._x, step, alpha=self._rule.lr)
            # The next round that comes began at the x before, unless it is waited for.
            self._base.copy_(self._x if self._delayed else new)
            self._x.copy_(new)
        self._part[:size].copy_(self._x)
        self._gathered = self._timed(lambda: self.comm.all_gather(self._sent, self._part, tag=TAG))

    def _arrive(self) -> None:
        if self._reduced is not None:
            self._timed(self._reduced.wait)
            self._reduced = None

    def _come(self) -> None:
        """The new x of all workers is in ``_sent``."""
        assert self._gathered is not None
        self._timed(self._gathered.wait)
        self._gathered = None
        if self._waiting:
            self._hear(self._sent[self._size : self._size + _TOLD])
        self._waiting.zero_()

    def _state(self) -> dict[str, Tensor]:
        """This worker's chunk of the sum that travels, and what the rule keeps."""
        self._arrive()
        if not self._delayed:
            return self._rule.state()
        travels = {"sum": self._part, "base": self._base, "waiting": self._waiting}
        return {**travels, **self._rule.state()}

    def _loaded(self) -> None:
        stop = self._size + 1 - self._start
        if 0 <= stop < len(self._part):
            self._part[stop] = 0.0  # a worker that wished to stop has stopped
        self._keep()
        if not self._waiting:
            self._base.copy_(self._x)

"""The rounds of one rank's worker: after each step it is asked whether a round is over.

What is averaged is one flat tensor with the mean loss of the round and the wish to stop at its
end, so that workers need no other message, unless changes travel in bf16. Where it is applied a
round late, nothing of a round is waited for before the next one is over.

With ``ShardedRounds`` each worker keeps its share of x and of the outer state. Parameters travel
and not their changes, because nobody has all of x to subtract from: a reduce-scatter in the first
half of the next round, the outer update of the share, an all-gather of the new x in the second.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from shoal.core.errors import CheckpointError
from shoal.parallel.outer.rule import TAG, Rule, Segments

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, Pending

__all__ = ["ShardedRounds", "WholeRounds"]

_T = TypeVar("_T")

# Behind the parameters: the mean loss of the round, and who wishes to stop.
_TOLD = 2


class _Rounds(ABC):
    """See :class:`~shoal.parallel.protocols.Rounds`."""

    divided: bool

    def __init__(
        self, owned: Mapping[str, Tensor], comm: Comm, *, tau: int, delayed: bool, room: int
    ) -> None:
        self.comm, self.tau = comm, tau
        self.settled, self.stop = True, False
        self.loss: float | None = None
        self.exposed_s = 0.0
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
    def after_update(self, step: int, *, loss: float, stop: bool, last: bool) -> None:
        self._losses.append(loss)
        self._asked |= stop
        self.settled = last or (step + 1) % self.tau == 0
        self.loss = None
        if self.settled:
            told = self._sent.new_tensor(
                [sum(self._losses) / len(self._losses), float(self._asked)]
            )
            self._losses, self._asked = [], False
            self._turn(told, last=last)
        elif (step % self.tau) + 1 == -(-self.tau // 2):
            self._halfway()

    @abstractmethod
    def _turn(self, told: Tensor, *, last: bool) -> None:
        """End a round and begin the next."""

    @abstractmethod
    def _halfway(self) -> None:
        """Half of a round is over."""

    def _timed(self, call: Callable[[], _T]) -> _T:
        """Count the seconds in which this rank does nothing else."""
        begin = time.perf_counter()
        found = call()
        self.exposed_s += time.perf_counter() - begin
        return found

    def _hear(self, told: Tensor) -> None:
        """What the workers told each other: a mean loss, and how many wish to stop."""
        loss, stops = told.tolist()
        self.loss, self.stop = loss, stops > 0

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a round's start; the parameters are there already.

        Raises:
            CheckpointError: something is missing.
        """
        for name, mine in self.state().items():
            if name not in state or state[name].shape != mine.shape:
                raise CheckpointError(
                    f"outer.{name}: the checkpoint has no such state of these workers; go on with "
                    "the sync and the parallel that it was saved with, or start a new run"
                )
            mine.copy_(state[name])

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """What is kept between rounds, by name, after what travels has come."""


class WholeRounds(_Rounds):
    """Every worker keeps all of x and of the outer state.

    Args:
        owned: what this rank's optimizer updates.
        comm: the same place in all workers.
        rule: makes the outer update.
        tau: steps of a round.
        delayed: an average is applied a round late.
        half: changes travel in bf16.
    """

    divided = False

    def __init__(
        self,
        owned: Mapping[str, Tensor],
        comm: Comm,
        rule: Callable[[Tensor, Segments], Rule],
        *,
        tau: int,
        delayed: bool,
        half: bool = False,
    ) -> None:
        super().__init__(owned, comm, tau=tau, delayed=delayed, room=1)
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

    def _turn(self, told: Tensor, *, last: bool) -> None:
        mean = self._collect() if self._waiting else None
        for x, parameter in zip(self._at, self._tensors, strict=True):
            parameter.neg_().add_(x)  # what the round has changed
        if mean is not None:
            self._x.sub_(self._rule.direction(mean), alpha=self._rule.lr)
        for x, parameter, view in zip(self._at, self._tensors, self._views, strict=True):
            view.copy_(parameter)
            parameter.copy_(x)
        self._sent[self._size :] = told
        self._waiting.fill_(1.0)
        self._begin()
        if not self._delayed or last:
            self._x.sub_(self._rule.direction(self._collect()), alpha=self._rule.lr)
            for x, parameter in zip(self._at, self._tensors, strict=True):
                parameter.copy_(x)

    def _begin(self) -> None:
        """Send the changes, and what is told beside them."""
        flats = [self._sent]
        if self._wire is not None:
            self._wire.copy_(self._sent[: self._size])
            flats = [self._wire, self._sent[self._size :]]
        for flat in flats:
            self._pending.append(self._timed(partial(self.comm.all_reduce, flat, tag=TAG)))

    def _halfway(self) -> None:
        """What travels needs nobody on its way."""

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

    def state(self) -> dict[str, Tensor]:
        """The sum that travels, and what the rule keeps."""
        self._come()
        travels = {"sum": self._sent, "waiting": self._waiting} if self._delayed else {}
        return {**travels, **self._rule.state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a round's start; the parameters are there already."""
        super().load(state)
        self._sent[self._size + 1] = 0.0  # who wished to stop has stopped
        self._keep()


class ShardedRounds(_Rounds):
    """Every worker keeps a chunk of x and of the outer state; one whole copy travels.

    Args:
        owned: what this rank's optimizer updates.
        comm: the same place in all workers.
        rule: makes the outer update.
        tau: steps of a round.
        delayed: an average is applied a round late.
    """

    divided = True

    def __init__(
        self,
        owned: Mapping[str, Tensor],
        comm: Comm,
        rule: Callable[[Tensor, Segments], Rule],
        *,
        tau: int,
        delayed: bool,
    ) -> None:
        super().__init__(owned, comm, tau=tau, delayed=delayed, room=comm.world)
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

    def _turn(self, told: Tensor, *, last: bool) -> None:
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
        self._sent[self._size : self._size + _TOLD] = told
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

    def state(self) -> dict[str, Tensor]:
        """This worker's chunk of the sum that travels, and what the rule keeps."""
        self._arrive()
        if not self._delayed:
            return self._rule.state()
        travels = {"sum": self._part, "base": self._base, "waiting": self._waiting}
        return {**travels, **self._rule.state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a round's start; the parameters are there already."""
        super().load(state)
        stop = self._size + 1 - self._start
        if 0 <= stop < len(self._part):
            self._part[stop] = 0.0  # who wished to stop has stopped
        self._keep()
        if not self._waiting:
            self._base.copy_(self._x)

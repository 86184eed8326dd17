"""The runtime of a pipeline: does the passes of a schedule, one rank's part of them.

A rank goes through its program in order. What a pass needs from another rank is received
in the order in which that rank sends it, which every rank knows, since all of them hold
the whole schedule; so one tag a direction is enough and no message can be mistaken.
Receives are posted ahead of the pass that needs them, and sends are not waited for.

With one stage and one rank this is the plain loop over micro-batches.

Source: the passes are those of :mod:`shoal.ir.schedule`; sending 1/t of a boundary from each
of t tensor-parallel ranks is Narayanan et al., Megatron-LM, 2021, section 4.1.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from shoal.ir.schedule import Event, Op, Schedule
from shoal.parallel.tensor.linear import WeightGradients

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm, MicroBatch, Pending
    from shoal.parallel.vocab.passes import VocabShard

Span = Callable[[str], AbstractContextManager[object]]
"""Around a phase of a step, by name."""


def span_of(comm: object) -> Span:
    """How a rank notes its passes: in the recorder of its communicator, where that is watched."""
    recorder = getattr(comm, "recorder", None)
    return contextlib.nullcontext if recorder is None else recorder.span


# Kinds of passes that compute the loss; the others compute gradients.
_FORWARD = frozenset({"F", "EF", "S"})
# Receives that are posted before the pass that needs them.
_AHEAD = 2


class StageLike(Protocol):
    """One stage of a model on one rank."""

    def __call__(self, x: Tensor | None, mb: MicroBatch, *, recompute: bool) -> Tensor:
        """Hidden state [N, D] for the next stage, or the loss sum if this is the last."""


@dataclass(frozen=True)
class StageBoundary:
    """What crosses from stage to stage.

    Args:
        tp: the tensor-parallel peers.
        sharded: a rank holds N / tp of the tokens (sequence parallelism).
        scatter: every tensor-parallel rank sends its share of a boundary that all of them
            hold whole, and the receivers gather it.
    """

    width: int
    dtype: torch.dtype
    device: torch.device
    tp: Comm
    sharded: bool = False
    scatter: bool = True

    def rows(self, mb: MicroBatch) -> int:
        """Tokens that this rank's stages hold of a micro-batch."""
        tokens = mb.tokens.numel()
        return tokens // self.tp.world if self.sharded else tokens

    def _scatters(self, rows: int) -> bool:
        whole = not self.sharded and self.tp.world > 1
        return self.scatter and whole and rows % self.tp.world == 0

    def whole(self, x: Tensor) -> Tensor:
        """All tokens [N, D] of what tensor-parallel ranks may hold a share of each."""
        if not self.sharded or self.tp.world == 1:
            return x.detach()
        out = x.new_empty(len(x) * self.tp.world, x.shape[1])
        self.tp.all_gather(out, x.detach().contiguous(), tag="boundary").wait()
        return out

    def share(self, x: Tensor) -> Tensor:
        """This rank's share of all tokens [N, D]."""
        if not self.sharded or self.tp.world == 1:
            return x
        rows = len(x) // self.tp.world
        return x[self.tp.rank * rows : (self.tp.rank + 1) * rows]

    def outgoing(self, x: Tensor) -> Tensor:
        """The part of ``x`` [N, D] that this rank sends."""
        x = x.detach()
        if self._scatters(len(x)):
            share = len(x) // self.tp.world
            x = x[self.tp.rank * share : (self.tp.rank + 1) * share]
        return x.contiguous()

    def buffer(self, mb: MicroBatch) -> Tensor:
        """Room for what this rank receives."""
        rows = self.rows(mb)
        share = rows // self.tp.world if self._scatters(rows) else rows
        return torch.empty(share, self.width, dtype=self.dtype, device=self.device)

    def incoming(self, x: Tensor, mb: MicroBatch) -> Tensor:
        """The whole boundary from the part that came."""
        rows = self.rows(mb)
        if not self._scatters(rows):
            return x
        whole = torch.empty(rows, self.width, dtype=self.dtype, device=self.device)
        self.tp.all_gather(whole, x, tag="boundary").wait()
        return whole


class _Message:
    """A receive that may have been posted."""

    def __init__(self, source: int, need: Op) -> None:
        self.source = source
        self.need = need
        self.buffer: Tensor | None = None
        self.pending: Pending | None = None


@dataclass
class _Flight:
    """A micro-batch between its forward and backward pass through one stage."""

    entry: Tensor | None = None
    exit: Tensor | None = None
    deferred: WeightGradients | None = None
    sent: Pending | None = None


@dataclass
class _Step:
    """What one step has under way."""

    batches: Sequence[MicroBatch]
    scale: Tensor | float
    loss: Tensor
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    handed: dict[Op, Tensor] = field(default_factory=dict)
    sends: deque[Pending] = field(default_factory=deque)


class Runtime:
    """Executes a schedule on one rank.

    Args:
        schedule: the passes of all ranks.
        boundary: what crosses between stages.
        vocab: this rank's shard of the vocabulary, where the schedule has its passes.
        autocast: a fresh context in which forward passes compute.
        around: called with whether the pass is a stage's last; wraps a backward pass.
        recompute: none, selective, full (by block) or stage.
        span: wraps what is recorded as computing; called with ``forward`` or ``backward``.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, StageLike],
        pp: Comm,
        boundary: StageBoundary,
        *,
        vocab: VocabShard | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        around: Callable[[bool], AbstractContextManager[None]] | None = None,
        recompute: str = "none",
        span: Span = contextlib.nullcontext,
    ) -> None:
        self.schedule = schedule
        self.stages = stages
        self.pp = pp
        self.boundary = boundary
        self.vocab = vocab
        self.autocast = autocast
        self.around = around or (lambda _last: contextlib.nullcontext())
        self.recompute = recompute
        self.span = span
        self.program = schedule.ops[pp.rank]
        self.events: list[Event] | None = None
        """Passes as they were done in the last step, if it was asked to record, in seconds
        after :attr:`began`."""
        self.began = 0.0
        """When the last step began, in seconds of the host's monotonic clock."""
        self._incoming = _messages(schedule, pp.rank)
        self._last_pass = self._find_last()
        self._passes: dict[str, Callable[[_Step, Op], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._input_gradient,
            "W": self._weight_gradient,
            "EF": self._embed,
            "S": self._score,
            "T": self._finish_vocab,
            "EB": self._embed_gradient,
        }

    def _find_last(self) -> frozenset[Op]:
        """The last backward pass of every stage: after it the stage's gradients are complete."""
        last: dict[int, Op] = {}
        for op in self.program:
            if op.kind in "BIW":
                last[op.stage] = op
        return frozenset(last.values())

    def step(
        self, batches: Sequence[MicroBatch], scale: Tensor | float, *, record: bool = False
    ) -> Tensor:
        """Do every pass of one step.

        Args:
            batches: the micro-batches, as many as the schedule has.
            scale: factor of every loss sum before it goes backward.
            record: keep the times of the passes in :attr:`events`.

        Returns:
            Loss sum over this rank's micro-batches; 0 where the last stage is elsewhere.

        Raises:
            RankError: a peer is gone or did not come in time.
        """
        device = self.boundary.device
        exact = torch.promote_types(self.boundary.dtype, torch.float32)
        state = _Step(batches, scale, torch.zeros((), dtype=exact, device=device))
        waiting = {
            source: deque(_Message(source, need) for need in needs)
            for source, needs in self._incoming.items()
        }
        messages = {m.need: m for queue in waiting.values() for m in queue}
        order = [messages[op] for op in self.program if op in messages]
        at = 0
        self.events = [] if record else None
        self.began = begin = time.perf_counter()
        for op in self.program:
            if op in messages:
                at += 1
                for message in order[at - 1 : at + _AHEAD]:
                    self._post(message, waiting[message.source], batches)
                message = messages[op]
                assert message.pending is not None and message.buffer is not None
                message.pending.wait()
                state.handed[op] = self.boundary.incoming(message.buffer, batches[op.mb])
                message.buffer = None
            start = time.perf_counter()
            with self.span("forward" if op.kind in _FORWARD else "backward"):
                self._passes[op.kind](state, op)
            if self.events is not None:
                now = time.perf_counter()
                self.events.append(Event(self.pp.rank, op, start - begin, now - begin))
        for pending in state.sends:
            pending.wait()
        if self.vocab is not None:
            self.vocab.finish()
        return state.loss

    def forward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Loss sum of the forward passes alone, without gradients; 0 where it is elsewhere."""
        device = self.boundary.device
        exact = torch.promote_types(self.boundary.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=device)
        route = self.schedule.whole_route
        last = route[-1]
        sends: list[Pending] = []
        with torch.no_grad():
            for batch in batches:
                handed: Tensor | None = None
                if self.vocab is not None:
                    handed = self.vocab.forward_embed(batch.tokens)
                    if handed is not None:
                        handed = self.boundary.share(handed).to(self.boundary.dtype)
                for at, stage in enumerate(route):
                    if self.schedule.place[stage] != self.pp.rank:
                        continue
                    source = self.schedule.place[route[at - 1]] if at else self.pp.rank
                    if source != self.pp.rank:
                        buffer = self.boundary.buffer(batch)
                        self.pp.receive(buffer, source, tag="activations").wait()
                        handed = self.boundary.incoming(buffer, batch)
                    with self.autocast():
                        out = self.stages[stage](handed, batch, recompute=False)
                    handed = out
                    if stage == last:
                        break
                    target = self.schedule.place[route[at + 1]]
                    if target != self.pp.rank:
                        part = self.boundary.outgoing(out)
                        sends.append(self.pp.send(part, target, tag="activations"))
                if self.vocab is not None:
                    here = self.schedule.place[last] == self.pp.rank
                    hidden = self.boundary.whole(handed) if here and handed is not None else None
                    total += self.vocab.forward_loss(hidden, batch.targets)
                elif self.schedule.place[last] == self.pp.rank and handed is not None:
                    total += handed
        for pending in sends:
            pending.wait()
        if self.vocab is not None:
            self.vocab.finish()
        return total

    def _post(
        self, message: _Message, queue: deque[_Message], batches: Sequence[MicroBatch]
    ) -> None:
        """Post the receives of this source up to ``message``, in the order it sends them."""
        while message.pending is None:
            first = queue.popleft()
            first.buffer = self.boundary.buffer(batches[first.need.mb])
            tag = "activations" if first.need.kind == "F" else "gradients"
            first.pending = self.pp.receive(first.buffer, first.source, tag=tag)

    def _neighbour(self, op: Op, by: int) -> int | None:
        """The stage before (-1) or after (+1) this one on the micro-batch's route."""
        route = self.schedule.route(op.mb)
        at = route.index(op.stage) + by
        return route[at] if 0 <= at < len(route) else None

    def _hand_on(self, state: _Step, need: Op, x: Tensor, tag: str) -> Pending | None:
        """Give ``x`` to the pass ``need``, here or on another rank."""
        target = self.schedule.place[need.stage]
        if target == self.pp.rank:
            state.handed[need] = x.detach()
            return None
        return self.pp.send(self.boundary.outgoing(x), target, tag=tag)

    def _forward(self, state: _Step, op: Op) -> None:
        entry = state.handed.pop(op, None)
        if self.vocab is not None and self._neighbour(op, -1) is None:
            result = self.boundary.share(self.vocab.take_embedded(op.mb))
            entry = result.to(self.boundary.dtype, copy=True)
        flight = state.flights[op.stage, op.mb] = _Flight(entry)
        if entry is not None:
            entry.requires_grad_(True)
        with torch.set_grad_enabled(self.recompute != "stage"):
            out = self._compute(op, entry, state)
        after = self._neighbour(op, 1)
        if after is None and self.vocab is None:
            state.loss += out.detach()
        if self.recompute != "stage":
            flight.exit = out
        if after is None and self.vocab is not None:
            self.vocab.give_hidden(op.mb, self.boundary.whole(out), state.batches[op.mb].targets)
        if after is not None:
            flight.sent = self._hand_on(state, Op("F", after, op.mb), out, "activations")

    def _compute(self, op: Op, entry: Tensor | None, state: _Step) -> Tensor:
        with self.autocast():
            return self.stages[op.stage](
                entry, state.batches[op.mb], recompute=self.recompute in ("full", "selective")
            )

    def _backward(self, state: _Step, op: Op) -> None:
        flight = state.flights.pop((op.stage, op.mb))
        with self.around(op in self._last_pass):
            self._back(state, op, flight)

    def _input_gradient(self, state: _Step, op: Op) -> None:
        flight = state.flights[op.stage, op.mb]
        flight.deferred = WeightGradients()
        with self.around(False), flight.deferred:
            self._back(state, op, flight)
        flight.entry = flight.exit = None

    def _weight_gradient(self, state: _Step, op: Op) -> None:
        flight = state.flights.pop((op.stage, op.mb))
        assert flight.deferred is not None
        with self.around(op in self._last_pass):
            flight.deferred.run()

    def _back(self, state: _Step, op: Op, flight: _Flight) -> None:
        gradient = state.handed.pop(op, None)
        out = flight.exit
        last = self._neighbour(op, 1) is None
        if self.recompute == "stage":
            out = self._compute(op, flight.entry, state)
        assert out is not None
        if flight.sent is not None:
            flight.sent.wait()  # its gradient came, so it has arrived
        if last and self.vocab is not None:
            loss, gradient = self.vocab.take_gradient(op.mb)
            state.loss += loss
            torch.autograd.backward(out, self.boundary.share(gradient).to(out.dtype))
        elif last:
            (out * state.scale).backward()  # type: ignore[no-untyped-call]
        else:
            torch.autograd.backward(out, gradient)
        before = self._neighbour(op, -1)
        if flight.entry is None or flight.entry.grad is None:
            return
        if before is not None:
            need = self.schedule.backward(before, op.mb)
            pending = self._hand_on(state, need, flight.entry.grad, "gradients")
            if pending is not None:
                state.sends.append(pending)
        elif self.vocab is not None:  # the embedding's shards wait for it
            self.vocab.give_gradient(op.mb, self.boundary.whole(flight.entry.grad))

    def _embed(self, state: _Step, op: Op) -> None:
        assert self.vocab is not None
        self.vocab.ef(op.mb, state.batches[op.mb].tokens)

    def _score(self, state: _Step, op: Op) -> None:
        assert self.vocab is not None
        self.vocab.s(op.mb, state.batches[op.mb].targets, state.scale)

    def _finish_vocab(self, state: _Step, op: Op) -> None:
        assert self.vocab is not None
        with self.around(False):
            self.vocab.t(op.mb)

    def _embed_gradient(self, state: _Step, op: Op) -> None:
        assert self.vocab is not None
        with self.around(False):
            self.vocab.eb(op.mb)


def _messages(schedule: Schedule, rank: int) -> dict[int, list[Op]]:
    """Source rank -> passes of ``rank`` that wait for its messages, in the order it sends them."""
    messages: dict[int, list[Op]] = {}
    for source, program in enumerate(schedule.ops):
        if source == rank:
            continue
        for op in program:
            if op.kind not in ("F", "B", "I"):
                continue
            route = schedule.route(op.mb)
            at = route.index(op.stage) + (1 if op.kind == "F" else -1)
            if not 0 <= at < len(route) or schedule.place[route[at]] != rank:
                continue
            stage = route[at]
            need = Op("F", stage, op.mb) if op.kind == "F" else schedule.backward(stage, op.mb)
            messages.setdefault(source, []).append(need)
    return messages

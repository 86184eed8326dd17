"""Weights of some experts on some ranks, for one pass; their gradients, summed where they live.

What owners lend is on its way while other things are computed. Of one layer, in order of time::

    begun     attention     handed    router, counts    landed     experts
    | from owners ------------>| within nodes ------------>|
    |<------------ to owners --|<------------ within nodes |
    settled   attention     passed on    router         given back  experts

Forward it is read from left to right, and backward from right to left: each of the three points is
a function with a gradient, and autograd runs the gradients of what was computed last first. The
first of a node sums what its neighbours have, and the owner what the nodes have, in the order of
ranks. What is waited for at the three points is what nothing has hidden.

Where copies are to be gathered again they are dropped after the forward pass; the layer behind asks
for them before its own attention goes backward.

Shapes: X experts that this rank owns, C copies that it gets, P parameters of an expert.

Source: Hecate, 2025, section 4.1 (SparseAllGather, SparseReduceScatter, re-materialisation).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.ir.hooks import StepHook, TrainStep
from shoal.kernel.tensors import compute_dtype

if TYPE_CHECKING:
    from shoal.parallel.expert.copies import ExpertCopies, Leg
    from shoal.parallel.protocols import Comm, Pending

# Under this tag the meter counts weights of copies, and their gradients.
TAG = "expert_copies"


class CopyMeter(StepHook):
    """What copies have cost this rank, of all layers.

    Attributes:
        peak_bytes: most bytes of copies that there were at once.
        exposed_s: seconds in which they, or their gradients, were waited for in this step.
        last: what was begun last.
    """

    kind = "copies"

    def __init__(self) -> None:
        self.peak_bytes, self.exposed_s = 0, 0.0
        self.last: LayerCopies | None = None
        self._there: list[tuple[StorageWeakRef, int]] = []

    @property
    def bytes(self) -> int:
        """Of the copies that there are."""
        self._there = [one for one in self._there if not one[0].expired()]  # type: ignore[no-untyped-call]
        return sum(size for _, size in self._there)

    def hold(self, rows: Tensor) -> Tensor:
        """Count copies for as long as they are referenced."""
        weak = StorageWeakRef(rows.untyped_storage())  # type: ignore[no-untyped-call]
        self._there.append((weak, rows.nbytes))
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return rows

    def before_step(self, step: TrainStep) -> None:
        """Nothing was waited for."""
        self.exposed_s = 0.0

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """What copies have cost in the last step; the most bytes ever."""
        cost = {"copies_exposed_s": self.exposed_s, "copies_bytes": self.peak_bytes}
        return {"step": cost}

    def wait(self, pending: Pending) -> None:
        """Wait, and count for how long."""
        begin = time.perf_counter()
        pending.wait()
        self.exposed_s += time.perf_counter() - begin


class LayerCopies:
    """The copies of one layer and pass on this rank.

    Args:
        own: parameters [X, ...] of the experts that this rank owns, by rising number.
        copies: who sends what.
        comm: the ranks that share out the experts.
        ledger: where they are counted.
        layer: number of the block.
        again: drop them after the forward pass, and gather them again.

    They are sent in the dtype of the computation, their gradients in that of the parameters.
    """

    def __init__(
        self,
        own: Sequence[Tensor],
        copies: ExpertCopies,
        comm: Comm,
        meter: CopyMeter,
        *,
        layer: int = 0,
        again: bool = False,
    ) -> None:
        self.layer, self.again = layer, again
        self._own = [one.detach() for one in own]
        self._shapes = [tuple(one.shape[1:]) for one in own]
        self._dtype = compute_dtype(own[0])
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._copies, self._comm, self._meter = copies, comm, meter
        self._rows: Tensor | None = None
        self._grad: Tensor | None = None
        self._moving: Pending | None = None
        self._legs = 0  # that were begun
        self._back: list[Tensor] = []
        # Behind in the forward pass, and so the next to go backward.
        self.before: LayerCopies | None = None
        last, meter.last = meter.last, self
        if last is not None and last.layer == layer - 1:
            self.before = last

    def begin(self) -> None:
        """Ask owners for copies, unless that was done."""
        if self._rows is None:
            shape = self._copies.count, sum(self._sizes)
            rows = self._own[0].new_empty(shape, dtype=self._dtype)
            self._rows, self._legs = self._meter.hold(rows), 0
            self._issue()

    def hand_on(self) -> None:
        """What came from owners goes to others of this node."""
        self.begin()
        if self._legs == 1:
            self._wait()
            self._issue()

    def weights(self) -> tuple[Tensor, ...]:
        """Parameters [C, ...] of all copies, when they are there."""
        self.hand_on()
        self._wait()
        assert self._rows is not None
        return self._cut(self._rows)

    def drop(self) -> None:
        """Nothing here needs them any more."""
        self._rows = None

    def _issue(self) -> None:
        """Begin the next leg."""
        leg, rows = self._copies.legs[self._legs], self._rows
        assert rows is not None
        first = self._copies.legs[0].count
        own = self._legs == 0
        here, out = ([], rows[:first]) if own else ([rows[:first]], rows[first:])
        self._legs += 1
        if not leg.used:
            return
        source = [one.flatten(1) for one in self._own] if own else here
        sends = [
            torch.cat([one[list(which)] for one in source], 1).to(self._dtype)
            for which in leg.sends
        ]
        outs = torch.split(out, list(leg.receives))
        self._moving = self._comm.all_to_all(outs, sends, tag=TAG)

    def _wait(self) -> None:
        if self._moving is not None:
            self._meter.wait(self._moving)
            self._moving = None

    def _cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The parameters of experts that lie behind each other."""
        parts = torch.split(rows, self._sizes, 1)
        return tuple(
            part.reshape(len(rows), *shape) for part, shape in zip(parts, self._shapes, strict=True)
        )

    def give_back(self, grads: Sequence[Tensor]) -> None:
        """Gradients of copies go to the rank of this node that sent them."""
        self.drop()
        self._grad = torch.cat([one.flatten(1) for one in grads], 1).to(self._own[0].dtype)
        self._return(self._copies.legs[1], self._grad[self._copies.legs[0].count :])

    def pass_on(self) -> None:
        """What this node has goes to the owners; the layer before may gather again."""
        assert self._grad is not None
        here = self._grad[: self._copies.legs[0].count]
        self._sum(self._copies.legs[1], here)
        self._return(self._copies.legs[0], here)
        if self.before is not None and self.before.again:
            self.before.begin()
            self.before = None

    def settle(self) -> tuple[Tensor, ...]:
        """Gradients [X, ...] of this rank's experts, of all copies."""
        assert self._grad is not None
        total = self._grad.new_zeros(len(self._own[0]), sum(self._sizes))
        self._sum(self._copies.legs[0], total)
        self._grad = None
        return self._cut(total)

    def _return(self, leg: Leg, grad: Tensor) -> None:
        """Begin to send gradients of what came over a leg."""
        if not leg.used:
            return
        self._back = [grad.new_empty(len(one), grad.shape[1]) for one in leg.sends]
        parts = torch.split(grad, list(leg.receives))
        self._moving = self._comm.all_to_all(self._back, parts, tag=TAG)

    def _sum(self, leg: Leg, total: Tensor) -> None:
        """Add to rows that were sent over a leg the gradients of what came of them."""
        if not leg.used:
            return
        self._wait()
        for which, part in zip(leg.sends, self._back, strict=True):
            if which:
                total.index_add_(0, torch.tensor(which, device=total.device), part)
        self._back = []


class _Begun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lent: LayerCopies, *own: Tensor) -> Tensor:
        ctx.lent = lent
        lent.begin()
        return own[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.lent.settle()


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lent: LayerCopies, sign: Tensor) -> Tensor:
        ctx.lent = lent
        lent.hand_on()
        return sign.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        ctx.lent.pass_on()
        return None, grad


class _Landed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lent: LayerCopies, sign: Tensor) -> tuple[Tensor, ...]:
        ctx.lent = lent
        return lent.weights()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.lent.give_back(grads)
        return None, grads[0].new_empty(0)


def begun(lent: LayerCopies, own: Sequence[Tensor]) -> Tensor:
    """Ask for copies of experts whose owners' parameters these are.

    Returns:
        An empty sign for :func:`handed`, by which autograd knows the order of things.
    """
    out: Tensor = _Begun.apply(lent, *own)  # type: ignore[no-untyped-call]
    return out


def handed(lent: LayerCopies, sign: Tensor) -> Tensor:
    """Send them on within nodes; a sign for :func:`landed`."""
    out: Tensor = _Handed.apply(lent, sign)  # type: ignore[no-untyped-call]
    return out


def landed(lent: LayerCopies, sign: Tensor) -> tuple[Tensor, ...]:
    """Parameters [C, ...] of all copies, when they are there."""
    out: tuple[Tensor, ...] = _Landed.apply(lent, sign)  # type: ignore[no-untyped-call]
    return out


def gathered(own: Sequence[Tensor], copies: ExpertCopies, comm: Comm) -> tuple[Tensor, ...]:
    """Parameters [C, ...] of all experts that this rank borrows, in the order of ``copies``."""
    lent = LayerCopies(own, copies, comm, CopyMeter())
    return landed(lent, handed(lent, begun(lent, own)))

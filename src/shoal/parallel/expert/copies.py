"""Weights of some experts on some ranks, for one pass; their gradients, summed where they live.

``gathered`` is an all-gather that leaves out what nobody needs. Who gets what is a table that all
ranks compute alike, so nothing is asked or told on the way. A node gets each expert once, from
its owner, and hands it on. Backward the same way in reverse: the first of a node sums what its
neighbours have, and the owner what the nodes have, in the order of ranks.

Shapes: E experts, N ranks, X experts that this rank owns, C copies that it gets, P parameters of
an expert.

Source: Hecate, 2025, section 4.1 (SparseAllGather, SparseReduceScatter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.plan.placement.fssdp import sender
from shoal.plan.placement.owners import only_owners

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm
    from shoal.plan.placement.protocols import Devices, Flags, Ints

__all__ = ["TAG", "Copies", "copies_of", "gathered", "sent_copies"]

# Under this tag the meter counts weights of copies, and their gradients.
TAG = "expert_copies"


@dataclass(frozen=True, slots=True)
class _Leg:
    """One exchange: for every rank, which of this rank's rows it gets, and how many come.

    Args:
        sends: by rank, rows of what this rank has.
        receives: by rank, how many rows come from it.
    """

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a pass, as one rank sees them.

    Args:
        experts: those that this rank has in the end, its own and copies, rising.
        order: of the rows (own, then from owners, then handed on), those of ``experts``.
        legs: from owners, and within nodes.
    """

    experts: tuple[int, ...]
    order: tuple[int, ...]
    legs: tuple[_Leg, _Leg]

    @property
    def count(self) -> int:
        """Copies that this rank gets."""
        return sum(sum(leg.receives) for leg in self.legs)


def sent_copies(owner_E: Ints, held_EN: Flags, devices: Devices) -> list[tuple[int, int, int, int]]:
    """(leg, expert, from, to) of every copy that travels, in order."""
    have_EN = only_owners(owner_E, devices)
    found = []
    for expert, device in zip(*np.nonzero(held_EN & ~have_EN), strict=True):
        source = sender(int(expert), int(device), owner_E, have_EN, devices)
        found.append((int(source != owner_E[expert]), int(expert), source, int(device)))
        have_EN[expert, device] = True
    return sorted(found)


def copies_of(owner_E: Ints, held_EN: Flags, devices: Devices, rank: int) -> Copies:
    """What a rank sends and receives so that everybody has what the table says.

    Args:
        owner_E: who keeps each expert.
        held_EN: who is to have it.
        devices: all ranks.
        rank: this one.
    """
    travels = sent_copies(owner_E, held_EN, devices)
    mine = np.flatnonzero(owner_E == rank).tolist()
    has, legs = list(mine), []
    for number in (0, 1):
        leg = [(expert, source, to) for n, expert, source, to in travels if n == number]
        sends = tuple(
            tuple(has.index(expert) for expert, source, to in leg if (source, to) == (rank, other))
            for other in range(devices.count)
        )
        comes = [
            [expert for expert, source, to in leg if (source, to) == (other, rank)]
            for other in range(devices.count)
        ]
        legs.append(_Leg(sends, tuple(len(one) for one in comes)))
        has += [expert for one in comes for expert in one]
    order = np.argsort(np.array(has, dtype=np.int64), kind="stable").tolist()
    return Copies(tuple(has[at] for at in order), tuple(order), (legs[0], legs[1]))


def _leg(rows_RP: Tensor, leg: _Leg, comm: Comm) -> Tensor:
    """What comes over one leg, by rank."""
    out = rows_RP.new_empty(sum(leg.receives), rows_RP.shape[1])
    sends = [rows_RP[list(one)] for one in leg.sends]
    comm.all_to_all(torch.split(out, list(leg.receives)), sends, tag=TAG).wait()
    return out


def _back(grad_RP: Tensor, leg: _Leg, comm: Comm) -> None:
    """Add to the rows that were sent over a leg the gradients of what came of them."""
    came = sum(leg.receives)
    rows = len(grad_RP) - came
    parts = [grad_RP.new_empty(len(one), grad_RP.shape[1]) for one in leg.sends]
    comm.all_to_all(parts, torch.split(grad_RP[rows:], list(leg.receives)), tag=TAG).wait()
    for one, part in zip(leg.sends, parts, strict=True):
        if one:
            grad_RP.index_add_(0, torch.tensor(one, device=grad_RP.device), part)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Copies, comm: Comm, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.comm = copies, comm
        ctx.shapes = [tuple(one.shape[1:]) for one in own]
        rows = torch.cat([one.flatten(1) for one in own], 1)
        for leg in copies.legs:
            rows = torch.cat([rows, _leg(rows, leg, comm)])
        return _cut(rows[list(copies.order)], ctx.shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        copies: Copies = ctx.copies
        given = torch.cat([one.flatten(1) for one in grads], 1)
        rows = torch.empty_like(given)
        rows[list(copies.order)] = given
        for leg in reversed(copies.legs):
            # A row's gradient is whole once those who got it from here have sent theirs back.
            _back(rows, leg, ctx.comm)
            rows = rows[: len(rows) - sum(leg.receives)]
        return None, None, *_cut(rows, ctx.shapes)


def _cut(rows_RP: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """The parameters of experts that lie behind each other."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    parts = torch.split(rows_RP, sizes, 1)
    return tuple(
        part.reshape(len(rows_RP), *shape) for part, shape in zip(parts, shapes, strict=True)
    )


def gathered(own: Sequence[Tensor], copies: Copies, comm: Comm) -> tuple[Tensor, ...]:
    """Parameters of all experts that this rank is to have, [H, ...] each, by rising number.

    Args:
        own: [X, ...] each, of the experts that this rank owns, by rising number.
        copies: who sends what.
        comm: the ranks that share out the experts.
    """
    out: tuple[Tensor, ...] = _Gathered.apply(copies, comm, *own)  # type: ignore[no-untyped-call]
    return out

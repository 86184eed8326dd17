"""Which weights of experts go where, so that every rank has the copies that a table says.

Who gets what is a table that all ranks compute alike, so nothing is negotiated on the way. A
node gets each expert once, from its owner, and hands it on: two exchanges, and none at all where
no rank gets anything.

Shapes: E experts, N ranks, X experts that this rank owns, C copies that it gets.

Source: Hecate, 2025, section 4.1 (SparseAllGather, SparseReduceScatter).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.plan.placement.fssdp import sender
from shoal.plan.placement.owners import only_owners

if TYPE_CHECKING:
    from shoal.plan.placement.protocols import Devices, Flags, Ints


@dataclass(frozen=True, slots=True)
class Leg:
    """One exchange: for every rank, which of this rank's rows it gets, and how many come.

    Args:
        sends: by rank, rows of what this rank has: its own [X] before the first leg; what came of
            that before the second.
        receives: by rank, how many rows come from it.
        used: some rank sends something.
    """

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]
    used: bool

    @property
    def count(self) -> int:
        """Rows that come."""
        return sum(self.receives)


@dataclass(frozen=True, slots=True)
class ExpertCopies:
    """The copies of a pass, as one rank sees them.

    Args:
        experts: those that this rank has: its own, rising, then copies as they come.
        owned: how many of them are its own.
        legs: from owners, and within nodes.
    """

    experts: tuple[int, ...]
    owned: int
    legs: tuple[Leg, Leg]

    @property
    def count(self) -> int:
        """Copies that this rank gets."""
        return len(self.experts) - self.owned

    @property
    def used(self) -> bool:
        """Some rank gets something."""
        return any(leg.used for leg in self.legs)


def sent_copies(owner_E: Ints, held_EN: Flags, devices: Devices) -> list[tuple[int, int, int, int]]:
    """(leg, expert, from, to) of every copy that is sent, in order."""
    have_EN = only_owners(owner_E, devices)
    sent_copies = []
    for expert, device in zip(*np.nonzero(held_EN & ~have_EN), strict=True):
        source = sender(int(expert), int(device), owner_E, have_EN, devices)
        sent_copies.append((int(source != owner_E[expert]), int(expert), source, int(device)))
        have_EN[expert, device] = True
    return sorted(sent_copies)


def copies_of(owner_E: Ints, held_EN: Flags, devices: Devices, rank: int) -> ExpertCopies:
    """What a rank sends and receives so that every rank has what the table says.

    Args:
        owner_E: the rank that keeps each expert.
        held_EN: the ranks that are to have it.
        devices: all ranks.
        rank: this one.
    """
    travels = sent_copies(owner_E, held_EN, devices)
    mine = np.flatnonzero(owner_E == rank).tolist()
    experts, has, legs = list(mine), list(mine), []
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
        legs.append(Leg(sends, tuple(len(one) for one in comes), bool(leg)))
        has = [expert for one in comes for expert in one]
        experts += has
    return ExpertCopies(tuple(experts), len(mine), (legs[0], legs[1]))

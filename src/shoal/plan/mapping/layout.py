"""Where every buffer is at every step: the answer of a mapper, and what holds it to account.

:func:`verify` knows nothing of the game that made a mapping: it sweeps the rectangles, adds up
the link and runs the clock anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.core.errors import PlanError
from shoal.plan.mapping.program import TICK_S, Compiled

DROP, NO_COPY, COPY = 0, 1, 2
ACTIONS = ("drop", "no_copy", "copy")


@dataclass(frozen=True)
class Rectangle:
    """A stay of a buffer in fast memory.

    Args:
        start: first slot.
        end: last slot, which is part of it.
        address: in units of the alignment.
        decision: that began it.
    """

    buffer: int
    start: int
    end: int
    address: int
    decision: int


@dataclass(frozen=True)
class CopyTime:
    """Link time that one copy takes in one slot.

    Args:
        slot: while which instruction runs; past the last one, after the end.
        ticks: of the slow memory.
        decision: the decision that requested it; for a write, that of the copy from fast to slow
            memory.
    """

    buffer: int
    slot: int
    ticks: int
    decision: int


@dataclass(frozen=True)
class Mapping:
    """What was decided, and where that puts everything.

    Args:
        actions: :data:`DROP`, :data:`NO_COPY` or :data:`COPY` of each decision.
        rectangles: stays in fast memory.
        moved: link time of copies.
        ticks: modelled time of the program.
        notes: what else there is to say.
        details: numbers of the search.
    """

    compiled: Compiled
    actions: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    moved: tuple[CopyTime, ...]
    ticks: int
    mapper: str = ""
    notes: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Modelled time of the program."""
        return self.ticks * TICK_S

    @property
    def saved(self) -> int:
        """Ticks less than with everything in slow memory."""
        return self.compiled.all_slow - self.ticks

    def durations(self) -> np.ndarray:
        """Ticks of each instruction, [T]."""
        c = self.compiled
        memory = np.zeros(c.slots, np.int64)
        fast = np.array(self.actions) != DROP
        np.add.at(memory, c.slot, np.where(fast, c.fast, c.slow))
        return np.maximum(c.compute, memory)

    def address(self, name: str, slot: int) -> int | None:
        """Byte address of a buffer, or of one that shares its memory, in a slot; None if slow."""
        c = self.compiled
        b = c.names.index(c.program.root(name))
        for one in self.rectangles:
            if one.buffer == b and one.start <= slot <= one.end:
                return one.address * c.tiers.alignment
        return None


def verify(mapping: Mapping) -> int:
    """Ticks of a mapping, after everything that it promises was looked at.

    Raises:
        PlanError: two buffers in one place, a link that moves more than it can, a read of what
            is not there; says which and where.
    """
    c = mapping.compiled
    name = c.names.__getitem__
    if len(mapping.actions) != c.decisions:
        raise PlanError(f"mapping: {len(mapping.actions)} actions for {c.decisions} decisions")
    _apart(mapping)
    durations = mapping.durations()
    link = np.zeros(c.slots + 1, np.int64)
    for k, action in enumerate(mapping.actions):
        if action == DROP:
            link[c.slot[k]] += c.slow[k]
    pieces: dict[int, list[CopyTime]] = {}
    for piece in mapping.moved:
        if piece.ticks <= 0 or c.buffer[piece.decision] != piece.buffer:
            raise PlanError(f"mapping: no copy of {name(piece.buffer)} is like this: {piece}")
        link[piece.slot] += piece.ticks
        pieces.setdefault(piece.decision, []).append(piece)
    over = np.flatnonzero(link[:-1] > durations)
    if len(over):
        raise PlanError(
            f"mapping: in slot {over[0]} the link is busy for {link[over[0]]} ticks of "
            f"{durations[over[0]]}"
        )
    stays: dict[int, list[Rectangle]] = {}
    for one in mapping.rectangles:
        stays.setdefault(one.buffer, []).append(one)
    ready = _in_slow(mapping, stays, pieces)
    for k, action in enumerate(mapping.actions):
        b, slot = int(c.buffer[k]), int(c.slot[k])
        if action == DROP and not c.write[k] and ready[b] > slot:
            raise PlanError(f"mapping: slot {slot} reads {name(b)} before slow memory has it")
        if action == DROP:
            continue
        there = [one for one in stays.get(b, ()) if one.start <= slot <= one.end]
        if c.write[k]:
            there = [one for one in there if one.decision == k]
        if not any(_filled(mapping, one, ready, pieces) <= slot for one in there):
            raise PlanError(f"mapping: slot {slot} uses {name(b)} before fast memory has it")
    for b in np.flatnonzero((c.output > 0) & (c.made >= 0)).tolist():
        if int(ready[b]) > c.slots + 1:
            raise PlanError(f"mapping: output {name(b)} never reaches slow memory")
    return int(durations.sum()) + int(link[-1])


def _apart(mapping: Mapping) -> None:
    """No two rectangles share a byte, and all lie inside."""
    c, stays = mapping.compiled, mapping.rectangles
    for i, one in enumerate(stays):
        top = one.address + int(c.size[one.buffer])
        if one.address < 0 or top > c.room or not 0 <= one.start <= one.end < c.slots:
            raise PlanError(f"mapping: {c.names[one.buffer]} lies outside: {one}")
        for two in stays[:i]:
            if (
                one.start <= two.end
                and two.start <= one.end
                and one.address < two.address + int(c.size[two.buffer])
                and two.address < top
            ):
                names = f"{c.names[one.buffer]} and {c.names[two.buffer]}"
                raise PlanError(f"mapping: {names} overlap: {one}, {two}")


def _in_slow(
    mapping: Mapping, stays: dict[int, list[Rectangle]], pieces: dict[int, list[CopyTime]]
) -> np.ndarray:
    """First slot in which slow memory has each buffer; past the end if never, [B]."""
    c = mapping.compiled
    ready = np.where(c.made < 0, 0, c.slots + 2)
    for k in np.flatnonzero(c.write):
        b = int(c.buffer[k])
        if mapping.actions[k] == DROP:
            ready[b] = int(c.slot[k]) + 1
        moved = pieces.get(int(k), [])
        if not moved:
            continue
        home = next((one for one in stays.get(b, ()) if one.decision == k), None)
        for piece in moved:
            if home is None or not c.slot[k] < piece.slot <= home.end + (piece.slot == c.slots):
                raise PlanError(f"mapping: {c.names[b]} is copied out where it is not: {piece}")
        if sum(piece.ticks for piece in moved) >= c.copy[b]:
            ready[b] = max(piece.slot for piece in moved) + 1
    return ready


def _filled(
    mapping: Mapping, one: Rectangle, ready: np.ndarray, pieces: dict[int, list[CopyTime]]
) -> int:
    """First slot in which the data of a rectangle are there."""
    c, b = mapping.compiled, one.buffer
    if c.write[one.decision]:
        if one.start != c.made[b] or c.buffer[one.decision] != b:
            raise PlanError(f"mapping: {c.names[b]} is not written where it begins: {one}")
        return one.start
    total, last = 0, one.start
    for piece in pieces.get(one.decision, ()):
        if piece.slot < ready[b] or not one.start <= piece.slot <= one.end:
            raise PlanError(f"mapping: {c.names[b]} is copied when it cannot be: {piece}")
        total, last = total + piece.ticks, max(last, piece.slot)
    if total < c.copy[b]:
        raise PlanError(f"mapping: {c.names[b]} is not copied wholly: {one}")
    return last + 1

"""The game of memory mapping: walk the program, decide for every access where it happens.

One decision an (instruction, buffer) pair, in program order:

- ``drop``: the access goes to slow memory.
- ``no_copy``: it goes to fast memory and nothing is moved. A result stays there, and only there,
  until its last use; an operand that is there already stays until now.
- ``copy``: an operand is brought by a copy that ends before the instruction begins and starts as
  late as the link allows. A result is written to fast memory and copied out as soon as the link
  has time; until then it keeps its place for its whole life, after that other buffers may take
  the place.

An instruction takes the longer of its computing and its memory accesses. All decisions about
earlier instructions are final when a copy is placed, so its time on the link is time in which
the slow memory is truly idle, and nothing that is placed later makes anything slower.
A reward is the time that a decision takes off; the sum is exactly what the program saves.

Source: Mandhane et al., Optimizing Memory Mapping Using Deep Reinforcement Learning, 2023.
Differs: results too may be copied out while other instructions run.
"""

from __future__ import annotations

from shoal.core.errors import PlanError
from shoal.plan.mapping.layout import COPY, DROP, NO_COPY, CopyTime, Mapping, Rectangle
from shoal.plan.mapping.program import Compiled

_Pieces = list[tuple[int, int]]


class Game:
    """One play of a program; the rules, in plain Python. ``native`` plays the same faster."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        c = compiled
        # Plain lists: a decision touches a few numbers, for which arrays are slow.
        self._slot, self._buffer = c.slot.tolist(), c.buffer.tolist()
        self._write, self._slow, self._fast = c.write.tolist(), c.slow.tolist(), c.fast.tolist()
        self._following = c.following.tolist()
        self._compute, self._size, self._copy = (
            c.compute.tolist(),
            c.size.tolist(),
            c.copy.tolist(),
        )
        self._made, self._last, self._output = c.made.tolist(), c.last.tolist(), c.output.tolist()
        self.reset()

    def reset(self) -> None:
        """Begin again, everything in slow memory."""
        c = self.compiled
        self.k = 0
        self.now = 0
        self.actions: list[int] = []
        self.memory = [0] * c.slots
        self.busy = [0] * c.slots
        for k, slot in enumerate(self._slot):
            self.memory[slot] += self._slow[k]
            self.busy[slot] += self._slow[k]
        count = len(c.names)
        # Stays: [buffer, start, end, address, decision]; current is a buffer's latest.
        self.stays: list[list[int]] = []
        self.current = [-1] * count
        self.used = [-1] * count
        never = c.slots + 2
        self.ready = [0 if made < 0 else never for made in self._made]
        # What is still to be copied out: [buffer, ticks, decision], oldest first.
        self.debts: list[list[int]] = []
        self.moved: list[CopyTime] = []
        self.drain = 0
        self._settle()

    @property
    def done(self) -> bool:
        """All decisions are made."""
        return self.k == self.compiled.decisions

    @property
    def ticks(self) -> int:
        """Time of the program when everything undecided stays in slow memory."""
        return sum(self.duration(slot) for slot in range(self.compiled.slots)) + self.drain

    def duration(self, slot: int) -> int:
        """Ticks of an instruction as decided so far."""
        ticks: int = max(self._compute[slot], self.memory[slot])
        return ticks

    def free(self, slot: int) -> int:
        """Ticks in which the link is idle while an instruction runs whose decisions are made."""
        return self.duration(slot) - self.busy[slot]

    def legal(self) -> tuple[bool, bool, bool]:
        """Which of drop, no_copy and copy there is room for."""
        k = self.k
        b, slot = self._buffer[k], self._slot[k]
        if self._write[k]:
            output = bool(self._output[b])
            fits = self._hole(b, slot, self._home_end(b)) is not None
            return True, fits and not output, fits and (output or self._following[k] >= 0)
        there = self.ready[b] <= slot
        covered = self.current[b] >= 0 and self.stays[self.current[b]][2] >= slot
        return (
            there,
            self._extends(b, slot),
            there and not covered and self._fetch(b, slot) is not None,
        )

    def step(self, action: int) -> int:
        """Decide, and move on.

        Returns:
            Ticks that the program is faster by.

        Raises:
            PlanError: the game is over, or the action is not legal here.
        """
        if self.done:
            raise PlanError("mapping: all decisions are made")
        if action not in (DROP, NO_COPY, COPY) or not self.legal()[action]:
            raise PlanError(f"mapping: action {action} is not legal at decision {self.k}")
        k = self.k
        b, slot = self._buffer[k], self._slot[k]
        before = self.duration(slot)
        if action != DROP:
            self.memory[slot] += self._fast[k] - self._slow[k]
            self.busy[slot] -= self._slow[k]
            self.used[b] = slot
        if self._write[k]:
            self._written(k, action)
        elif action == NO_COPY:
            stay = self.stays[self.current[b]]
            stay[2] = max(stay[2], slot)
        elif action == COPY:
            self._fetched(k)
        if slot == self._last[b] and not self._output[b]:
            self.debts = [debt for debt in self.debts if debt[0] != b]
        self.actions.append(action)
        self.k += 1
        self._settle()
        return before - self.duration(slot) - (self.drain if self.done else 0)

    def mapping(self, mapper: str = "") -> Mapping:
        """The finished game.

        Raises:
            PlanError: it is not over.
        """
        if not self.done:
            raise PlanError(f"mapping: decision {self.k} is not made")
        return Mapping(
            self.compiled,
            tuple(self.actions),
            tuple(Rectangle(*stay) for stay in self.stays),
            tuple(self.moved),
            self.ticks,
            mapper,
        )

    def _home_end(self, b: int) -> int:
        """How long a result keeps its place unless it is copied out earlier."""
        return self.compiled.slots - 1 if self._output[b] else self._last[b]

    def _written(self, k: int, action: int) -> None:
        b, slot = self._buffer[k], self._slot[k]
        if action == DROP:
            self.ready[b] = slot + 1
            return
        end = self._home_end(b)
        address = self._hole(b, slot, end)
        assert address is not None
        self.current[b] = len(self.stays)
        self.stays.append([b, slot, end, address, k])
        if action == COPY:
            self.debts.append([b, self._copy[b], k])

    def _fetched(self, k: int) -> None:
        b, slot = self._buffer[k], self._slot[k]
        result = self._fetch(b, slot)
        assert result is not None
        address, pieces = result
        for at, ticks in pieces:
            self.busy[at] += ticks
            self.moved.append(CopyTime(b, at, ticks, k))
        self.current[b] = len(self.stays)
        self.stays.append([b, pieces[-1][0], slot, address, k])

    def _fetch(self, b: int, slot: int) -> tuple[int, _Pieces] | None:
        """Address and link time of the copy that starts latest and ends before ``slot``."""
        need, pieces = self._copy[b], []
        for at in range(slot - 1, self.ready[b] - 1, -1):
            take = min(self.free(at), need)
            if take > 0:
                pieces.append((at, take))
                need -= take
            if need == 0:
                address = self._hole(b, at, slot)
                return None if address is None else (address, pieces)
        return None

    def _extends(self, b: int, slot: int) -> bool:
        """Whether the place that a buffer had is its own until ``slot``."""
        if self.current[b] < 0:
            return False
        _, _, end, address, _ = self.stays[self.current[b]]
        top = address + self._size[b]
        return end >= slot or not any(
            low < top and address < low + self._size[other]
            for other, start, stop, low, _ in self.stays
            if start <= slot and stop > end
        )

    def _hole(self, b: int, start: int, end: int) -> int | None:
        """Address that is free all the time, by first or best fit."""
        size, room = self._size[b], self.compiled.room
        taken = sorted(
            (low, low + self._size[other])
            for other, begin, stop, low, _ in self.stays
            if begin <= end and stop >= start
        )
        at, best, least = 0, None, room + 1
        for low, top in [*taken, (room, room)]:
            hole = low - at
            if hole >= size and hole < least:
                if self.compiled.tiers.fit == "first":
                    return at
                best, least = at, hole
            at = max(at, top)
        return best

    def _settle(self) -> None:
        """Walk to the slot of the next decision; idle link time on the way pays debts."""
        goal = self.compiled.slots if self.done else self._slot[self.k]
        while self.now < goal:
            self._pay(self.now)
            self.now += 1
        if self.done:
            for b, ticks, k in self.debts:
                self.moved.append(CopyTime(b, self.compiled.slots, ticks, k))
                self.drain += ticks
            self.debts = []

    def _pay(self, slot: int) -> None:
        free = self.free(slot)
        for debt in self.debts:
            b, left, k = debt
            take = min(free, left) if self._made[b] < slot else 0
            if take <= 0:
                continue
            free -= take
            self.busy[slot] += take
            self.moved.append(CopyTime(b, slot, take, k))
            debt[1] -= take
            if debt[1] == 0:
                self.ready[b] = slot + 1
                self.stays[self.current[b]][2] = max(slot, self.used[b])
        self.debts = [debt for debt in self.debts if debt[1]]

"""The best mapping there is, as a mixed-integer programme; for small programs.

The programme knows the rules of time, link and space, but not the habits of the game: a copy may
take any idle time, a buffer any address, and a result may leave whenever it has been copied out.
So its optimum is at most the time of the best game.

Letters: k a decision, which may begin a stay of its buffer in fast memory; t a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from shoal.core.errors import PlanError
from shoal.core.parts import part
from shoal.plan.mapping.layout import COPY, DROP, NO_COPY, CopyTime, Mapping, Rectangle, verify
from shoal.plan.mapping.program import Compiled, MappingProgram, TierSpec

_Terms = Sequence[tuple[float, int]]
# Copies take this share more in the programme, and memory is this much smaller from the second on,
# so that whole ticks and units fit where its reals do; the next one where they do not. The first
# is none: what fits exactly may be the optimum.
_SLACKS = (0.0, 1e-6, 1e-5, 1e-4)


@part
class Milp:
    """The exact optimum by mixed-integer programming (HiGHS); the reference for small programs.

    Args:
        most: largest number of decisions of a program.
        seconds: time limit of the solver.
    """

    most: Annotated[int, Ge(1), Le(200)] = 25
    seconds: Annotated[float, Gt(0)] = 120.0

    def map(self, program: MappingProgram, tiers: TierSpec, *, seed: int = 0) -> Mapping:
        """The fastest mapping.

        Raises:
            PlanError: too many decisions, or no proof of an optimum in time.
        """
        compiled = Compiled(program, tiers)
        if compiled.decisions > self.most:
            raise PlanError(
                f"mapper.milp: {compiled.decisions} decisions of {program.name}; it takes at most "
                f"{self.most}; use hybrid or anneal, or set mapper.milp.most"
            )
        for slack in _SLACKS:
            mapping = _Programme(compiled, slack).solve(self.seconds)
            try:
                return replace(mapping, ticks=verify(mapping))
            except PlanError as cause:
                failed = cause
        raise PlanError(
            f"mapper.milp: the optimum of {program.name} cannot be rounded to whole ticks "
            f"({failed}); use hybrid or anneal"
        )


class _Programme:
    """Variables and rows."""

    def __init__(self, compiled: Compiled, slack: float) -> None:
        c = self.c = compiled
        self.slack = slack
        self.unit = max(1.0, c.all_slow / c.slots)
        self.low: list[float] = []
        self.high: list[float] = []
        self.whole: list[int] = []
        self.cost: list[float] = []
        self.rows: list[tuple[_Terms, float, float]] = []
        room = int(c.room)
        # In fast memory or not; a stay that begins here; slots of the stay.
        self.fast = [self._bit() for _ in range(c.decisions)]
        self.begins: dict[int, int] = {}
        self.there: dict[tuple[int, int], int] = {}
        self.link: dict[tuple[int, int], int] = {}
        self.address: dict[int, int] = {}
        self.writer = {int(c.buffer[k]): k for k in range(c.decisions) if c.write[k]}
        for k in range(c.decisions):
            b = int(c.buffer[k])
            if c.size[b] > room:
                self._row([(1.0, self.fast[k])], 0.0, 0.0)
                continue
            self.begins[k] = self._bit()
            self.address[k] = self._real(0.0, 1.0 - c.size[b] / room)
            for t in self._window(k):
                self.there[k, t] = self._bit()
        self._stays()
        self._copies()
        self._time()
        self._space()

    def _bit(self) -> int:
        return self._real(0.0, 1.0, whole=1)

    def _real(self, low: float, high: float, *, whole: int = 0, cost: float = 0.0) -> int:
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        self.cost.append(cost)
        return len(self.low) - 1

    def _row(self, terms: Iterable[tuple[float, int]], low: float, high: float) -> None:
        self.rows.append((list(terms), low, high))

    def _window(self, k: int) -> range:
        """Slots in which the stay that begins with a decision may be."""
        c, b = self.c, int(self.c.buffer[k])
        if c.write[k]:
            return range(int(c.slot[k]), c.slots if c.output[b] else int(c.last[b]) + 1)
        return range(int(c.made[b]) + 1, int(c.last[b]) + 1)

    def _stays(self) -> None:
        """A stay is one piece, there at its first use, and serves uses that it covers."""
        c = self.c
        serving: dict[int, list[int]] = {k: [] for k in range(c.decisions)}
        for k, begins in self.begins.items():
            slot = int(c.slot[k])
            self._row([(1.0, self.there[k, slot]), (-1.0, begins)], 0.0, 0.0)
            for t in self._window(k)[:-1]:
                first, second = self.there[k, t], self.there[k, t + 1]
                far, near = (first, second) if t < slot else (second, first)
                self._row([(1.0, far), (-1.0, near)], -1.0, 0.0)
            at = k
            while at >= 0:
                serves = self._real(0.0, 1.0)
                self._row([(1.0, serves), (-1.0, self.there[k, int(c.slot[at])])], -1.0, 0.0)
                serving[at].append(serves)
                at = int(c.following[at])
        for k, result in serving.items():
            self._row([(1.0, self.fast[k]), *((-1.0, one) for one in result)], -np.inf, 0.0)
            if k in self.begins:
                # A stay serves the use that it begins with.
                self._row([(1.0, self.begins[k]), (-1.0, self.fast[k])], -1.0, 0.0)

    def _copies(self) -> None:
        """What is fetched was in slow memory before, wholly; what is written out is there."""
        c = self.c
        for k, begins in self.begins.items():
            b, slot = int(c.buffer[k]), int(c.slot[k])
            need = c.copy[b] / self.unit
            slots = [t for t in self._window(k) if (t > slot if c.write[k] else t < slot)]
            for t in slots:
                self.link[k, t] = self._real(0.0, need)
                self._row([(1.0, self.link[k, t]), (-need, self.there[k, t])], -np.inf, 0.0)
            moved = [(1.0, self.link[k, t]) for t in slots]
            if not c.write[k]:
                self._row([*moved, (-need, begins)], 0.0, 0.0)
            elif c.output[b]:
                drain = self.link[k, c.slots] = self._real(0.0, need, cost=1.0)
                self._row([(1.0, drain), (-need, self.there[k, c.slots - 1])], -np.inf, 0.0)
                self._row([*moved, (1.0, drain), (-need, begins)], 0.0, np.inf)
            else:
                self._row(moved, 0.0, need)
        for k in range(c.decisions):
            b = int(c.buffer[k])
            home = self.writer.get(b)
            if c.write[k] or home is None or home not in self.begins:
                continue
            slot = int(c.slot[k])
            self._ready(home, slot, [(1.0, self.fast[k])], 1.0)
            if k in self.begins:
                for t in range(int(c.made[b]) + 1, slot):
                    self._ready(home, t, [(-1.0, self.there[k, t])], 0.0)

    def _ready(self, home: int, slot: int, unless: _Terms, base: float) -> None:
        """Slow memory has a result by a slot, unless the terms and their base come to 0 or less.

        ``base`` less the terms is 1 where it must be there.
        """
        need = self.c.copy[self.c.buffer[home]] / self.unit
        out = [
            (1.0, self.link[home, t])
            for t in range(int(self.c.slot[home]) + 1, slot)
            if (home, t) in self.link
        ]
        # out >= need * (begins + (base - terms) - 1)
        terms = [(need * factor, index) for factor, index in unless]
        self._row([*out, (-need, self.begins[home]), *terms], need * (base - 1.0), np.inf)

    def _time(self) -> None:
        """An instruction takes its computing or its memory, whichever is longer, exactly."""
        c = self.c
        for t in range(c.slots):
            here = np.flatnonzero(c.slot == t)
            slowest, compute = float(c.slow[here].sum()) / self.unit, c.compute[t] / self.unit
            longest = max(slowest, compute)
            lasts = self._real(compute, longest, cost=1.0)
            saved = [((c.slow[k] - c.fast[k]) / self.unit, self.fast[k]) for k in here]
            self._row([(1.0, lasts), *saved], slowest, np.inf)
            computes = self._bit()
            self._row([(1.0, lasts), (longest, computes)], -np.inf, compute + longest)
            self._row([(1.0, lasts), *saved, (-longest, computes)], -np.inf, slowest)
            busy = [(1.0 + self.slack, index) for (_, at), index in self.link.items() if at == t]
            if busy:
                read = [(-c.slow[k] / self.unit, self.fast[k]) for k in here]
                self._row([*busy, *read, (-1.0, lasts)], -np.inf, -slowest)

    def _space(self) -> None:
        """Stays at the same time lie above or below each other.

        Sizes are shares of the memory: with bytes beside zeros and ones, HiGHS took a mapping for
        the optimum that was 4 % slower than another one.
        """
        c, room = self.c, 1.0
        if self.slack > _SLACKS[0]:
            room -= self.slack
        size = {k: float(c.size[c.buffer[k]]) / c.room for k in self.begins}
        for t in range(c.slots):
            terms = [(size[k], index) for (k, at), index in self.there.items() if at == t]
            if terms:
                self._row(terms, 0.0, room)
        stays = sorted(self.begins)
        for i, one in enumerate(stays):
            for two in stays[i + 1 :]:
                both = [t for t in self._window(one) if (two, t) in self.there]
                if not both:
                    continue
                below, above = self._bit(), self._bit()
                for low, top, first in ((one, two, below), (two, one, above)):
                    self._row(
                        [(1.0, self.address[low]), (-1.0, self.address[top]), (room, first)],
                        -np.inf,
                        room - size[low],
                    )
                for t in both:
                    self._row(
                        [
                            (1.0, below),
                            (1.0, above),
                            (-1.0, self.there[one, t]),
                            (-1.0, self.there[two, t]),
                        ],
                        -1.0,
                        np.inf,
                    )

    def solve(self, seconds: float) -> Mapping:
        """The optimum as a mapping, in whole ticks."""
        lines, columns, factors = [], [], []
        for i, (terms, _, _) in enumerate(self.rows):
            for factor, index in terms:
                lines.append(i)
                columns.append(index)
                factors.append(factor)
        matrix = csr_array((factors, (lines, columns)), shape=(len(self.rows), len(self.low)))
        result = milp(
            np.array(self.cost),
            constraints=LinearConstraint(
                matrix,
                np.array([low for _, low, _ in self.rows]),
                np.array([high for _, _, high in self.rows]),
            ),
            bounds=Bounds(np.array(self.low), np.array(self.high)),
            integrality=np.array(self.whole),
            options={"time_limit": seconds, "mip_rel_gap": 1e-6},
        )
        if result.status != 0:
            raise PlanError(
                f"mapper.milp: no proof of an optimum of {self.c.program.name} in {seconds:g} s "
                f"({result.message}); give mapper.milp.seconds more, or use hybrid"
            )
        return self._mapping(np.asarray(result.x))

    def _mapping(self, x: np.ndarray) -> Mapping:
        c = self.c
        stays: dict[int, tuple[int, int]] = {}
        for k, begins in self.begins.items():
            slots = [t for t in self._window(k) if x[self.there[k, t]] > 0.5]
            if x[begins] > 0.5:
                stays[k] = slots[0], slots[-1]
        fast = [x[index] > 0.5 for index in self.fast]
        due = self._due(fast, stays)
        actions = []
        for k in range(c.decisions):
            moved = k in due if c.write[k] else k in stays
            actions.append(DROP if not fast[k] else COPY if moved else NO_COPY)
        rectangles = tuple(
            Rectangle(int(c.buffer[k]), start, end, self._lies(x, stays, k), k)
            for k, (start, end) in stays.items()
        )
        mapping = Mapping(c, tuple(actions), rectangles, (), 0, "milp")
        return replace(mapping, moved=self._booked(mapping, stays, due))

    def _due(self, fast: Sequence[bool], stays: dict[int, tuple[int, int]]) -> dict[int, int]:
        """Results that slow memory must have from fast memory -> slot by which it must.

        The programme may use an idle link for copies that are not needed; to book those would take
        it from those that are.
        """
        c = self.c
        due: dict[int, int] = {}
        for k in range(c.decisions):
            home = self.writer.get(int(c.buffer[k]))
            if home not in stays:
                continue
            if c.write[k] and c.output[c.buffer[k]]:
                due[home] = min(due.get(home, c.slots + 1), c.slots + 1)
            elif not c.write[k] and (k in stays or not fast[k]):
                needed = stays[k][0] if k in stays else int(c.slot[k])
                due[home] = min(due.get(home, needed), needed)
        return due

    def _lies(self, x: np.ndarray, stays: dict[int, tuple[int, int]], k: int) -> int:
        """The lowest address above everything that lies below at the same time."""
        c, mine = self.c, x[self.address[k]]
        low = 0
        for other, (start, end) in stays.items():
            here = start <= stays[k][1] and end >= stays[k][0]
            if other != k and here and (x[self.address[other]], other) < (mine, k):
                low = max(low, self._lies(x, stays, other) + int(c.size[c.buffer[other]]))
        return low

    def _booked(
        self, mapping: Mapping, stays: dict[int, tuple[int, int]], due: dict[int, int]
    ) -> tuple[CopyTime, ...]:
        """Whole ticks of every copy: of those that may run, the one that must end first.

        What is left of an output that stays to the end is copied out after the last instruction.
        """
        c = self.c
        free = mapping.durations()
        for k, action in enumerate(mapping.actions):
            if action == DROP:
                free[c.slot[k]] -= c.slow[k]
        jobs: list[list[int]] = []
        for k, (start, end) in stays.items():
            need = int(c.copy[c.buffer[k]])
            if not c.write[k]:
                jobs.append([int(c.slot[k]) - 1, k, start, need])
            elif k in due:
                last = c.slots if end == c.slots - 1 else end
                jobs.append([min(due[k] - 1, last), k, int(c.slot[k]) + 1, need])
        moved: list[CopyTime] = []
        for t in range(c.slots):
            for job in sorted(jobs):
                _, k, first, need = job
                take = min(int(free[t]), need)
                if first <= t <= stays[k][1] and take > 0:
                    moved.append(CopyTime(int(c.buffer[k]), t, take, k))
                    free[t] -= take
                    job[3] -= take
        for _, k, _, need in jobs:
            if need and c.write[k] and c.output[c.buffer[k]]:
                moved.append(CopyTime(int(c.buffer[k]), c.slots, need, k))
        return tuple(moved)

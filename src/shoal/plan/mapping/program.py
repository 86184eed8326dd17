"""A program as memory sees it: instructions in order, what each reads and writes, and two memories.

Times are counted in whole picoseconds (*ticks*), so that what a decision saves and what the
whole program saves agree to the last digit.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from pydantic import Field

from shoal.core.config import Value
from shoal.core.errors import PlanError, require

TICK_S = 1e-12


class Buffer(Value):
    """A piece of memory.

    Args:
        name: unique in the program.
        nbytes: its size.
        alias_of: buffer whose memory it shares, such as the one that it is a view of.
        output: it must be in slow memory when the program ends.
    """

    name: str
    nbytes: int = Field(ge=1, le=2**50)
    alias_of: str = ""
    output: bool = False


class BufferAccess(Value):
    """Bytes of a buffer that an instruction reads or writes.

    Args:
        nbytes: how many; the whole buffer, if not given.
    """

    buffer: str
    nbytes: int | None = Field(default=None, ge=1, le=2**50)


class ProgramInstruction(Value):
    """One step of the program.

    Args:
        name: unique in the program.
        compute_s: seconds that it computes, without waiting for memory.
        reads: operands.
        writes: results.
    """

    name: str
    compute_s: float = Field(default=0.0, ge=0.0, le=1e5)
    reads: tuple[BufferAccess, ...] = ()
    writes: tuple[BufferAccess, ...] = ()


class TierSpec(Value):
    """A small fast memory in front of a large slow one.

    Args:
        fast_bytes: size of the fast memory.
        fast_bandwidth: byte/s between it and the processor.
        slow_bandwidth: byte/s of the slow memory, which copies between the two share.
        alignment: addresses in fast memory are multiples of it, bytes.
        fit: which hole a buffer goes to: the lowest that is large enough, or the smallest.
    """

    fast_bytes: int
    fast_bandwidth: float = 200e9
    slow_bandwidth: float = 20e9
    alignment: int = 256
    fit: str = "first"

    def model_post_init(self, _: object) -> None:
        """Refuse memories that cannot be.

        Raises:
            PlanError: a size or a bandwidth that is not positive, or a slow memory that is not.
        """
        for name in ("fast_bytes", "alignment"):
            size = getattr(self, name)
            require(size >= 1, f"tiers.{name}", size, expected="at least 1 byte", error=PlanError)
        for name in ("slow_bandwidth", "fast_bandwidth"):
            rate = getattr(self, name)
            require(
                math.isfinite(rate) and 1e3 <= rate <= 1e16,
                f"tiers.{name}",
                rate,
                expected="byte/s, from 1e3 to 1e16",
                hint="a memory that moves nothing has no mapping",
                error=PlanError,
            )
        require(
            self.fast_bandwidth > self.slow_bandwidth,
            "tiers.fast_bandwidth",
            self.fast_bandwidth,
            expected=f"more than that of the slow memory, {self.slow_bandwidth:g} B/s",
            error=PlanError,
        )
        require(
            self.fit in ("first", "best"),
            "tiers.fit",
            self.fit,
            expected="first or best",
            error=PlanError,
        )


class MappingProgram(Value):
    """Instructions in the order in which they run.

    A buffer is written by one instruction at most; one that none writes is an input, in slow
    memory from the beginning.

    Args:
        buffers: all memory that instructions name.
        instructions: the steps; :meth:`ordered` sorts those of a file.
    """

    name: str
    buffers: tuple[Buffer, ...]
    instructions: tuple[ProgramInstruction, ...]

    def root(self, name: str) -> str:
        """The buffer whose memory this one uses."""
        return self._roots[name]

    @cached_property
    def _roots(self) -> dict[str, str]:
        known = {buffer.name: buffer for buffer in self.buffers}
        roots = {}
        for name in known:
            seen, at = {name}, name
            while known[at].alias_of:
                at = known[at].alias_of
                if at not in known or at in seen:
                    raise PlanError(
                        f"program {self.name}: buffer {name!r} is an alias of {at!r}, "
                        + ("which there is not" if at not in known else "which is one of it")
                    )
                seen.add(at)
            roots[name] = at
        return roots

    def model_post_init(self, _: object) -> None:
        """Refuse what is no program.

        Raises:
            PlanError: names that occur twice or not at all, a buffer that is written twice, or
                read before it is written.
        """
        names = [buffer.name for buffer in self.buffers]
        twice = (
            {name for name in names if names.count(name) > 1}
            if len(set(names)) < len(names)
            else set()
        )
        if twice:
            raise PlanError(f"program {self.name}: two buffers are called {min(twice)!r}")
        require(
            bool(self.instructions),
            f"program {self.name}",
            "no instruction",
            expected="at least one",
            error=PlanError,
        )
        roots, sizes = self._roots, {buffer.name: buffer.nbytes for buffer in self.buffers}
        writer: dict[str, int] = {}
        for place, step in enumerate(self.instructions):
            for access in (*step.reads, *step.writes):
                where = f"program {self.name}, instruction {step.name!r}"
                if access.buffer not in roots:
                    raise PlanError(f"{where}: there is no buffer {access.buffer!r}")
                most = sizes[roots[access.buffer]]
                if access.nbytes is not None and access.nbytes > most:
                    raise PlanError(
                        f"{where}: {access.nbytes} bytes of {access.buffer!r}, which has {most}"
                    )
            for access in step.writes:
                root = roots[access.buffer]
                if root in writer:
                    first = self.instructions[writer[root]].name
                    raise PlanError(
                        f"program {self.name}: {first!r} and {step.name!r} both write {root!r}; "
                        "give every result a buffer of its own"
                    )
                writer[root] = place
        for place, step in enumerate(self.instructions):
            for access in step.reads:
                made = writer.get(roots[access.buffer], -1)
                if made >= place:
                    raise PlanError(
                        f"program {self.name}: {step.name!r} reads {access.buffer!r} before "
                        f"{self.instructions[made].name!r} writes it; put them in order, or "
                        "break the cycle"
                    )

    @classmethod
    def ordered(
        cls, name: str, buffers: Sequence[Buffer], instructions: Iterable[ProgramInstruction]
    ) -> MappingProgram:
        """A program from instructions in any order, each after what it reads.

        Raises:
            PlanError: instructions that wait for each other in a circle; names them.
        """
        steps = list(instructions)
        writer = {access.buffer: i for i, step in enumerate(steps) for access in step.writes}
        alias = {buffer.name: buffer.alias_of for buffer in buffers}
        for key in list(alias):
            made, at = writer.get(key), key
            while made is not None and alias.get(at):
                at = alias[at]
                writer.setdefault(at, made)
        needs: dict[int, list[int]] = {}
        for i, step in enumerate(steps):
            needs[i] = []
            for access in step.reads:
                at = access.buffer
                while at not in writer and alias.get(at):
                    at = alias[at]
                if at in writer:
                    needs[i].append(writer[at])
        if all(made < i for i, found in needs.items() for made in found):
            return cls(name=name, buffers=tuple(buffers), instructions=tuple(steps))
        try:
            order = list(graphlib.TopologicalSorter(needs).static_order())
        except graphlib.CycleError as cause:
            circle = " -> ".join(steps[i].name for i in reversed(cause.args[1]))
            raise PlanError(
                f"program {name}: instructions wait for each other: {circle}; a program with a "
                "cycle has no order"
            ) from None
        return cls(name=name, buffers=tuple(buffers), instructions=tuple(steps[i] for i in order))


class Compiled:
    """A program on two memories as arrays: what the game is played on.

    A *decision* is an instruction with a buffer that it reads or writes. Letters: T slots, one an
    instruction; D decisions; B buffers that are not aliases.

    Attributes:
        compute: ticks that each instruction computes, [T].
        slot: instruction of each decision, ascending, [D].
        buffer: its buffer, [D].
        write: whether it is written, [D].
        slow: ticks to read or write it in slow memory, [D].
        fast: the same in fast memory, [D].
        following: next decision about the same buffer, or -1, [D].
        left: decisions about the same buffer that follow, [D].
        size: bytes in fast memory in units of the alignment, [B].
        made: slot that writes each buffer, or -1 for an input, [B].
        last: last slot that uses it, [B].
        output: whether it must end in slow memory, [B].
        copy: ticks to copy it between the memories, [B].
        room: units of fast memory.
    """

    def __init__(self, program: MappingProgram, tiers: TierSpec) -> None:
        self.program, self.tiers = program, tiers
        used = {
            program.root(access.buffer): None
            for step in program.instructions
            for access in (*step.reads, *step.writes)
        }
        known = {buffer.name: buffer for buffer in program.buffers}
        self.names = list(used)
        place = {name: i for i, name in enumerate(self.names)}
        outputs = {program.root(b.name) for b in program.buffers if b.output}
        sizes = [known[name].nbytes for name in self.names]
        self.compute = np.array(
            [round(step.compute_s / TICK_S) for step in program.instructions], np.int64
        )
        rows: list[tuple[int, int, bool, int, int]] = []
        for slot, step in enumerate(program.instructions):
            for write, accesses in ((False, step.reads), (True, step.writes)):
                moved: dict[str, dict[str, int]] = {}
                for access in accesses:
                    root = program.root(access.buffer)
                    view = known[access.buffer].nbytes
                    # Reading the same operand twice moves it once.
                    moved.setdefault(root, {})[access.buffer] = access.nbytes or view
                for root, views in moved.items():
                    count = min(sum(views.values()), known[root].nbytes)
                    slow = self._ticks(count, tiers.slow_bandwidth)
                    fast = self._ticks(count, tiers.fast_bandwidth)
                    rows.append((slot, place[root], write, slow, fast))
        require(
            bool(rows),
            f"program {program.name}",
            "no access to memory",
            expected="at least one",
            error=PlanError,
        )
        self.slot = np.array([row[0] for row in rows], np.int64)
        self.buffer = np.array([row[1] for row in rows], np.int64)
        self.write = np.array([row[2] for row in rows], np.int64)
        self.slow = np.array([row[3] for row in rows], np.int64)
        self.fast = np.array([row[4] for row in rows], np.int64)
        count = len(self.names)
        self.following = np.full(len(rows), -1, np.int64)
        self.left = np.zeros(len(rows), np.int64)
        self.made = np.full(count, -1, np.int64)
        self.last = np.zeros(count, np.int64)
        after = np.full(count, -1, np.int64)
        for k in range(len(rows) - 1, -1, -1):
            b = self.buffer[k]
            self.following[k] = after[b]
            self.left[k] = self.left[after[b]] + 1 if after[b] >= 0 else 0
            after[b] = k
            self.last[b] = max(self.last[b], self.slot[k])
            if self.write[k]:
                self.made[b] = self.slot[k]
        unit = tiers.alignment
        self.size = np.array([-(-size // unit) for size in sizes], np.int64)
        self.output = np.array([name in outputs for name in self.names], np.int64)
        self.copy = np.array([self._ticks(size, tiers.slow_bandwidth) for size in sizes], np.int64)
        self.room = tiers.fast_bytes // unit

    @staticmethod
    def _ticks(nbytes: int, bandwidth: float) -> int:
        return max(1, round(nbytes / bandwidth / TICK_S))

    @property
    def slots(self) -> int:
        """Instructions."""
        return len(self.compute)

    @property
    def decisions(self) -> int:
        """Pairs of an instruction and a buffer."""
        return len(self.slot)

    @cached_property
    def all_slow(self) -> int:
        """Ticks of the program with nothing in fast memory."""
        return self.ticks(np.zeros(self.decisions, bool))

    @cached_property
    def all_fast(self) -> int:
        """Ticks with everything in fast memory, were it large enough and filled for nothing."""
        return self.ticks(np.ones(self.decisions, bool))

    def ticks(self, fast: np.ndarray) -> int:
        """Ticks of all instructions when these decisions use fast memory."""
        memory = np.zeros(self.slots, np.int64)
        np.add.at(memory, self.slot, np.where(fast, self.fast, self.slow))
        return int(np.maximum(self.compute, memory).sum())

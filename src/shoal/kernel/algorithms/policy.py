"""Policies: how an algorithm may run, where its tasks go, and how large they are.

A policy is a value; ``on`` gives one with another executor, ``with_`` one with other parameters.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shoal.core.errors import KernelError, require

Kind = Literal["static", "dynamic", "guided", "auto"]

# As native/algorithms.h counts them.
_EXECUTORS = ("inline", "fork_join", "work_stealing", "block")
_KINDS: tuple[Kind, ...] = ("static", "dynamic", "guided", "auto")


@dataclass(frozen=True, slots=True)
class Executor:
    """Who runs the tasks: inline, fork_join, work_stealing or block."""

    name: str


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a range is cut into tasks.

    Args:
        kind: static, dynamic, guided or auto.
        size: elements of a task, at least for guided; 0 leaves it to the algorithm.
    """

    kind: Kind
    size: int = 0

    def __post_init__(self) -> None:
        require(
            self.size >= 0,
            f"algorithms.{self.kind} size",
            self.size,
            expected="elements of a task, or 0 for the algorithm's choice",
            error=KernelError,
        )


@dataclass(frozen=True, slots=True)
class PolicyParameter:
    """One of the parameters that are no way of cutting."""

    name: Literal["cores", "fixed"]
    value: int


@dataclass(frozen=True, slots=True)
class Policy:
    """How, where and in what pieces.

    Args:
        name: seq, par or par_unseq.
        executor: who runs the tasks.
        chunks: how large they are.
        cores: threads at most; 0 for as many as PyTorch has.
        fixed: sums of the same bits with any number of threads, chunks and executors.
        task: the call returns a future at once.
    """

    name: Literal["seq", "par", "par_unseq"]
    executor: Executor
    chunks: Chunking
    cores: int = 0
    fixed: bool = False
    task: bool = False

    @property
    def parallel(self) -> bool:
        """Whether tasks may run in any order, on any thread."""
        return self.name != "seq"

    def on(self, executor: Executor) -> Policy:
        """The same on another executor.

        Raises:
            KernelError: ``seq`` is sent to threads.
        """
        require(
            self.parallel or executor == inline,
            "algorithms.seq.on",
            executor.name,
            expected="inline; use par for threads",
            error=KernelError,
        )
        return dataclasses.replace(self, executor=executor)

    def with_(self, *parameters: Chunking | PolicyParameter) -> Policy:
        """The same with other chunks, or with max_cores() or deterministic()."""
        made = self
        for parameter in parameters:
            if isinstance(parameter, Chunking):
                made = dataclasses.replace(made, chunks=parameter)
            elif parameter.name == "cores":
                made = dataclasses.replace(made, cores=parameter.value)
            else:
                made = dataclasses.replace(made, fixed=bool(parameter.value))
        return made

    def plan(self) -> tuple[int, int, int, int, int]:
        """The struct Plan of native/algorithms.h."""
        return (
            _EXECUTORS.index(self.executor.name),
            _KINDS.index(self.chunks.kind),
            self.chunks.size,
            self.cores,
            int(self.fixed),
        )


inline = Executor("inline")
"""The calling thread executes all tasks in order."""

fork_join = Executor("fork_join")
"""Threads start and end together; chunks are assigned to them in turn, or as they become free."""

work_stealing = Executor("work_stealing")
"""Each thread has a contiguous share; an idle thread steals half of another's remaining share."""

block = Executor("block")
"""One contiguous share per core, equal in every call of one length and in ``allocate``."""

numa = block


def static(size: int = 0) -> Chunking:
    """Equal chunks, assigned in turn; one per core if no size is given."""
    return Chunking("static", size)


def dynamic(size: int = 0) -> Chunking:
    """Equal chunks, taken as threads become free."""
    return Chunking("dynamic", size)


def guided(least: int = 0) -> Chunking:
    """Chunks that shrink with what is left, to no less than ``least`` (1024)."""
    return Chunking("guided", least)


def auto() -> Chunking:
    """The first hundredth is timed; the rest is cut into tasks of about 120 us.

    What takes under 20 us in all stays on the calling thread.
    """
    return Chunking("auto")


def max_cores(count: int) -> PolicyParameter:
    """No more threads than these."""
    require(count >= 1, "algorithms.max_cores", count, expected="1 or more", error=KernelError)
    return PolicyParameter("cores", count)


def deterministic(on: bool = True) -> PolicyParameter:
    """Reductions over a fixed tree of chunks of 8192 elements."""
    return PolicyParameter("fixed", int(on))


def task(policy: Policy) -> Policy:
    """The call returns a ``concurrent.futures.Future``; tasks are run one after the other."""
    return dataclasses.replace(policy, task=True)


seq = Policy("seq", inline, static())
"""Executes in order on the calling thread."""

par = Policy("par", fork_join, auto())
"""Executes in threads; in order within a chunk, except for sums, products, min and max."""

par_unseq = Policy("par_unseq", fork_join, auto())
"""Executes in threads and with vector instructions."""

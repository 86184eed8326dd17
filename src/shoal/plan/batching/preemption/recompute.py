"""Preemption by recomputation: what a request had in the cache is computed again.

Source: Kwon et al., PagedAttention, 2023, section 4.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Self

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir import (
    HostLink,
    KVManager,
    Machine,
    Request,
    SchedulerLimits,
    ServeWork,
    StepCost,
    Transfer,
)
from shoal.ir.serving import Fetched


@part
class Recompute:
    """Recompute a preempted request; nothing is copied, and no host memory is used."""

    traits: ClassVar[frozenset[str]] = frozenset({"reads_no_clock", "recomputes_cache"})

    @classmethod
    def candidates(cls, work: ServeWork, machine: Machine) -> Iterator[Self]:
        """For every workload."""
        yield cls()

    def build(
        self,
        kv: KVManager,
        limits: SchedulerLimits,
        *,
        host_tokens: int = 0,
        link: HostLink | None = None,
        cost: StepCost | None = None,
    ) -> RecomputePreemption:
        """See :class:`~shoal.ir.engine.PreemptPart`.

        Raises:
            ConfigError: host memory is given, and would not be used.
        """
        require(
            host_tokens == 0,
            "host_tokens",
            host_tokens,
            expected="none, since preempt = recompute copies nothing",
            hint="set preempt = swap or preempt = auto",
        )
        return RecomputePreemption(kv)


class RecomputePreemption:
    """The preemption that :class:`Recompute` builds: blocks are freed, and that is all."""

    def __init__(self, kv: KVManager) -> None:
        self.kv = kv

    @property
    def moving(self) -> bool:
        return False

    def take(self, request: Request) -> None:
        self.kv.free(request)

    def fetch(self, request: Request, running: int) -> Fetched:
        return "ready"

    def wait(self, blocks: Sequence[int]) -> None:
        """See :class:`~shoal.ir.engine.Preemption`."""

    def drop(self, request: Request, *, keep: bool) -> None:
        self.kv.free(request)

    def kept(self, request: Request) -> int:
        return 0

    def launch(
        self, now: float, *, computing: bool, busy: bool
    ) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
        return (), ()

    def settle(self, done: Iterable[int], now: float) -> None:
        """See :class:`~shoal.ir.engine.Preemption`."""

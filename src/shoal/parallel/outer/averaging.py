"""What the parts with rounds share: options, checks, estimate, and how a run of them begins.

A worker is one data-parallel rank or ``within`` neighbouring ones, with all ranks of their tensor,
context and pipeline groups. Inside a worker a step is what it is everywhere; after ``tau`` steps
the workers average what the round has changed, between ranks with the same place in their workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from annotated_types import Ge

from shoal.core.errors import ConfigError, require
from shoal.core.parts import Choice, part
from shoal.core.traits import traits
from shoal.ir import Estimate, Interval, Machine, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.outer.rounds import Rounds
    from shoal.parallel.outer.rule import Rule, Segments
    from shoal.parallel.protocols import Ranks

LONGEST = 48
"""Most steps of a round that ``tau: auto`` chooses (Sun et al., 2024, table 2)."""

# A round that never ends has no average: what is left is a worker's own step.
_ENDLESS = 2**62


@part
class Averaging(ABC):
    """Workers make local steps and average their changes once per round.

    Args:
        tau: optimizer steps of a round; auto is the smallest number that hides the all-reduce, by
            the plan's estimate, and at most 48.
        within: neighbouring data-parallel ranks that are one worker: they sum their gradients in
            every step.
        sharded: each worker keeps and updates its share of the outer state, not all of it.
        dtype: dtype of changes in communication; bf16 halves the bytes of the all-reduce, and so
            the smallest number of steps that hides it. x and the outer state keep the dtype of the
            parameters.
    """

    tau: Annotated[int, Ge(1)] | Literal["auto"] = 8
    within: Annotated[int, Ge(1)] = 1
    sharded: bool = False
    dtype: Literal["fp32", "bf16"] = "fp32"

    delayed: ClassVar[bool] = False
    """The average is applied a round late, so that it travels meanwhile."""
    momentum: ClassVar[bool] = False
    """The outer update keeps a momentum."""

    def __post_init__(self) -> None:
        require(
            self.dtype == "fp32" or not self.sharded,
            "sync.dtype",
            self.dtype,
            expected="fp32 with sharded, where parameters travel and not their changes",
        )

    @classmethod
    def between_groups(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """With the ranks of a node as a worker, or those of a site where there are several.

        With rounds as long as hide an average; each worker with all of the outer state, or, where
        memory is short, with its share.
        """
        split = work.job.parallel
        groups = machine.sites if machine.sites > 1 else machine.nodes
        within, rest = divmod(machine.num_devices // groups, split.tp * split.cp * split.pp)
        if groups > 1 and not rest and 1 <= within < split.dp and split.dp % within == 0:
            for sharded in (False, True):
                yield cls(tau="auto", within=within, sharded=sharded)

    @abstractmethod
    def rule(self, like: Tensor, segments: Segments) -> Rule:
        """The outer update of elements that lie as ``like`` [P]."""

    def workers(self, dp: int) -> int:
        """Number of workers among ``dp`` data-parallel ranks.

        Raises:
            ConfigError: they are not a whole number.
        """
        require(
            dp % self.within == 0,
            "sync.within",
            self.within,
            expected=f"a divisor of parallel.dp = {dp}",
        )
        return dp // self.within

    def steps(self, work: Work, machine: Machine) -> int:
        """Steps of a round: those that were given, or the fewest that hide the average."""
        if self.tau != "auto":
            return self.tau
        once, alone = self._average_s(work, machine), self._alone_s(work, machine)
        return min(LONGEST, max(1, -int(-once // alone))) if alone > 0 else 1

    def kept_bytes(self, work: Work) -> float:
        """Bytes of message buffer, x and momentum; a share of all but the buffer if sharded."""
        copies = 2.0 + self.momentum + (0.5 if self.dtype == "bf16" else 0.0)
        if self.sharded:
            copies = 1 + (3 + self.momentum) / self.workers(work.job.parallel.dp)
        return copies * self._bytes(work)

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Of one step: its share of the average's bytes, and of the seconds it is waited for."""
        from shoal.cost.price.rates import data_link

        split = work.job.parallel
        workers = self.workers(split.dp)
        tau = self.steps(work, machine)
        seconds = self._average_s(work, machine) / tau
        if self.delayed and seconds:
            seconds = max(0.0, seconds - self._alone_s(work, machine))
        link = data_link(machine, split)
        sent = 2.0 * self._wire(work) * (workers - 1) / workers / tau
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"collective": seconds},
            wire_bytes={link.scope: sent} if sent and link is not None else {},
            memory_bytes={"optimizer": self.kept_bytes(work)},
        )

    def apply(self, model: nn.Module, owned: Mapping[str, Tensor], ranks: Ranks) -> Rounds:
        """Begin the first round.

        Raises:
            ConfigError: the model keeps running statistics, or no plan has chosen ``tau``.
        """
        from shoal.parallel.outer.rounds import ShardedRounds, WholeRounds

        if self.tau == "auto":
            raise ConfigError(
                "sync.tau = auto: no plan has chosen it; start the run with shoal train, or give "
                "a number"
            )
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, value in model.state_dict().items():
            if name not in known and value.is_floating_point():
                raise ConfigError(
                    f"sync: the model keeps the running statistic {name}, of which each worker "
                    "would have its own; use sync: every_step, or a norm without statistics"
                )
        if self.sharded:
            return ShardedRounds(owned, ranks, self.rule, tau=self.tau, delayed=self.delayed)
        return WholeRounds(
            owned, ranks, self.rule, tau=self.tau, delayed=self.delayed, half=self.dtype == "bf16"
        )

    def _wire(self, work: Work) -> float:
        """Bytes of what one rank averages, as it travels."""
        return self._bytes(work) * (0.5 if self.dtype == "bf16" else 1.0)

    def _bytes(self, work: Work) -> float:
        """What one rank averages: its part of the model, fp32, that its worker shares out."""
        from shoal.cost.price.experts import held_parameters
        from shoal.cost.price.shares import sharers

        whole = 4.0 * sum(held_parameters(work.shape, work.job.parallel))
        return whole / (
            sharers(work.job) if "shards_optimizer" in traits("shard", work.job.shard) else 1
        )

    def _average_s(self, work: Work, machine: Machine) -> float:
        """Seconds of one average: an all-reduce over the workers."""
        from shoal.cost.price.collectives import all_reduce_s
        from shoal.cost.price.rates import data_link

        split = work.job.parallel
        return all_reduce_s(self._wire(work), self.workers(split.dp), data_link(machine, split))

    def _alone_s(self, work: Work, machine: Machine) -> float:
        """Seconds of a worker's step without any average."""
        from shoal.cost.training.step import estimate

        options = {"tau": _ENDLESS, "within": self.within}
        alone = work.job.model_copy(update={"sync": Choice(name="local_sgd", options=options)})
        return estimate(work.model_copy(update={"job": alone}), machine).step_s.value
